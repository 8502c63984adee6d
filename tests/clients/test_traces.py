"""Traces: requests of the client carry the trace context of the program that makes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from decathlon_client import Decathlon
from decathlon_client.sdk import with_trace_context
from opentelemetry.trace import SpanContext

from tests.http.test_lost_clients import served_by_fake
from tests.protocol.test_spans import Recorded, provider

pytestmark = pytest.mark.anyio


def traceparent(context: SpanContext) -> str:
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


async def test_calls_are_part_of_the_callers_trace(tmp_path: Path) -> None:
    recorded = Recorded()
    async with (
        served_by_fake(tmp_path, provider(), spans=recorded.spans) as served,
        Decathlon(served.url) as d,
    ):
        with recorded.tracer.start_as_current_span("client") as client:
            async with d.episode("find-answer") as e:
                await e.call("probe__echo", {"text": "a"})
    for name in ("tools/call start_episode", "tools/call probe__echo"):
        parent = recorded.the(name).parent
        assert parent is not None
        assert parent.span_id == client.get_span_context().span_id


def test_with_an_sdk_of_mcp_that_does_not_do_it_the_client_adds_the_context() -> None:
    params = {"name": "a", "_meta": {"a/b": 1}}
    assert with_trace_context(params) == params
    with Recorded().tracer.start_as_current_span("client") as span:
        expected = {"a/b": 1, "traceparent": traceparent(span.get_span_context())}
        assert with_trace_context(params) == {"name": "a", "_meta": expected}
        assert with_trace_context({}) == {"_meta": {"traceparent": expected["traceparent"]}}
    assert params == {"name": "a", "_meta": {"a/b": 1}}
