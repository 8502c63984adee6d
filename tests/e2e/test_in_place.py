"""Tasks graded in place: their evaluator inspects processes in the agent's sandbox."""

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
    """Count the processes of this name that belong to this workspace."""
    token = (Path(workspace) / "token").read_text().strip()
    count = 0
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                count += (process / "cmdline").read_bytes().startswith(f"{name} {token}".encode())
            except OSError:
                pass
    return count
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
    """The probe suite with the additional task `forwarding`."""
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


async def start_background_processes(player: Player, *names: str) -> None:
    """Start processes with these names and a token of this episode, outside the MCP server's session."""
    token = player.episode_id[:16]
    await player.call("probe__write", path="token", text=token)
    for name in names:
        command = f"exec -a '{name} {token}' sleep 1000"
        await player.call("probe__shell", command=f'setsid bash -c "{command}" >/dev/null 2>&1 &')
    for name in names:
        count = f"cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' '\\n' | grep -c '^{name} {token}'"
        while (await player.text("probe__shell", command=count)).strip() != "1":  # noqa: ASYNC110
            await anyio.sleep(0.02)


async def claim_and_evaluate(player: Player) -> dict[str, Any]:
    await player.call("claim_done")
    return (await player.call("evaluate")).structured_content


async def test_spared_processes_survive_until_the_evaluation_and_no_others(
    served: Served, provider: str, address: AddressKind
) -> None:
    async with AsyncExitStack() as stack:
        player = await stack.enter_async_context(playing(served, "forwarding", address))
        files = await player.text("probe__shell", command="find ../tasks -name main.py")
        assert files == ""
        await start_background_processes(player, "forward", "intruder")
        verdict = await claim_and_evaluate(player)
    assert (verdict["in_place"], verdict["success"]) == (True, True), verdict
    assert (verdict["metrics"]["forwards"], verdict["metrics"]["intruders"]) == (1, 0)
    assert verdict["reward"] == 3.0
    assert verdict["grader_network"] == verdict["agent_network"] == "none"
    assert verdict["evaluator_digest"].startswith("sha256:")
    assert (verdict["image_digest"] is None) is (provider == "host")
    await served.find(player.episode_id).state.reach(Phase.ENDED)
    assert not [line for line in processes_marked(served.state) if "forward" in line]


async def test_an_attempt_without_the_spared_process_fails(served: Served) -> None:
    async with playing(served, "forwarding", "task") as player:
        await start_background_processes(player, "intruder")
        verdict = await claim_and_evaluate(player)
    assert (verdict["status"], verdict["reward"], verdict["success"]) == ("scored", 0.0, False), verdict


REPLACED = {
    "workspace-by-a-link-to-itself": "rm -rf ../workspace; ln -s workspace ../workspace",
    "tasks-by-an-overlong-link": f"rm -rf ../tasks; ln -s {'x' * 256} ../tasks",
    "tasks-by-a-fifo": "rm -rf ../tasks; mkfifo ../tasks",
}


@pytest.mark.parametrize("command", REPLACED.values(), ids=REPLACED)
async def test_an_attempt_that_leaves_no_place_for_the_evaluator_is_forfeited(
    served: Served, command: str
) -> None:
    async with playing(served, "forwarding", "task") as player:
        await player.call("probe__shell", command=command)
        verdict = await claim_and_evaluate(player)
    assert (verdict["status"], verdict["reward"]) == ("forfeited", 0.0), verdict
    assert "/var/lib" not in verdict["detail"]


FORK_FOR_EVER = """
import os, time
while True:
    try:
        if os.fork() == 0:
            while True:
                time.sleep(1000)
    except OSError:
        time.sleep(0.001)
"""
"""Takes every place of a process that becomes free. Started under a name that is spared, it survives."""
TAKEN = {
    "memory": ("cat /dev/zero > filler", "do not fit"),
    "processes": (
        "setsid bash -c \"exec -a 'forward x' python3 fork.py\" >/dev/null 2>&1 & sleep 2",
        "cannot start a thread",
    ),
}


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(("command", "detail"), TAKEN.values(), ids=TAKEN)
async def test_an_attempt_that_takes_what_the_evaluator_needs_is_forfeited(
    suite: Path, tmp_path: Path, command: str, detail: str
) -> None:
    settings: dict[str, Any] = {"suite": (str(suite),), "provider": "host", "isolation": "namespaces"}
    async with (
        serving(tmp_path / "state", memory_mib=256, pids=64, **settings) as served,
        playing(served, "forwarding", "task") as player,
    ):
        await player.call("probe__write", path="fork.py", text=FORK_FOR_EVER)
        with anyio.move_on_after(30):
            await player.call("probe__shell", command=command)
        verdict = await claim_and_evaluate(player)
    assert (verdict["status"], verdict["reward"]) == ("forfeited", 0.0), verdict
    assert detail in verdict["detail"]
