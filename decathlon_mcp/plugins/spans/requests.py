"""Spans of requests, one for each.

The names and attributes are those of OpenTelemetry's conventions for MCP and for generative AI.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

from opentelemetry.context import Context as TraceContext
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from decathlon_mcp.driver.replies import Reply
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.protocol.messages import CALL, McpError
from decathlon_mcp.protocol.requests import Request, Result
from decathlon_mcp.protocol.results import relayed_error, wire_error
from decathlon_mcp.types import public_id
from decathlon_mcp.validation import MAX_NAME_CHARACTERS

TRACE_KEYS = ("traceparent", "tracestate")
"""Keys of the trace context, in a request's `_meta` and as HTTP headers."""
MAX_TRACE_CHARACTERS = 512
"""The length up to which the W3C's recommendation asks for `tracestate` to be passed on."""
TOOL_ERROR = "tool_error"
_propagator = TraceContextTextMapPropagator()


class RequestSpans:
    """Makes the spans of requests, and of the calls in sandboxes that they lead to."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    async def serve(self, serve: Callable[[Request], Awaitable[Result]], request: Request) -> Result:
        """What `serve` returns for a request, in a span that a call passes on to the sandbox."""
        with self._span(request) as span:
            if request.method == CALL:
                carrier: dict[str, str] = {}
                _propagator.inject(carrier)
                request.meta = {**request.meta, **carrier}
            try:
                result = await serve(request)
            finally:
                self._add_execution(request)
            _note_result(span, result)
            return result

    @contextmanager
    def _span(self, request: Request) -> Generator[Span]:
        method, tool = request.method[:MAX_NAME_CHARACTERS], request.name[:MAX_NAME_CHARACTERS]
        attributes = {
            "mcp.method.name": method,
            "mcp.protocol.version": request.version,
            "network.transport": "pipe" if request.context.asgi is None else "tcp",
            "jsonrpc.request.id": str(request.id)[:MAX_NAME_CHARACTERS],
        }
        if request.session is not None and (session_id := request.session.id) is not None:
            # The id gives access to the session.
            attributes["mcp.session.id"] = public_id(session_id)
        if method == CALL:
            attributes |= {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
        parent = _trace_context(request.meta.get)
        headers = request.context.headers
        ambient = _trace_context(lambda key: headers.text(key.encode()))
        links = [] if parent is None or ambient is None else [_link_to(ambient)]
        with self._tracer.start_as_current_span(
            f"{method} {tool}" if tool else method,
            context=parent or ambient,
            kind=SpanKind.SERVER,
            attributes=attributes,
            links=links,
            # Messages of errors can repeat arguments.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except McpError as error:
                _fail_with_code(span, error.code)
                raise
            except DecathlonError as error:
                _fail_with_code(span, wire_error(error).code)
                raise
            except asyncio.CancelledError:
                _fail(span, "cancelled")
                raise
            except Exception as error:
                _fail(span, type(error).__qualname__)
                raise

    def _add_execution(self, request: Request) -> None:
        """Add the span of the call in the sandbox that the request began, if it was sent there."""
        # Added when it is over: the call has no task or context of its own, and its times are known.
        call = request.call
        if call is None or call.route is None or call.sent_at is None:
            return
        if call.keys is not request.keys:
            return  # another request began it
        seconds = time.perf_counter() - call.sent_at
        now = time.time_ns()
        tool = call.route.tool[:MAX_NAME_CHARACTERS]
        span = self._tracer.start_span(
            f"execute_tool {tool}",
            start_time=now - int(seconds * 1e9),
            attributes={
                "gen_ai.operation.name": "execute_tool",
                "gen_ai.tool.name": tool,
                "decathlon.server": call.route.server,
            },
        )
        if call.outcome is None:
            _fail(span, "cancelled")
        elif isinstance(call.outcome, DecathlonError):
            _fail(span, call.outcome.code)
        else:
            _note_result(span, call.outcome)
        span.end(now)


def _note_result(span: Span, result: Result) -> None:
    if not isinstance(result, Reply):
        if result.get("isError") is True:
            _fail(span, TOOL_ERROR)
    elif result.result is None:
        _fail_with_code(span, relayed_error(result.error or {}).code)
    elif result.is_error:
        _fail(span, TOOL_ERROR)


def _fail_with_code(span: Span, code: int) -> None:
    span.set_attribute("rpc.response.status_code", str(code))
    _fail(span, str(code))


def _fail(span: Span, error: str) -> None:
    span.set_attribute("error.type", error)
    span.set_status(StatusCode.ERROR)


def _trace_context(get: Callable[[str], object]) -> TraceContext | None:
    """The trace context of a client; None if it sent none, or one that does not fit."""
    values = {key: get(key) for key in TRACE_KEYS}
    carrier = {
        key: value
        for key, value in values.items()
        if isinstance(value, str) and len(value) <= MAX_TRACE_CHARACTERS
    }
    if TRACE_KEYS[0] not in carrier:
        return None
    context = _propagator.extract(carrier, TraceContext())
    return context if get_current_span(context).get_span_context().is_valid else None


def _link_to(context: TraceContext) -> Link:
    return Link(get_current_span(context).get_span_context())
