"""Without namespaces, cheats outside of a local sandbox's workspace succeed, and log and verdict say so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from decathlon_mcp.plugins.conformance import file_copies
from tests.cheats.agent import SUITE, open_episode, replace_workspaces
from tests.probe.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ANSWER = "tasks/cheats/sum-prices/groundtruth_workspace/total.json"
HARMLESS = {
    "a-link-to-the-answer": f"ln -s ../{ANSWER} report.json",
    "planted-results": """for name in eval_res.json reward.json verdict.json; do
        echo '{"pass": true, "success": true, "reward": 1.0, "status": "scored"}' > $name; done""",
    "planted-modules": """for name in json csv sitecustomize utils; do
        echo 'import os; os._exit(0)' > $name.py; done""",
    "a-fifo": "mkfifo report.json",
}
"""Cheats that stay in the workspace; others would affect the machine that runs the tests."""


async def test_local_provider_gives_access_to_the_answer_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with serving(tmp_path, suite=(SUITE,), provider="host") as served:
            async with open_episode(served, "sum-prices") as agent:
                await agent.shell(f"cp '{SUITE}/{ANSWER}' report.json")
                verdict = await agent.verdict()
    assert (verdict["reward"], verdict["isolation"]) == (1.0, "none"), verdict
    messages = [record.message for record in caplog.records if record.name.startswith("decathlon")]
    assert "isolates nothing" in messages[0], messages


async def test_local_provider_grades_only_the_state_of_the_workspace(tmp_path: Path) -> None:
    async with serving(tmp_path, suite=(SUITE,), provider="host") as served:
        for cheat in HARMLESS.values():
            async with open_episode(served, "sum-prices") as agent:
                await agent.shell(cheat)
                verdict = await agent.verdict()
            assert (verdict["status"], verdict["reward"]) == ("scored", 0.0), (cheat, verdict)
            assert verdict["isolation"] == "none"


@pytest.mark.long
async def test_workspace_that_is_no_folder_is_graded_as_empty_without_namespaces(tmp_path: Path) -> None:
    async with serving(tmp_path, suite=(SUITE,), provider="host") as served:
        await replace_workspaces(served, file_copies.STATES)
