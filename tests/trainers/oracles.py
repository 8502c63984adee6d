"""A fake model that solves the bundled tasks with their oracles, except for those it shall not solve."""

from __future__ import annotations

from contextlib import AbstractContextManager

from decathlon_client.client_values import CLAIM
from decathlon_client.script import Step
from decathlon_client.testing import bundled_task, scripted_model

from decathlon_mcp.starter import oracle
from decathlon_mcp.types import JsonObject

THOUGHT = "This is the next step."
"""What the model says beside each tool call."""


def oracles(*unsolvable: str) -> AbstractContextManager[str]:
    """Serve the fake model and yield its base URL, for `OPENAI_BASE_URL`.

    It claims the tasks in `unsolvable` at once with a wrong answer.
    """

    def choose(request: JsonObject) -> list[Step]:
        task = bundled_task(request)
        if task is None:
            return []  # inspect-ai has the tokens of a text counted
        return [Step(CLAIM, {"answer": "I do not know."})] if task in unsolvable else oracle(task)

    return scripted_model(choose, THOUGHT)
