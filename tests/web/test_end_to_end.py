"""A task is recorded against stand-ins for its sites, and replayed after they are switched off."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.plugins.web.proxy import AUTHORITY_FOLDER
from decathlon_mcp.plugins.web.recording import FOLDER, Recording, find_recordings
from tests.probe.clients import playing
from tests.probe.serving import Served, folder_of, serving
from tests.web.running import needs_mitmdump
from tests.web.sites import Sites, sites

SUITE = Path(__file__).parents[1] / "arxiv" / "suite"
pytestmark = pytest.mark.anyio
STAND_IN = Path(__file__).with_name("fake_mitmdump.py")


class Arxiv(BaseHTTPRequestHandler):
    """arXiv with a single paper, in its third version."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        entry = "<entry><id>http://arxiv.org/abs/0001.00002v3</id><title>On Stilts</title></entry>"
        feed = f'<feed xmlns="http://www.w3.org/2005/Atom">{entry}</feed>'
        body = (feed if self.path.startswith("/api/") else self.path).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@asynccontextmanager
async def recording_server(
    folder: Path, mode: str, running: Sites | None, **settings: Any
) -> AsyncGenerator[Served]:
    suite = folder / "suite"
    if not suite.exists():
        shutil.copytree(SUITE, suite)
    values: dict[str, Any] = {"suite": (str(suite),), "provider": "host", "web": mode, **settings}
    if running is not None:
        values |= {"web_address": running.addresses, "web_authorities": running.authority}
    async with serving(folder / "state", **values) as served:
        yield served


async def play(served: Served, query: str) -> dict[str, Any]:
    """Search, download the first paper that is found, and return the verdict."""
    async with playing(served, "find-paper", "task") as player:
        if query:
            papers = (await player.call("papers__search", query=query)).structured_content
            for address in sorted(papers or ())[-1:]:
                await player.call("papers__download", address=address, file="paper.pdf")
        await player.call("claim_done")
        return (await player.call("evaluate")).structured_content


def launch_time(folder: Path, verdict: dict[str, Any]) -> str:
    """The time that an episode was played at, from its log."""
    log = json.loads((folder_of(folder / "state", verdict["episode"]) / "traj_log.json").read_text())
    return log["config"]["launch_time"]


@pytest.mark.slow
@needs_mitmdump
async def test_what_was_recorded_is_replayed_after_the_sites_are_gone(tmp_path: Path) -> None:
    with sites(tmp_path, {("arxiv.org", "export.arxiv.org"): Arxiv}) as running:
        async with recording_server(tmp_path, "record", running) as served:
            recorded = await play(served, "ti:stilts")
        asked = len(running.asked)
    assert (recorded["reward"], recorded["agent_network"]) == (1.0, "none")
    assert asked == recorded["web"]["recorded"] == 4
    async with recording_server(tmp_path, "replay", None) as served:
        again, other = await play(served, "ti:stilts"), await play(served, "ti:another")
        idle = await play(served, "")
    assert (again["reward"], again["web"]) == (
        1.0,
        {"mode": "replay", "replayed": 4, "recorded": 0, "passed": 0, "missed": 0, "problem": ""},
    )
    assert (other["reward"], other["web"]["missed"]) == (0.0, 1)
    assert (idle["reward"], idle["web"]["replayed"]) == (0.0, 2)
    (path,) = find_recordings(tmp_path / "state" / FOLDER)
    with Recording(path) as recording:
        assert {exchange.part for exchange in recording.exchanges()} == {"agent", "grader"}
        # Of the other two rollouts: 2 and 2 of the evaluator's requests, and a search that is missing.
        assert recording.summary().rate == pytest.approx(4 / 5)
        fixed = recording.launch_time.strftime("%Y-%m-%d %H:%M:%S")
    launched = {launch_time(tmp_path, verdict) for verdict in (recorded, again, other)}
    assert len(launched) == 1
    assert fixed in launched.pop()
    key = tmp_path / "state" / AUTHORITY_FOLDER / "mitmproxy-ca.pem"
    assert (key.stat().st_mode & 0o777, key.parent.stat().st_mode & 0o777) == (0o600, 0o700)


async def test_every_sandbox_of_a_task_that_needs_the_web_has_a_session(tmp_path: Path) -> None:
    async with recording_server(tmp_path, "record", None, web_proxy=STAND_IN) as served:
        first, second = await play(served, ""), await play(served, "")
    # The stand-in counts sessions, and answers no request: the evaluator fails.
    assert [verdict["web"]["replayed"] for verdict in (first, second)] == [2, 4]
    assert (first["reward"], first["agent_network"], first["grader_network"]) == (0.0, "none", "none")
    (path,) = find_recordings(tmp_path / "state" / FOLDER)
    with Recording(path) as recording:
        assert (recording.id.suite, recording.id.task) == ("arxiv", "find-paper")
    assert launch_time(tmp_path, first) == launch_time(tmp_path, second)


async def test_a_task_without_a_recording_cannot_be_replayed(tmp_path: Path) -> None:
    async with recording_server(tmp_path, "replay", None, web_proxy=STAND_IN) as served:
        catalogue = served.episodes.catalogue
        suite, task = catalogue.find("find-paper")
        (sentence,) = catalogue.missing_sentences(suite, task)
    assert "needs a recording of its web for revision" in sentence
    assert "--web record" in sentence
