"""One prompt: a task's prompt in the catalogue is that of its episodes, or marked as provisional."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest
from decathlon_client import Decathlon
from decathlon_client.adapters.trl import environments
from decathlon_client.script import WORKSPACE

from decathlon_mcp.starter import oracle
from tests.cheats.agent import SUITE as SHELL_SUITE
from tests.probe.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

USES_ABSOLUTE_PATHS = "find-rate-regression"


async def test_prompts_of_catalogue_and_group_are_equal_and_name_the_tools_folder(tmp_path: Path) -> None:
    async with Decathlon.embedded(SHELL_SUITE, "host", state=tmp_path, isolation="namespaces") as d:
        (task,) = await d.tasks(search="sum-prices")
        assert not task.prompt_is_provisional
        when = task.launch_time
        async with d.episode(task, launch_time=when) as first, d.episode(task, launch_time=when) as second:
            assert first.prompt == second.prompt == task.prompt
            folder = (await first.call("root__shell", {"command": "pwd"})).text.strip()
            assert f"Your workspace is {folder}." in first.prompt


@pytest.mark.parametrize("isolation", ["namespaces", "none"])
@pytest.mark.long
async def test_a_rollout_of_trl_that_follows_its_prompt_gets_the_full_reward(
    tmp_path: Path, isolation: str
) -> None:
    settings: dict[str, Any] = {"provider": "host", "isolation": isolation, "servers": "lazy"}
    async with serving(tmp_path, suite=("starter",), **settings) as served:
        messages, reward = await anyio.to_thread.run_sync(trl_rollout, served.url, USES_ABSOLUTE_PATHS)
    assert reward == 1.0
    # With namespaces, the data set has the whole prompt before there is an episode.
    assert [bool(message) for message in messages] == [isolation == "namespaces", isolation == "none"]


async def test_without_namespaces_the_catalogues_prompt_is_provisional(tmp_path: Path) -> None:
    async with Decathlon.embedded("starter", "host", state=tmp_path, isolation="none") as d:
        (task,) = await d.tasks(search=USES_ABSOLUTE_PATHS)
        assert task.prompt_is_provisional
        async with d.episode(task, launch_time=task.launch_time) as episode:
            assert task.prompt
            assert episode.prompt != task.prompt
            assert _without_folder(episode.prompt) == _without_folder(task.prompt)


async def test_names_of_tools_in_the_catalogues_prompt_are_those_of_the_server(tmp_path: Path) -> None:
    async with Decathlon.embedded("starter", "host", state=tmp_path, names="toolathlon") as d:
        (task,) = await d.tasks(search=USES_ABSOLUTE_PATHS)
        assert "`local-claim_done`" in (task.prompt or "")


def trl_rollout(url: str, task: str) -> tuple[list[str], float | None]:
    """Play a task as TRL does; returns the row's message, what `reset` adds to it, and the reward."""
    task_set = environments(url, tasks=[task], concurrency=2)
    (row,) = task_set.rows
    environment = task_set.factories[task]()
    messages = [row["prompt"][0]["content"], environment.reset(**row) or ""]
    match = WORKSPACE.search("".join(messages))
    assert match, messages
    for step in oracle(task):
        getattr(environment, step.tool)(**step.resolve(match[1]))
    (reward,) = task_set.reward([environment])
    return messages, reward


def _without_folder(prompt: str) -> str:
    return re.sub(WORKSPACE, "", prompt)
