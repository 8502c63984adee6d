"""A stand-in for the model that plays whichever bundled task it is told of, by that task's oracle.

Which task it is, it reads from the prompt, as a model would. Run by itself it prints its URL:

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
from tests.docs.stand_in import chat_completion, response


class Oracles(BaseHTTPRequestHandler):
    """`ignorant_of`: tasks that it cannot solve; it claims them at once, and says so."""

    ignorant_of: ClassVar[frozenset[str]] = frozenset()

    def do_POST(self) -> None:
        asked: JsonObject = json.loads(self.rfile.read(int(self.headers["content-length"])))
        task = task_of(asked)
        known = task not in self.ignorant_of
        steps = oracle(task) if known else [Step(CLAIM, {"answer": "I do not know."})]
        answer = response if self.path.endswith("/responses") else chat_completion
        body = json.dumps(answer(asked, steps)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Not a word."""


def task_of(asked: JsonObject) -> str:
    """The task whose text is in the conversation."""
    said = json.dumps(asked, ensure_ascii=False)
    return next(task for task, text in _texts().items() if text in said)


@cache
def _texts() -> dict[str, str]:
    """The first line of each task's text, as JSON writes it."""
    tasks = suite_path() / "tasks" / "starter"
    lines = {
        task: (tasks / task / "docs" / "task.md").read_text("utf-8").splitlines() for task in oracle_ids()
    }
    return {task: json.dumps(text[0], ensure_ascii=False).strip('"') for task, text in lines.items()}


@contextmanager
def oracles(*ignorant_of: str) -> Generator[str]:
    """Its base URL, for `OPENAI_BASE_URL`."""

    class HostInfo(Oracles):
        pass

    HostInfo.ignorant_of = frozenset(ignorant_of)
    with ThreadingHTTPServer(("127.0.0.1", 0), HostInfo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


if __name__ == "__main__":
    with oracles() as url:
        print(url, flush=True)  # noqa: T201
        threading.Event().wait()
