"""One prompt: a task's prompt in the catalogue is that of its episodes, or marked as provisional."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from decathlon_client import Decathlon
from decathlon_client.script import WORKSPACE

from tests.cheats.agent import SUITE as SHELL_SUITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.usefixtures("namespaces")]

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


def _without_folder(prompt: str) -> str:
    return re.sub(WORKSPACE, "", prompt)
