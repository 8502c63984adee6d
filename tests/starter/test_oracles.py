"""The bundled suite and its oracles are consistent."""

from __future__ import annotations

import json

import pytest
from decathlon_client.script import Step
from decathlon_client.values import CLAIM

from decathlon_mcp.errors import UnknownTaskError
from decathlon_mcp.starter import oracle, oracle_ids, suite_path

TASKS = suite_path() / "tasks" / "starter"


def test_every_task_has_an_oracle_and_every_oracle_a_task() -> None:
    assert oracle_ids() == sorted(path.name for path in TASKS.iterdir())


def test_the_checkout_contains_no_oracle() -> None:
    assert not list(suite_path().rglob("*.jsonl"))


@pytest.mark.parametrize("task", oracle_ids())
def test_an_oracle_uses_only_its_tasks_tools_and_claims_last(task: str) -> None:
    needed = json.loads((TASKS / task / "task_config.json").read_text())["needed_mcp_servers"]
    *calls, claim = oracle(task)
    assert {step.tool.split("__")[0] for step in calls} <= set(needed)
    assert claim.tool == CLAIM
    assert claim.arguments["answer"]


@pytest.mark.parametrize("task", oracle_ids())
def test_prompts_name_the_workspace_and_claim_done(task: str) -> None:
    prompt = (TASKS / task / "docs" / "agent_system_prompt.md").read_text()
    assert "!!<<<<||||workspace_dir||||>>>>!!" in prompt
    assert "`local-claim_done`" in prompt
    assert (TASKS / task / "docs" / "task.md").read_text().strip()


def test_an_unknown_task_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(UnknownTaskError) as caught:
        oracle("../suite/tasks/starter/explain-outage")
    assert caught.value.data["near"] == oracle_ids()


def test_the_workspace_is_filled_in_at_any_depth() -> None:
    step = Step("a__b", {"path": "{workspace}/x", "rows": [["{workspace}"], {"k": "{workspace}"}], "n": 1})
    assert step.resolve("/w") == {"path": "/w/x", "rows": [["/w"], {"k": "/w"}], "n": 1}
