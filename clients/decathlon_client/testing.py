"""A scripted model behind OpenAI's endpoints, to try a program or a trainer without a real model.

    python -m decathlon_client.testing [FILE]

serves it on a free loopback port and prints the variables that select it. It plays the steps in FILE (the
format of `play --script`); without a file it plays the solutions of the bundled tasks and recognises a task
by its prompt, which needs the server's package. It keeps no state: the number of tool results in a
conversation is the number of the next step.

It knows `POST /v1/chat/completions`, also with `stream`, and `POST /v1/responses`.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, TypeAlias, cast

from decathlon_client.client_values import JsonObject, as_objects
from decathlon_client.script import Step, read_steps, workspace_in

ChooseSteps: TypeAlias = Callable[[JsonObject], Sequence[Step]]
"""From the body of a request to the steps of the attempt that it belongs to."""
FINAL_MESSAGE = "I am done."
SUBMITS = frozenset({"submit", "final_answer"})
"""inspect-ai's and smolagents' own tools, which end their agents."""
OBSERVATION = "Observation:\\n"
"""What smolagents writes before a tool's result, which it sends as the user's message (here in JSON)."""


@dataclass(frozen=True, slots=True)
class Move:
    """What the model answers: a tool call or, without a tool, its final message."""

    tool: str | None = None
    arguments: JsonObject = field(default_factory=dict[str, Any])


def next_move(steps: Sequence[Step], done: int, tools: Sequence[str], workspace: str = "") -> Move:
    """The solution's step after `done` steps, with the client's name of the tool.

    `workspace` replaces `{workspace}` in arguments. A request without tools gets the final message.
    """
    if not tools:
        return Move()
    if done >= len(steps):
        submit = next((name for name in tools if name in SUBMITS and done == len(steps)), None)
        return Move(submit, {"answer": FINAL_MESSAGE}) if submit else Move()
    step = steps[done]
    ending = _normal(step.tool)
    name = next((name for name in tools if f"_{_normal(name)}".endswith(f"_{ending}")), None)
    assert name is not None, f"{step.tool} is not among {tools}"
    return Move(name, step.resolve(workspace))


def _with_defaults(move: Move, schema: JsonObject) -> Move:
    """The move with the arguments that have a default and that the client requires all the same."""
    properties: JsonObject = schema.get("properties") or {}
    defaults = {
        name: properties[name]["default"]
        for name in schema.get("required") or ()
        if "default" in properties.get(name, {})
    }
    return Move(move.tool, {**defaults, **move.arguments})


def _normal(name: str) -> str:
    """A tool's name in the form that frameworks with stricter rules for names give it."""
    return re.sub(r"[^A-Za-z0-9]+", "_", name)


def chat_completion(request: JsonObject, steps: Sequence[Step], thought: str | None = None) -> JsonObject:
    """The response of `POST /v1/chat/completions`. `thought`: the text beside a tool call."""
    done = sum(_is_tool_result(message) for message in request["messages"])
    functions = {tool["function"]["name"]: tool["function"] for tool in request.get("tools", ())}
    move = next_move(steps, done, list(functions), workspace_in(*_texts(request["messages"])))
    if move.tool in functions:
        move = _with_defaults(move, functions[move.tool].get("parameters") or {})
    message: JsonObject = {"role": "assistant", "content": thought if move.tool else FINAL_MESSAGE}
    if move.tool:
        function = {"name": move.tool, "arguments": json.dumps(move.arguments)}
        message["tool_calls"] = [{"id": f"call_{done}", "type": "function", "function": function}]
    return {
        "id": f"chat_{done}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": request["model"],
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls" if move.tool else "stop"}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


def _texts(value: Any) -> Iterator[str]:
    """The texts of a conversation: in a model's prompt is the path of its workspace."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        items = cast("Iterable[Any]", value.values() if isinstance(value, dict) else value)
        for item in items:
            yield from _texts(item)


def _is_tool_result(message: JsonObject) -> bool:
    is_observation = message["role"] == "user" and OBSERVATION in json.dumps(message["content"])
    return message["role"] == "tool" or is_observation


def chat_events(completion: JsonObject) -> bytes:
    """The completion as the events of a request with `stream`."""
    (choice,) = completion.pop("choices")
    usage = completion.pop("usage")
    delta = choice["message"]
    for index, call in enumerate(delta.get("tool_calls", ())):
        call["index"] = index
    choices: list[list[JsonObject]] = [
        [{"index": 0, "delta": delta, "finish_reason": None}],
        [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}],
        [],
    ]
    head = {**completion, "object": "chat.completion.chunk"}
    chunks: list[JsonObject] = [{**head, "choices": each} for each in choices]
    chunks[-1]["usage"] = usage
    return b"".join(b"data: %s\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def response(request: JsonObject, steps: Sequence[Step], thought: str | None = None) -> JsonObject:
    """The response of `POST /v1/responses`. `thought`: as above."""
    done = sum(item.get("type") == "function_call_output" for item in as_objects(request["input"]))
    tools = [tool["name"] for tool in request.get("tools", ()) if "name" in tool]
    workspace = workspace_in(*_texts(request.get("instructions")), *_texts(request["input"]))
    move = next_move(steps, done, tools, workspace)
    text = thought if move.tool else FINAL_MESSAGE
    output: list[JsonObject] = []
    if text:
        output.append(
            {
                "type": "message",
                "id": f"msg_{done}",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": text, "annotations": []}],
            }
        )
    if move.tool:
        output.append(
            {
                "type": "function_call",
                "id": f"fc_{done}",
                "call_id": f"call_{done}",
                "name": move.tool,
                "arguments": json.dumps(move.arguments),
                "status": "completed",
            }
        )
    return {
        "id": f"resp_{done}",
        "object": "response",
        "created_at": int(time.time()),
        "model": request["model"],
        "status": "completed",
        "output": output,
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


@contextmanager
def scripted_model(steps: Sequence[Step] | ChooseSteps, thought: str | None = None) -> Generator[str]:
    """Serve a model that plays `steps`, or the steps that a function chooses for each request.

    Yields its base URL, for `OPENAI_BASE_URL`. `thought`: a text that it says beside each tool call.
    """
    choose: ChooseSteps = steps if callable(steps) else lambda request: steps

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request: JsonObject = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if not self.path.endswith(("/responses", "/chat/completions")):
                self.send_error(404)  # inspect-ai would have tokens counted
                return
            answer = response if self.path.endswith("/responses") else chat_completion
            reply = answer(request, choose(request), thought)
            streams = answer is chat_completion and request.get("stream")
            body = chat_events(reply) if streams else json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("content-type", "text/event-stream" if streams else "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Logs nothing: stderr belongs to the tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


def bundled_task(request: JsonObject) -> str | None:
    """The bundled task whose first line is in the conversation; None if there is none.

    Requires the server's package.
    """
    text = json.dumps(request, ensure_ascii=False)
    return next((task for task, line in _first_lines().items() if line in text), None)


@cache
def _first_lines() -> dict[str, str]:
    """The first line of each bundled task's text, encoded as JSON."""
    from decathlon_mcp.starter import oracle_ids, suite_path

    tasks = suite_path() / "tasks" / "starter"
    lines = {
        task: (tasks / task / "docs" / "task.md").read_text("utf-8").splitlines() for task in oracle_ids()
    }
    return {task: json.dumps(text[0], ensure_ascii=False).strip('"') for task, text in lines.items()}


def bundled_steps(request: JsonObject) -> Sequence[Step]:
    """The solution of the bundled task that the conversation is about; no steps if there is none."""
    from decathlon_mcp.starter import oracle

    task = bundled_task(request)
    return () if task is None else oracle(task)


def main() -> None:
    """The command: see the module."""
    parser = argparse.ArgumentParser(
        "python -m decathlon_client.testing", description="Serve a scripted model until Ctrl-C."
    )
    parser.add_argument(
        "file", nargs="?", type=Path, help="steps, one JSON object per line [the bundled tasks' solutions]"
    )
    file: Path | None = parser.parse_args().file
    try:
        if file is None:
            _first_lines()
        steps = bundled_steps if file is None else read_steps(file.read_text("utf-8"))
    except ModuleNotFoundError:
        parser.error("the bundled tasks' solutions are in the server's package; name a FILE of steps")
    except (OSError, ValueError) as error:
        parser.error(f"{file}: {error}")
    with scripted_model(steps) as url:
        sys.stdout.write(f"export OPENAI_BASE_URL={url} OPENAI_API_KEY=none\n")
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
