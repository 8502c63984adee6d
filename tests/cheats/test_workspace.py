"""Contents of the workspace: they reach the grader as data, or they are refused."""

from __future__ import annotations

import pytest

from decathlon_mcp.plugins.audit.attacks import Attack, named
from decathlon_mcp.plugins.conformance import file_copies
from tests.cheats.agent import SOLUTIONS, STATES, Agent, CheatServer, replace_workspaces

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

ANSWER = "/episode/tasks/cheats/sum-prices/groundtruth_workspace/total.json"
"""In the grader this file has the content that the report should have."""


def each(beginning: str) -> pytest.MarkDecorator:
    """Each attack whose name begins so."""
    return pytest.mark.parametrize("attack", named(beginning).values(), ids=lambda attack: attack.name)


async def carry_out(agent: Agent, attack: Attack) -> None:
    await agent.attack(attack, "sum-prices", outputs=["report.json"], answers={"report.json": ANSWER})


# tests/archives/test_workspace.py tests each kind of link, special file and name separately.
@each("link")
async def test_link_out_of_the_workspace_is_not_followed(cheats: CheatServer, attack: Attack) -> None:
    async with cheats.unrewarded_episode() as agent:
        await carry_out(agent, attack)


@each("special")
async def test_special_file_is_not_graded(cheats: CheatServer, attack: Attack) -> None:
    async with cheats.unrewarded_episode() as agent:
        await carry_out(agent, attack)


async def test_workspace_in_any_state_but_that_of_a_folder_is_graded_as_empty(
    cheats: CheatServer, provider: str
) -> None:
    # Bubblewrap copies files as local sandboxes in namespaces do, where each state is played.
    await replace_workspaces(cheats.served, STATES if provider == "docker" else file_copies.STATES)


@each("names")
async def test_unusual_file_names_do_not_affect_the_reward(cheats: CheatServer, attack: Attack) -> None:
    """Honest work in the same workspace is rewarded."""
    async with cheats.episode("sum-prices") as agent:
        await carry_out(agent, attack)
        await agent.shell(SOLUTIONS["sum-prices"])
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


async def test_folders_too_deep_to_be_copied_pay_nothing(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode(or_forfeited=True) as agent:
        await agent.attack("too-deep")


async def test_workspace_with_thousands_of_files_is_graded(cheats: CheatServer) -> None:
    async with cheats.episode("sum-prices") as agent:
        await agent.python("import os\nfor n in range(5_000): os.mknod(f'{n}')")
        await agent.shell(SOLUTIONS["sum-prices"])
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict


@pytest.mark.parametrize("name", ["sparse-terabyte", "sparse-giant", "too-large"])
async def test_oversized_workspace_is_forfeited(cheats: CheatServer, name: str) -> None:
    async with cheats.unrewarded_episode(status="forfeited") as agent:
        await agent.attack(name, outputs=["report.json"])


async def test_refused_files_are_listed_in_the_verdict(cheats: CheatServer) -> None:
    async with cheats.episode("sum-prices") as agent:
        await agent.shell("mkfifo pipe; ln -s /etc/shadow shadow; cp /usr/bin/env id; chmod 4755 id")
        refused = (await agent.verdict())["refused"]
    assert [line.partition(":")[0] for line in sorted(refused)] == ["id", "pipe", "shadow"], refused
