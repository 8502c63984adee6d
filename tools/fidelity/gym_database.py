"""A separate database for every episode, as toolathlon_gym's tasks need.

`pytest tools/fidelity/gym_database.py` builds an image from a small dump, which takes a minute, so it is
not collected by default. Requires a Docker engine, the tests' image and Debian's registry.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import yaml

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.docker.image import STARTER_IMAGE
from decathlon_mcp.suites.profile import packaged_profiles
from tests.probe.clients import Player, playing
from tests.probe.serving import Served, serving
from tools.fidelity.services_suite import copy_suite

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(600)]

IMAGE = "decathlon-test-postgres:latest"
BUILD = Path(__file__).parents[2] / "images" / "postgres" / "build"
ROWS = 200_000
DUMP = f"""
CREATE SCHEMA shop;
CREATE TABLE shop.orders (id serial PRIMARY KEY, what text NOT NULL);
INSERT INTO shop.orders (what) SELECT 'old ' || number FROM generate_series(1, {ROWS}) AS number;
CREATE EXTENSION pg_trgm;
CREATE SCHEMA email;
CREATE TABLE email.messages (id serial PRIMARY KEY);
CREATE TABLE email.sent_log (
    message_id integer CONSTRAINT sent_log_message_id_fkey REFERENCES email.messages (id)
);
INSERT INTO email.messages VALUES (1);
INSERT INTO email.sent_log VALUES (1);
"""
QUERY = '''
"""Client of PostgreSQL's protocol: runs one query without a password, returns its rows or its error."""
import socket, struct, sys

def run_query(query, user="eigent", database="toolathlon_gym"):
    with socket.create_connection(("localhost", 5432), 30) as connection:
        stream = connection.makefile("rwb")
        startup = f"user\\0{user}\\0database\\0{database}\\0\\0".encode()
        stream.write(struct.pack("!ii", len(startup) + 8, 196608) + startup)
        text = query.encode() + b"\\0"
        stream.write(b"Q" + struct.pack("!i", len(text) + 4) + text)
        stream.flush()
        rows, ready = [], 0
        while ready < 2:
            kind = stream.read(1)
            body = stream.read(struct.unpack("!i", stream.read(4))[0] - 4)
            if kind == b"D":
                (size,) = struct.unpack("!i", body[2:6])
                rows.append(body[6:6 + size].decode())
            elif kind == b"E":
                return body.replace(b"\\0", b" ").decode()
            ready += kind == b"Z"
        return " ".join(rows)

if __name__ == "__main__":
    print(run_query(*sys.argv[1:]))
'''
EVALUATION = """
import sys
from utils.query import run_query
rows = run_query("SELECT what FROM shop.orders WHERE what NOT LIKE 'old %'")
print(rows)
sys.exit(0 if rows == "pear apple" else 1)
"""
PREPROCESS = """
from utils.query import run_query
run_query("INSERT INTO shop.orders (what) VALUES ('pear')")
"""


@pytest.fixture(scope="module")
def image(test_image: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    dump = tmp_path_factory.mktemp("dump") / "init.sql"
    dump.write_text(DUMP)
    base = os.environ.get("BASE", STARTER_IMAGE)
    subprocess.run([BUILD, dump, IMAGE], check=True, env={**os.environ, "BASE": base})
    return IMAGE


@pytest.fixture(scope="module")
async def served(
    image: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    """Serve the probe suite with a task that has a database, configured as in the profile `gym`."""
    suite = copy_suite(
        tmp_path_factory.mktemp("suites"),
        "ordering",
        preprocess=PREPROCESS,
        evaluation=EVALUATION,
        utils={"query.py": QUERY},
    )
    gym = packaged_profiles()["gym"]
    suite_file = yaml.safe_load((suite / "suite.yaml").read_text())
    suite_file["services"] = {"postgres": {**gym["services"]["postgres"], "image": image, "available": True}}
    suite_file["tasks"]["ordering"] = {"services": ["postgres"]}
    (suite / "suite.yaml").write_text(json.dumps(suite_file))
    async with serving(tmp_path_factory.mktemp("state"), suite=(str(suite),), provider="docker") as served:
        yield served


async def run_query(player: Player, query: str, *options: str) -> str:
    arguments = " ".join(f'"{argument}"' for argument in (query, *options))
    return (await player.text("probe__shell", command=f"python3 ../utils/query.py {arguments}")).strip()


async def claim_and_evaluate(player: Player) -> dict[str, Any]:
    await player.call("claim_done")
    return (await player.call("evaluate")).structured_content


async def test_only_a_correct_attempt_is_rewarded(served: Served) -> None:
    async with playing(served, "ordering", "task") as player:
        empty = await claim_and_evaluate(player)
    async with playing(served, "ordering", "task") as player:
        assert await run_query(player, "SELECT count(*) FROM shop.orders") == str(ROWS + 1)
        await run_query(player, "INSERT INTO shop.orders (what) VALUES ('apple')")
        correct = await claim_and_evaluate(player)
    assert (empty["status"], empty["reward"], empty["evaluator_output"].strip()) == (
        "scored",
        0,
        "pear",
    )
    assert (correct["status"], correct["reward"], correct["agent_network"]) == ("scored", 1, "none"), correct


async def test_sent_messages_can_be_deleted(served: Served) -> None:
    async with playing(served, "ordering", "task") as player:
        await run_query(player, "DELETE FROM email.messages")
        assert await run_query(player, "SELECT count(*) FROM email.sent_log") == "0"


async def test_databases_of_episodes_are_separate_and_agents_are_not_superusers(served: Served) -> None:
    async with playing(served, "ordering", "task") as one, playing(served, "ordering", "task") as other:
        await run_query(one, "DROP SCHEMA shop CASCADE")
        assert "does not exist" in await run_query(one, "SELECT count(*) FROM shop.orders")
        assert await run_query(other, "SELECT count(*) FROM shop.orders") == str(ROWS + 1)
        assert "42501" in await run_query(other, "COPY (SELECT 1) TO PROGRAM 'id'"), "insufficient_privilege"


async def test_a_lost_database_gives_no_reward(served: Served, docker_engine: Any) -> None:
    async with playing(served, "ordering", "task") as player:
        await player.text("probe__echo", text="ready")
        episode = served.episodes.find(player.episode_id, served.episodes.live[-1].spec.owner)
        docker_engine.kill(f"decathlon-{episode.spec.public_id}-postgres")
        await episode.state.reach(Phase.ENDED)
    assert episode.verdict is not None
    assert (episode.verdict.status, episode.verdict.reward) == ("sandbox_lost", None)
