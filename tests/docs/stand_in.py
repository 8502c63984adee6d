"""A model that answers as OpenAI's endpoints do and plays a task's oracle: for clients that want one.

It keeps no state: which step is next is how many tools a conversation has had answers from. Run by itself it
prints its URL:

    python -m tests.docs.stand_in
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

from decathlon_client.script import Step
from decathlon_client.values import as_objects

from decathlon_mcp.starter import oracle
from decathlon_mcp.types import JsonObject

TASK = "tune-reactor"
LAST_WORDS = "I am done."
SUBMIT = "submit"
"""inspect-ai's own tool, which ends its agent."""


@dataclass(frozen=True, slots=True)
class Move:
    """What the model says: a call of a tool or, without one, its last words."""

    tool: str | None = None
    arguments: JsonObject = field(default_factory=dict[str, Any])


def next_move(steps: Sequence[Step], answered: int, offered: Sequence[str]) -> Move:
    """The oracle's next step, under the name that the client offers it by; words to who offers no tools."""
    if not offered:
        return Move()
    if answered >= len(steps):
        return (
            Move(SUBMIT, {"answer": LAST_WORDS}) if SUBMIT in offered and answered == len(steps) else Move()
        )
    step = steps[answered]
    name = next((name for name in offered if name == step.tool or name.endswith(f"_{step.tool}")), None)
    assert name is not None, f"{step.tool} is not among {offered}"
    return Move(name, dict(step.arguments))


def chat_completion(asked: JsonObject, steps: Sequence[Step]) -> JsonObject:
    """As `POST /v1/chat/completions` answers."""
    answered = sum(message["role"] == "tool" for message in asked["messages"])
    move = next_move(steps, answered, [tool["function"]["name"] for tool in asked.get("tools", ())])
    message: JsonObject = {"role": "assistant", "content": None if move.tool else LAST_WORDS}
    if move.tool:
        function = {"name": move.tool, "arguments": json.dumps(move.arguments)}
        message["tool_calls"] = [{"id": f"call_{answered}", "type": "function", "function": function}]
    return {
        "id": f"chat_{answered}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": asked["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if move.tool else "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def response(asked: JsonObject, steps: Sequence[Step]) -> JsonObject:
    """As `POST /v1/responses` answers."""
    answered = sum(item.get("type") == "function_call_output" for item in as_objects(asked["input"]))
    move = next_move(steps, answered, [tool["name"] for tool in asked.get("tools", ()) if "name" in tool])
    said: JsonObject = {"type": "output_text", "text": LAST_WORDS, "annotations": []}
    item: JsonObject = {
        "type": "message",
        "id": f"msg_{answered}",
        "role": "assistant",
        "status": "completed",
        "content": [said],
    }
    if move.tool:
        item = {
            "type": "function_call",
            "id": f"fc_{answered}",
            "call_id": f"call_{answered}",
            "name": move.tool,
            "arguments": json.dumps(move.arguments),
            "status": "completed",
        }
    return {
        "id": f"resp_{answered}",
        "object": "response",
        "created_at": int(time.time()),
        "model": asked["model"],
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 1,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 1,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 2,
        },
    }


class _Endpoints(BaseHTTPRequestHandler):
    steps: ClassVar[Sequence[Step]] = ()

    def do_POST(self) -> None:
        asked: JsonObject = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = response if self.path.endswith("/responses") else chat_completion
        body = json.dumps(answer(asked, self.steps)).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Not a word."""


@contextmanager
def stand_in(task: str = TASK) -> Generator[str]:
    """Its base URL, for `OPENAI_BASE_URL`."""

    class Endpoints(_Endpoints):
        steps = oracle(task)

    with ThreadingHTTPServer(("127.0.0.1", 0), Endpoints) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


if __name__ == "__main__":
    with stand_in() as url:
        print(url, flush=True)  # noqa: T201
        threading.Event().wait()
