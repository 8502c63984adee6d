"""A Canvas and shops for every episode, from containers that upstream's set-up has prepared.

`pytest tools/fidelity/prepared_services.py` starts stand-ins for these containers (`tools/fidelity/canvas`,
`tools/fidelity/woocommerce`), prepares them while they run, builds the images of `images/canvas` and
`images/woocommerce` from them, and plays with those. It takes minutes, so it is not collected by
default. Requires a Docker engine, the tests' image and Debian's registry. `-s` prints how long the services
take to start.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.docker.image import STARTER_IMAGE
from decathlon_mcp.suites.profile import packaged_profiles
from tests.probe.clients import Player, playing
from tests.probe.serving import Served, serving
from tools.fidelity.services_suite import copy_suite

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.timeout(1800)]

PROJECT = Path(__file__).parents[2]
HERE = Path(__file__).parent
PREFIX = "decathlon-test-deployed"
CANVAS, SHOP = "decathlon-test-canvas:latest", "decathlon-test-woocommerce:latest"
MYSQL = {"ROOT_PASSWORD": "root", "DATABASE": "wordpress", "USER": "wordpress", "PASSWORD": "wppass123"}
READY_SECONDS = 120.0
CLIENT = '''
"""Prints what a service answers: `client.py URL [BODY]`."""
import ssl, sys, urllib.request

def ask(url, body=None):
    context = ssl._create_unverified_context()
    return urllib.request.urlopen(url, body and body.encode(), 60, context=context).read().decode()

if __name__ == "__main__":
    print(ask(*sys.argv[1:]))
'''
PREPROCESS = """
from utils.client import ask
ask("http://localhost:10001/courses", "preprocess")
"""
EVALUATION = """
import json, sys
from utils.client import ask
courses = json.loads(ask("https://localhost:20001/courses"))["courses"]
shop = json.loads(ask("http://localhost:10003/"))
print(courses, shop)
sys.exit(0 if courses[1:] == ["preprocess", "agent"] and shop["products"][1:] == ["tea"] else 1)
"""


def docker(*arguments: str) -> str:
    return subprocess.run(("docker", *arguments), check=True, capture_output=True, text=True).stdout


def run(name: str, image: str, *options: str) -> str:
    """Start a container of a stand-in; returns its name."""
    docker("run", "--detach", "--name", f"{PREFIX}-{name}", *options, image)
    return f"{PREFIX}-{name}"


def prepare(container: str, port: int, name: str) -> None:
    """Wait for the service at this port of a container, and add something, as upstream's set-up does."""
    send = f"import urllib.request as r; print(r.urlopen('http://127.0.0.1:{port}/', b'{name}').read())"
    deadline = time.monotonic() + READY_SECONDS
    while True:
        try:
            docker("exec", container, "python3.11", "-c", send)
            return
        except subprocess.CalledProcessError:
            assert time.monotonic() < deadline, docker("logs", container)
            time.sleep(0.5)


def build(script: str, *arguments: str) -> None:
    base = os.environ.get("BASE", STARTER_IMAGE)
    subprocess.run([PROJECT / script, *arguments], check=True, env={**os.environ, "BASE": base})


@pytest.fixture(scope="module")
def images(test_image: str) -> None:
    """Build the images of the services from containers that are running."""
    canvas, shop = f"{PREFIX}-canvas:latest", f"{PREFIX}-shop:latest"
    database = f"{PREFIX}-database:latest"
    base = ("--network", "host", "--quiet", "--build-arg", f"BASE={test_image}")
    docker("build", *base, "--tag", canvas, str(HERE / "canvas"))
    docker("build", *base, "--tag", shop, str(HERE / "woocommerce"))
    docker("build", *base, "--tag", database, "--target", "database", str(HERE / "woocommerce"))
    names = [f"{PREFIX}-{name}" for name in ("canvas", "woo-wp", "woo-db")]
    try:
        run("canvas", canvas, "--network", "none")
        variables = [word for name, value in MYSQL.items() for word in ("--env", f"MYSQL_{name}={value}")]
        store = run("woo-db", database, "--network", "none", *variables)
        access = {"HOST": "127.0.0.1", **{name: MYSQL[name] for name in ("USER", "PASSWORD")}}
        access["NAME"] = MYSQL["DATABASE"]
        own = [word for name, value in access.items() for word in ("--env", f"WORDPRESS_DB_{name}={value}")]
        run("woo-wp", shop, "--network", f"container:{store}", *own)
        prepare(names[0], 3000, "prepared")
        prepare(names[1], 80, "prepared")
        build("images/canvas/build", names[0], CANVAS)
        build("images/woocommerce/build", names[1], names[2], SHOP)
    finally:
        for name in names:
            subprocess.run(("docker", "rm", "--force", "--volumes", name), capture_output=True, check=False)


@pytest.fixture(scope="module")
async def served(
    images: None, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    """Serve the probe suite with a task that has both services, configured as in the profile `toolathlon`."""
    suite = copy_suite(
        tmp_path_factory.mktemp("suites"),
        "serviced",
        preprocess=PREPROCESS,
        evaluation=EVALUATION,
        utils={"client.py": CLIENT},
    )
    profile = packaged_profiles()["toolathlon"]
    settings = yaml.safe_load((suite / "suite.yaml").read_text())
    settings["services"] = {name: profile["services"][name] for name in ("canvas", "woocommerce")}
    for name, image in (("canvas", CANVAS), ("woocommerce", SHOP)):
        settings["services"][name]["private"]["image"] = image
    settings["tasks"]["serviced"] = {"services": ["canvas", "woocommerce"]}
    (suite / "suite.yaml").write_text(json.dumps(settings))
    options: dict[str, Any] = {"servers_seconds": 600, "set_up_seconds": 900}
    state = tmp_path_factory.mktemp("state")
    async with serving(state, suite=(str(suite),), provider="docker", **options) as served:
        yield served


async def ask(player: Player, *arguments: str) -> Any:
    words = " ".join(f"'{argument}'" for argument in arguments)
    reply = await player.text("probe__shell", command=f"python3 ../utils/client.py {words}")
    return json.loads(reply)


async def verdict_of(player: Player) -> dict[str, Any]:
    await player.call("claim_done")
    return (await player.call("evaluate")).structured_content


async def test_episodes_side_by_side_have_what_was_prepared_and_their_own_changes(served: Served) -> None:
    started = time.perf_counter()
    async with playing(served, "serviced", "task") as one, playing(served, "serviced", "task") as other:
        assert await ask(one, "http://localhost:10001/courses", "agent") == ["3"]
        sys.stdout.write(f"\ntwo episodes with both services: {time.perf_counter() - started:.0f} s\n")
        canvas = await ask(one, "https://localhost:20001/courses")
        assert canvas["courses"] == ["prepared", "preprocess", "agent"]
        assert canvas["host"] == "localhost:10001", "as behind upstream's proxy"
        shop = await ask(one, "http://localhost:10003/")
        expected = {"host": "localhost:10003", "uploaded": "prepared", "products": ["prepared"]}
        assert shop == expected, "files and database of the prepared containers"
        shop = await ask(one, "http://localhost:10003/", "tea")
        assert (shop["uploaded"], shop["products"]) == ("tea", ["prepared", "tea"])
        assert (await ask(other, "http://localhost:10001/courses"))["courses"] == ["prepared", "preprocess"]
        assert await ask(other, "http://localhost:10003/") == expected
        correct, empty = await verdict_of(one), await verdict_of(other)
    assert (correct["status"], correct["reward"], correct["agent_network"]) == ("scored", 1, "none"), correct
    assert (empty["status"], empty["reward"]) == ("scored", 0), empty


async def test_nothing_is_left_of_a_closed_episode(served: Served, docker_engine: Any) -> None:
    def left(what: str) -> list[str]:
        containers = docker_engine.containers(all=True)
        return [name for each in containers for name in each["Names"] if what in name]

    async with playing(served, "serviced", "task") as player:
        await player.text("probe__echo", text="ready")
        episode = served.find(player.episode_id)
        names = left(episode.spec.public_id)
        assert len(names) == 3
        mounts = [mount for name in names for mount in docker_engine.inspect_container(name)["Mounts"]]
        volumes = {mount["Name"] for mount in mounts if mount["Type"] == "volume"}
        assert volumes, "the image of WordPress has a volume"
    await episode.state.reach(Phase.ENDED)
    with anyio.fail_after(60):
        while left(episode.spec.public_id):  # noqa: ASYNC110
            await anyio.sleep(0.05)
    remaining = {volume["Name"] for volume in docker_engine.volumes()["Volumes"] or ()}
    assert not volumes & remaining
