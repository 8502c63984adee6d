"""Tasks whose evaluator inspects the processes in the agent's own sandbox."""

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
from tests.probe.clients import AddressKind, Player, playing
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE, Served, serving

pytestmark = pytest.mark.anyio

RUNNING = '''
import os
from pathlib import Path

def running(workspace, name):
    """Count the processes of that name which belong to this workspace."""
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
from tasks.probe.forwarding.evaluation.running import running
workspace = sys.argv[sys.argv.index("--agent_workspace") + 1]
sys.exit(0 if running(workspace, "forward") == 1 and not running(workspace, "intruder") else 1)
"""
FUNCTION = """
from tasks.probe.forwarding.evaluation.running import running

def evaluate(workspace):
    return {"forwards": running(workspace, "forward"), "intruders": running(workspace, "intruder")}
"""
RUBRIC = """
function: evaluation/evaluator.py:evaluate
weights: {forwards: 1, intruders: -1, success: 2}
"""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The probe suite with one more task, `forwarding`."""
    suite = tmp_path_factory.mktemp("suites") / "suite"
    shutil.copytree(SUITE, suite)
    task = suite / "tasks" / "probe" / "forwarding"
    shutil.copytree(suite / "tasks" / "probe" / "find-answer", task)
    for name, text in {
        "running.py": RUNNING,
        "main.py": MAIN,
        "evaluator.py": FUNCTION,
        "rubric.yaml": RUBRIC,
    }.items():
        (task / "evaluation" / name).write_text(text)
    settings = yaml.safe_load((suite / "suite.yaml").read_text())
    settings["tasks"]["forwarding"] = {"in_place": True, "spared": ["forward *"], "grader_network": True}
    (suite / "suite.yaml").write_text(json.dumps(settings))
    return suite


@pytest.fixture(scope="module")
async def served(
    provider: str, suite: Path, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[Served]:
    async with serving(tmp_path_factory.mktemp("state"), suite=(str(suite),), provider=provider) as served:
        yield served


async def leave_running(player: Player, *names: str) -> None:
    """Start processes of these names, marked with this episode, outside of the MCP server's session."""
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


async def test_spared_processes_survive_until_the_evaluation_and_no_others(
    served: Served, provider: str, address: AddressKind
) -> None:
    async with AsyncExitStack() as stack:
        player = await stack.enter_async_context(playing(served, "forwarding", address))
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
    await served.find(player.episode_id).state.reach(Phase.ENDED)
    assert not [line for line in processes_marked(served.state) if "forward" in line]


async def test_an_attempt_without_the_spared_process_fails(served: Served) -> None:
    async with playing(served, "forwarding", "task") as player:
        await leave_running(player, "intruder")
        verdict = await verdict_on(player)
    assert (verdict["status"], verdict["reward"], verdict["success"]) == ("scored", 0.0, False), verdict


async def test_every_other_task_is_graded_in_a_fresh_sandbox(served: Served, provider: str) -> None:
    async with playing(served, "find-answer", "task") as player:
        await leave_running(player, "forward")
        verdict = await verdict_on(player)
    assert (verdict["in_place"], verdict["status"]) == (False, "scored")
    assert not [line for line in processes_marked(served.state) if line.startswith("forward")]
