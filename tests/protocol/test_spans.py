"""Spans: one for each request, by whatever path it is served, with what happens in its course as children."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator, Sequence
from pathlib import Path
from typing import Any

import anyio
import httpx2
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from decathlon_mcp.plugins.spans import ExportedSpans
from decathlon_mcp.types import public_id
from tests.driver.peer import until
from tests.fakes.driver import FakeCall, ToolError
from tests.fakes.provider import FakeProvider
from tests.http.messages import TASK
from tests.http.restarting import answer_of, ready_session
from tests.http.test_lost_clients import served_by_fake
from tests.probe.clients import connected
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio

SECRET = "correct-horse-battery-staple"
PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
OTHER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


async def echo(call: FakeCall) -> str:
    return json.dumps(call.params)


async def fail(call: FakeCall) -> Any:
    return {"content": [{"type": "text", "text": SECRET}], "isError": True}


async def refuse(call: FakeCall) -> str:
    raise ToolError(f"refused: {SECRET}", -32602)


async def hang(call: FakeCall) -> str:
    await anyio.sleep_forever()
    return ""


def provider(**options: Any) -> FakeProvider:
    return FakeProvider(
        tools={"probe": {"echo": echo, "fail": fail, "refuse": refuse, "hang": hang}}, **options
    )


class Recorded:
    """The spans of a server that have ended."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self._provider.get_tracer("test")
        self.spans = ExportedSpans(self.tracer, self._provider.shutdown)

    @property
    def all(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]

    def the(self, name: str) -> ReadableSpan:
        (span,) = self.named(name)
        return span

    @property
    def calls(self) -> list[str]:
        """The names of the spans of calls."""
        return [span.name for span in self.all if span.name.startswith("tools/call ")]

    @property
    def text(self) -> str:
        return "".join(span.to_json() for span in self.all)


@pytest.fixture
def recorded() -> Iterator[Recorded]:
    recorded = Recorded()
    yield recorded
    # No span may have a secret, whatever the test did.
    assert SECRET not in recorded.text


@pytest.fixture
async def served(tmp_path: Path, recorded: Recorded) -> AsyncGenerator[Served]:
    async with served_by_fake(tmp_path, provider(), spans=recorded.spans) as served:
        yield served


def attributes_of(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def context_of(span: ReadableSpan) -> Any:
    context = span.get_span_context()
    assert context is not None
    return context


def is_child(span: ReadableSpan, parent: ReadableSpan) -> bool:
    return span.parent is not None and span.parent.span_id == context_of(parent).span_id


def called(name: str, request_id: Any = 7, *, meta: dict[str, Any] | None = None, **arguments: Any) -> Any:
    params = {"name": name, "arguments": arguments, **({} if meta is None else {"_meta": meta})}
    return {"jsonrpc": "2.0", "id": request_id, "method": "tools/call", "params": params}


async def test_a_whole_episode_at_the_lobby_is_one_trace(served: Served, recorded: Recorded) -> None:
    with recorded.tracer.start_as_current_span("client") as client:
        async with connected(served.lobby) as lobby:
            started = (await lobby.call_tool("start_episode", {"task": TASK})).structured_content
            assert started is not None
            handle = {"episode": started["episode"]}
            arguments = {"name": "probe__echo", "arguments": {"text": SECRET}}
            await lobby.call_tool("call_tool", {**handle, **arguments})
            await lobby.call_tool("claim_done", {**handle, "answer": SECRET})
            await lobby.call_tool("evaluate", handle)
    names = ("start_episode", "call_tool", "claim_done", "evaluate")
    assert recorded.calls == [f"tools/call {name}" for name in names]
    for name in names:
        span = recorded.the(f"tools/call {name}")
        assert span.kind is SpanKind.SERVER
        assert span.status.status_code is StatusCode.UNSET
        assert span.parent is not None
        assert span.parent.span_id == client.get_span_context().span_id
    for child, parent in {
        "set_up": "start_episode",
        "execute_tool echo": "call_tool",
        "grade": "claim_done",
    }.items():
        assert is_child(recorded.the(child), recorded.the(f"tools/call {parent}"))
    assert {context_of(span).trace_id for span in recorded.all} == {client.get_span_context().trace_id}
    for secret in (started["episode"], started["agent"]):
        assert secret not in recorded.text
    (event,) = recorded.the("grade").events
    assert event.name == "gen_ai.evaluation.result"
    assert dict(event.attributes or {}) == {
        "gen_ai.evaluation.name": "reward",
        "gen_ai.evaluation.score.value": 1.0,
        "gen_ai.evaluation.score.label": "pass",
    }
    expected = {
        "decathlon.episode": started["public_id"],
        "decathlon.suite": "probe",
        "decathlon.task": TASK,
    }
    assert attributes_of(recorded.the("grade")) == attributes_of(recorded.the("set_up")) == expected
    execution = recorded.the("execute_tool echo")
    outer = recorded.the("tools/call call_tool")
    assert execution.start_time is not None
    assert execution.end_time is not None
    assert outer.start_time is not None
    assert outer.end_time is not None
    assert outer.start_time <= execution.start_time <= execution.end_time <= outer.end_time


async def test_a_call_in_a_session_has_these_attributes(
    served: Served, recorded: Recorded, http: httpx2.AsyncClient
) -> None:
    session = await ready_session(http, served)
    await session.call("probe__echo", text=SECRET)
    await session.call("claim_done", request_id="b")
    await session.ask("tools/call", {"name": "evaluate"}, request_id="c")
    assert recorded.calls == [f"tools/call {name}" for name in ("probe__echo", "claim_done", "evaluate")]
    assert attributes_of(recorded.the("tools/call probe__echo")) == {
        "mcp.method.name": "tools/call",
        "mcp.protocol.version": "2025-11-25",
        "mcp.session.id": public_id(session.id),
        "network.transport": "tcp",
        "jsonrpc.request.id": "7",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "probe__echo",
    }
    assert attributes_of(recorded.the("execute_tool echo")) == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "echo",
        "decathlon.server": "probe",
    }
    assert session.id not in recorded.text
    assert is_child(recorded.the("set_up"), recorded.the("initialize"))
    assert recorded.the("tools/list").kind is SpanKind.SERVER
    assert is_child(recorded.the("grade"), recorded.the("tools/call claim_done"))


async def test_the_parent_is_in_meta_and_a_header_is_a_link(
    served: Served, recorded: Recorded, http: httpx2.AsyncClient
) -> None:
    session = await ready_session(http, served)
    for number, (meta, header) in enumerate(
        ((PARENT, None), (PARENT, OTHER), (None, OTHER), ("00-0", None), (5, "x"), (None, "x" * 5000))
    ):
        headers = session.headers if header is None else {**session.headers, "traceparent": header}
        message = called(
            "probe__echo",
            10 + number,
            meta={} if meta is None else {"traceparent": meta},
            text=str(number),
        )
        answer = answer_of(await http.post(session.url, json=message, headers=headers))
        assert "result" in answer, answer
    spans = recorded.named("tools/call probe__echo")
    parents = [None if span.parent is None else f"{span.parent.span_id:016x}" for span in spans]
    in_meta, in_header = PARENT.split("-")[2], OTHER.split("-")[2]
    assert parents == [in_meta, in_meta, in_header, None, None, None]
    links = [[f"{link.context.span_id:016x}" for link in span.links] for span in spans]
    assert links == [[], [in_header], [], [], [], []]


async def test_errors_are_named_without_their_messages(
    served: Served, recorded: Recorded, http: httpx2.AsyncClient
) -> None:
    session = await ready_session(http, served)
    for number, tool in enumerate(("probe__fail", "probe__refuse", "probe__none")):
        await session.post("tools/call", {"name": tool, "arguments": {}}, request_id=20 + number)
    await session.post("tools/call", {"name": "claim_done", "arguments": {SECRET: 1}}, request_id=30)
    failed = {
        span.name: attributes_of(span)["error.type"]
        for span in recorded.all
        if span.status.status_code is StatusCode.ERROR
    }
    assert failed == {
        "tools/call probe__fail": "tool_error",
        "execute_tool fail": "tool_error",
        "tools/call probe__refuse": "-32602",
        "execute_tool refuse": "-32602",
        "tools/call probe__none": "-32602",
        "tools/call claim_done": "tool_error",
    }
    assert not any(span.status.description or span.events for span in recorded.all)


async def test_a_call_that_its_client_cancels_is_an_error(
    served: Served, recorded: Recorded, http: httpx2.AsyncClient
) -> None:
    session = await ready_session(http, served)
    episode = served.episodes.live[-1]
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(session.post, "tools/call", {"name": "probe__hang"})
        await until(lambda: episode.calls.sent == 1)
        await session.cancel(7, reason=SECRET)
        await until(lambda: len(recorded.named("tools/call probe__hang")) == 1)
        tasks.cancel_scope.cancel()
    assert attributes_of(recorded.the("tools/call probe__hang"))["error.type"] == "cancelled"
    assert attributes_of(recorded.the("execute_tool hang"))["error.type"] == "driver_error"
