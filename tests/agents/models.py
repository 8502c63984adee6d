"""A scripted model behind the endpoints that agent programs use, all with streams.

Anthropic's messages, OpenAI's responses and Google's `streamGenerateContent`. It keeps no state: the number
of tool results in a conversation is the number of the next step, see `decathlon_client.testing`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from decathlon_client.script import Step
from decathlon_client.testing import FINAL_MESSAGE, Move, next_move, response

JsonObject = dict[str, Any]
Event = tuple[str, JsonObject]
Answer = tuple[int, dict[str, str], bytes]

RECIPE = '{"temperature": 60, "catalyst": 4, "minutes": 56, "product_percent": 72.03, "peak_heat_kw": 10.66}'
"""The answer of tune-reactor."""


def _move(steps: Sequence[Step], done: int, names: Sequence[str]) -> Move:
    """The next move if the request is about the task; the final message for titles and the like."""
    return next_move(steps, done, names) if any("claim_done" in name for name in names) else Move()


def anthropic(request: JsonObject, steps: Sequence[Step]) -> Iterator[Event]:
    """The events of `POST /v1/messages`."""
    done = sum(
        block.get("type") == "tool_result"
        for message in request["messages"]
        if isinstance(message["content"], list)
        for block in message["content"]
    )
    move = _move(steps, done, [tool["name"] for tool in request.get("tools", ())])
    usage = {"input_tokens": 1, "output_tokens": 1}
    head = {"id": f"msg_{done}", "type": "message", "role": "assistant", "model": request["model"]}
    reasons: JsonObject = {"stop_reason": None, "stop_sequence": None}
    yield "message_start", {"message": {**head, **reasons, "content": [], "usage": usage}}
    if move.tool:
        block: JsonObject = {"type": "tool_use", "id": f"toolu_{done}", "name": move.tool, "input": {}}
        delta: JsonObject = {"type": "input_json_delta", "partial_json": json.dumps(move.arguments)}
    else:
        block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": FINAL_MESSAGE}
    yield "content_block_start", {"index": 0, "content_block": block}
    yield "content_block_delta", {"index": 0, "delta": delta}
    yield "content_block_stop", {"index": 0}
    reason = "tool_use" if move.tool else "end_turn"
    yield "message_delta", {"delta": {"stop_reason": reason, "stop_sequence": None}, "usage": usage}
    yield "message_stop", {}


def openai(request: JsonObject, steps: Sequence[Step]) -> Iterator[Event]:
    """The events of `POST /v1/responses`."""
    tools: list[JsonObject] = []
    for offered in request.get("tools", ()):
        if offered.get("type") == "namespace":  # Codex groups the tools of a server
            group = offered["name"]
            tools += [
                {"name": f"{group}__{tool['name']}", "tool": tool["name"], "group": group}
                for tool in offered["tools"]
            ]
        elif "name" in offered:
            tools.append({"name": offered["name"], "tool": offered["name"], "group": None})
    names = [tool["name"] for tool in tools]
    if not any("claim_done" in name for name in names):
        names = []
    reply = response({**request, "tools": [{"name": name} for name in names]}, steps)
    for item in reply["output"]:
        for tool in tools:
            if item.get("name") == tool["name"] and tool["group"]:
                item["name"], item["namespace"] = tool["tool"], tool["group"]
    yield "response.created", {"response": {**reply, "status": "in_progress", "output": []}}
    for index, item in enumerate(reply["output"]):
        place = {"output_index": index, "item_id": item["id"]}
        if item["type"] == "message":
            text, part = item["content"][0]["text"], {**place, "content_index": 0}
            yield "response.output_item.added", {"output_index": index, "item": {**item, "content": []}}
            yield (
                "response.content_part.added",
                {**part, "part": {"type": "output_text", "text": "", "annotations": []}},
            )
            yield "response.output_text.delta", {**part, "delta": text, "logprobs": []}
            yield "response.output_text.done", {**part, "text": text, "logprobs": []}
        else:
            yield "response.output_item.added", {"output_index": index, "item": {**item, "arguments": ""}}
            yield "response.function_call_arguments.delta", {**place, "delta": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, "arguments": item["arguments"]}
        yield "response.output_item.done", {"output_index": index, "item": item}
    yield "response.completed", {"response": reply}


def google(request: JsonObject, steps: Sequence[Step]) -> Iterator[Event]:
    """The events of `POST /v1beta/models/MODEL:streamGenerateContent`."""
    done = sum("functionResponse" in part for content in request["contents"] for part in content["parts"])
    offered = (tool.get("functionDeclarations", ()) for tool in request.get("tools", ()))
    move = _move(steps, done, [function["name"] for functions in offered for function in functions])
    part: JsonObject = {"text": FINAL_MESSAGE}
    if move.tool:
        part = {"functionCall": {"name": move.tool, "args": move.arguments}}
    candidate = {"index": 0, "content": {"role": "model", "parts": [part]}, "finishReason": "STOP"}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    yield "", {"candidates": [candidate], "usageMetadata": usage}


@contextmanager
def posting(answer: Callable[[str, Mapping[str, str], bytes], Answer]) -> Generator[str]:
    """A web server in a thread. `answer`: status, headers and body for a POST's path, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = self.rfile.read(int(self.headers["content-length"]))
            received = {name.lower(): value for name, value in self.headers.items()}
            status, headers, body = answer(self.path, received, request)
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Logs nothing: stderr belongs to the tests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@contextmanager
def streaming_model(steps: Sequence[Step]) -> Generator[tuple[str, list[JsonObject]]]:
    """Serve a model that plays `steps`. Yields the root of its addresses, and the requests that it gets."""
    received: list[JsonObject] = []

    def answer(address: str, headers: Mapping[str, str], body: bytes) -> Answer:
        request: JsonObject = json.loads(body)
        received.append(request)
        path = address.partition("?")[0]
        dialects = {"/messages": anthropic, "/responses": openai, "enerateContent": google}
        dialect = next((dialect for end, dialect in dialects.items() if path.endswith(end)), None)
        if dialect is None:
            return 404, {}, b""
        events = list(dialect(request, steps))
        if path.endswith(":generateContent"):
            return 200, {"content-type": "application/json"}, json.dumps(events[0][1]).encode()
        lines: list[str] = []
        for name, data in events:
            lines += [f"event: {name}\n"] if name else []
            lines += [f"data: {json.dumps({'type': name, **data} if name else data)}\n\n"]
        return 200, {"content-type": "text/event-stream"}, "".join(lines).encode()

    with posting(answer) as url:
        yield url, received
