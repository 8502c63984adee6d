"""A fake model that solves the bundled tasks with their oracles.

It identifies the task by the prompt. Run as a program, it prints its URL:

    python -m tests.trainers.oracles
"""

from __future__ import annotations

import json
import threading
from contextlib import AbstractContextManager
from functools import cache

from decathlon_client.script import Step
from decathlon_client.values import CLAIM

from decathlon_mcp.starter import oracle, oracle_ids, suite_path
from decathlon_mcp.types import JsonObject
from tests.docs.scripted_model import serve_model

THOUGHT = "This is the next step."
"""What the model says beside each tool call."""


def task_of(request: JsonObject) -> str:
    """Return the task whose first line is in the conversation; empty if it is of none."""
    text = json.dumps(request, ensure_ascii=False)
    return next((task for task, line in _first_lines().items() if line in text), "")


@cache
def _first_lines() -> dict[str, str]:
    """Return the first line of each task's text, encoded as JSON."""
    tasks = suite_path() / "tasks" / "starter"
    lines = {
        task: (tasks / task / "docs" / "task.md").read_text("utf-8").splitlines() for task in oracle_ids()
    }
    return {task: json.dumps(text[0], ensure_ascii=False).strip('"') for task, text in lines.items()}


def oracles(*unsolvable: str) -> AbstractContextManager[str]:
    """Serve the fake model and yield its base URL, for `OPENAI_BASE_URL`.

    It claims the tasks in `unsolvable` at once with a wrong answer.
    """

    def choose(request: JsonObject) -> list[Step]:
        task = task_of(request)
        if not task:
            return []  # inspect-ai has the tokens of a text counted
        return [Step(CLAIM, {"answer": "I do not know."})] if task in unsolvable else oracle(task)

    return serve_model(choose, THOUGHT)


if __name__ == "__main__":
    with oracles() as url:
        print(url, flush=True)  # noqa: T201
        threading.Event().wait()
