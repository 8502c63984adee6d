"""A task whose evaluator looks at the agent's own machine: what still runs there when it does."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
import pytest
import yaml

from decathlon_mcp.episodes.state import Phase
from tests.probe.clients import EpisodeResolver, Player, playing
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE, Served, serving

pytestmark = pytest.mark.anyio

LOOK = '''
import os
from pathlib import Path

def running(workspace, name):
    """Is there a process of that name and this workspace?"""
    token = (Path(workspace) / "token").read_text().strip()
    found = 0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                found += (process / "cmdline").read_bytes().startswith(f"{name} {token}".encode())
            except OSError:
                pass
    return found
'''
MAIN = """
import sys
from tasks.probe.forwarding.evaluation.look import running
workspace = sys.argv[sys.argv.index("--agent_workspace") + 1]
sys.exit(0 if running(workspace, "forward") == 1 and not running(workspace, "intruder") else 1)
"""
FUNCTION = """
from tasks.probe.forwarding.evaluation.look import running

def evaluate(workspace):
    return {"forwards": running(workspace, "forward"), "intruders": running(workspace, "intruder")}
"""
RUBRIC = """
function: evaluation/evaluator.py:evaluate
weights: {forwards: 1, intruders: -1, success: 2}
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The suite of the probe with one task more."""
    suite = tmp_path_factory.mktemp("suites") / "suite"
    shutil.copytree(SUITE, suite)
    task = suite / "tasks" / "probe" / "forwarding"
    shutil.copytree(suite / "tasks" / "probe" / "find-answer", task)
    for name, text in {
        "look.py": LOOK,
        "main.py": MAIN,
        "evaluator.py": FUNCTION,
        "rubric.yaml": RUBRIC,
    }.items():
        (task / "evaluation" / name).write_text(text)
    said = yaml.safe_load((suite / "suite.yaml").read_text())
    said["tasks"]["forwarding"] = {"in_place": True, "spared": ["forward *"], "grader_network": True}
    (suite / "suite.yaml").write_text(json.dumps(said))
    return suite


@pytest.fixture(scope="module")
async def served(
    provider: str, suite: Path, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), suite=(str(suite),), provider=provider) as served:
        yield served


async def leave_running(player: Player, *names: str) -> None:
    """Processes of these names, with a token of this episode, out of their server's session."""
    token = player.episode_id[:16]
    await player.call("probe__write", path="token", text=token)
    for name in names:
        command = f"exec -a '{name} {token}' sleep 1000"
        await player.call("probe__shell", command=f'setsid bash -c "{command}" >/dev/null 2>&1 &')
    for name in names:
        count = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^{name} {token}'"
        while (await player.text("probe__shell", command=count)).strip() != "1":  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def verdict_on(player: Player) -> dict[str, Any]:
    await player.call("claim_done")
    return (await player.call("evaluate")).structured_content


async def test_what_the_evaluator_is_about_runs_on_and_nothing_else(
    served: Served, provider: str, way: EpisodeResolver
) -> None:
    async with AsyncExitStack() as stack:
        player = await stack.enter_async_context(playing(served, "forwarding", way))
        hidden = await player.text("probe__shell", command="find ../tasks -name main.py")
        assert hidden == ""
        await leave_running(player, "forward", "intruder")
        verdict = await verdict_on(player)
    assert (verdict["in_place"], verdict["success"]) == (True, True), verdict
    assert (verdict["metrics"]["forwards"], verdict["metrics"]["intruders"]) == (1, 0)
    assert verdict["reward"] == 3.0
    assert verdict["grader_network"] == verdict["agent_network"] == "none"
    assert verdict["evaluator_digest"].startswith("sha256:")
    assert (verdict["image_digest"] is None) is (provider == "local")
    episode = served.episodes._episodes[player.episode_id]  # pyright: ignore[reportPrivateUsage]
    await episode.state.reach(Phase.ENDED)
    assert not [line for line in processes_marked(served.state) if "forward" in line]


async def test_an_attempt_without_it_fails(served: Served) -> None:
    async with playing(served, "forwarding", "task") as player:
        await leave_running(player, "intruder")
        verdict = await verdict_on(player)
    assert (verdict["status"], verdict["reward"], verdict["success"]) == ("scored", 0.0, False), verdict


async def test_every_other_task_is_graded_elsewhere(served: Served, provider: str) -> None:
    async with playing(served, "find-answer", "task") as player:
        await leave_running(player, "forward")
        verdict = await verdict_on(player)
    assert (verdict["in_place"], verdict["status"]) == (False, "scored")
    assert not [line for line in processes_marked(served.state) if line.startswith("forward")]
