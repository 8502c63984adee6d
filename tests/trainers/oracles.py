"""A fake model that solves the bundled tasks with their oracles.

It identifies the task by the prompt. Run as a program, it prints its URL:

    python -m tests.trainers.oracles
"""

from __future__ import annotations

import json
import threading
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from decathlon_client.script import Step
from decathlon_client.values import CLAIM

from decathlon_mcp.starter import oracle, oracle_ids, suite_path
from decathlon_mcp.types import JsonObject
from tests.docs.scripted_model import chat_completion, response


class Oracles(BaseHTTPRequestHandler):
    """An OpenAI endpoint. It claims tasks in `unsolvable` at once with a wrong answer."""

    unsolvable: ClassVar[frozenset[str]] = frozenset()

    def do_POST(self) -> None:
        request: JsonObject = json.loads(self.rfile.read(int(self.headers["content-length"])))
        task = task_of(request)
        solvable = task not in self.unsolvable
        steps = oracle(task) if solvable else [Step(CLAIM, {"answer": "I do not know."})]
        create_reply = response if self.path.endswith("/responses") else chat_completion
        body = json.dumps(create_reply(request, steps)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Log nothing."""


def task_of(request: JsonObject) -> str:
    """Return the task whose first line is in the conversation."""
    text = json.dumps(request, ensure_ascii=False)
    return next(task for task, line in _first_lines().items() if line in text)


@cache
def _first_lines() -> dict[str, str]:
    """Return the first line of each task's text, encoded as JSON."""
    tasks = suite_path() / "tasks" / "starter"
    lines = {
        task: (tasks / task / "docs" / "task.md").read_text("utf-8").splitlines() for task in oracle_ids()
    }
    return {task: json.dumps(text[0], ensure_ascii=False).strip('"') for task, text in lines.items()}


@contextmanager
def oracles(*unsolvable: str) -> Generator[str]:
    """Serve the fake model and yield its base URL, for `OPENAI_BASE_URL`."""

    class Handler(Oracles):
        pass

    Handler.unsolvable = frozenset(unsolvable)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


if __name__ == "__main__":
    with oracles() as url:
        print(url, flush=True)  # noqa: T201
        threading.Event().wait()
