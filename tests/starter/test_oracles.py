"""The bundled suite and its oracles are consistent."""

from __future__ import annotations

import json

import pytest
from decathlon_client.client_values import CLAIM

from decathlon_mcp.errors import UnknownTaskError
from decathlon_mcp.starter import oracle, oracle_ids, suite_path

TASKS = suite_path() / "tasks" / "starter"


def test_every_task_has_an_oracle_that_uses_its_tools_alone_and_claims_last() -> None:
    assert oracle_ids() == sorted(path.name for path in TASKS.iterdir())
    assert not list(suite_path().rglob("*.jsonl")), "the checkout contains an oracle"
    for task in oracle_ids():
        needed = json.loads((TASKS / task / "task_config.json").read_text())["needed_mcp_servers"]
        *calls, claim = oracle(task)
        assert {step.tool.split("__")[0] for step in calls} <= set(needed)
        assert claim.tool == CLAIM
        assert claim.arguments["answer"]


def test_an_unknown_task_is_an_error_with_the_known_ones() -> None:
    with pytest.raises(UnknownTaskError) as caught:
        oracle("../suite/tasks/starter/explain-outage")
    assert caught.value.data["near"] == oracle_ids()
