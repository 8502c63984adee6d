"""A task whose server and evaluator query arXiv, in a network with a fake arXiv server."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.arxiv.authority import Authority
from tests.arxiv.container import arxiv
from tests.probe.clients import playing
from tests.probe.serving import Served, serving

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

HERE = Path(__file__).parent
PAPERS: list[dict[str, Any]] = json.loads((HERE / "papers.json").read_text())


@pytest.fixture
async def served(
    tmp_path: Path, docker_engine: Any, test_image: str, docker_network: str
) -> AsyncGenerator[Served]:
    authority = Authority()
    suite = await anyio.to_thread.run_sync(shutil.copytree, HERE / "suite", tmp_path / "suite")
    (suite / "configs/authority.pem").write_text(authority.pem)
    settings: dict[str, Any] = {
        "suite": (str(suite),),
        "provider": "docker",
        "provider_option": (f"network={docker_network}",),
    }
    with arxiv(docker_engine, test_image, docker_network, PAPERS, authority):
        async with serving(tmp_path / "state", **settings) as served:
            yield served


async def test_server_and_evaluator_reach_the_networks_services(served: Served) -> None:
    async with playing(served, "find-paper", "task") as player:
        (address,) = (await player.call("papers__search", query="ti:stilts")).structured_content
        assert not (await player.call("papers__download", address=address, file="paper.pdf")).is_error
        await player.call("claim_done")
        verdict = (await player.call("evaluate")).structured_content
    assert (verdict["status"], verdict["reward"]) == ("scored", 1.0)
    folder = served.state / "episodes" / player.episode_id
    log = json.loads((folder / "traj_log.json").read_text())
    calls = [
        call["function"]["name"] for message in log["messages"] for call in message.get("tool_calls", ())
    ]
    assert calls == ["papers-search", "papers-download"]
    assert json.loads((folder / "eval_res.json").read_text())["pass"] is True
    assert (verdict["agent_network"], verdict["grader_network"]) == ("outbound", "outbound")
