"""Spans of one server for OpenTelemetry, which `--spans` switches on: of requests, set-ups and gradings.

The names and attributes follow OpenTelemetry's conventions for MCP and for generative AI. Its API comes with
the SDK of MCP. Its own SDK is an extra, which only `exported_spans` imports: that takes 0.3 s.

A span has no argument, no reply, no message of an error and no id that gives access: a collector is read by
more people than may play.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from threading import Thread

import anyio
from opentelemetry.context import Context as TraceContext
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from decathlon_mcp import __version__
from decathlon_mcp.driver.replies import Reply
from decathlon_mcp.errors import DecathlonError, SettingsError
from decathlon_mcp.events import Admitted, Claimed, Emit, Ended, Event, Judged, Ready
from decathlon_mcp.plugins.settings import SpanSettings
from decathlon_mcp.protocol.messages import CALL, McpError
from decathlon_mcp.protocol.requests import Request, Result
from decathlon_mcp.protocol.results import relayed_error, wire_error
from decathlon_mcp.settings import Settings
from decathlon_mcp.types import public_id
from decathlon_mcp.validation import MAX_NAME_CHARACTERS

TRACE_KEYS = ("traceparent", "tracestate")
"""Keys of the trace context, in a request's `_meta` and as HTTP headers."""
MAX_TRACE_CHARACTERS = 512
"""The length up to which the W3C's recommendation asks for `tracestate` to be passed on."""
TOOL_ERROR = "tool_error"
_propagator = TraceContextTextMapPropagator()
FLUSH_SECONDS = 2.0
"""How long the end of a server may wait for its collector: systemd and users wait for it."""
POLL_SECONDS = 0.02
PROTOCOL = "http/protobuf"
SERVICE = "decathlon-mcp"


class ExportedSpans:
    """Makes spans with `tracer`: of requests, of the calls in sandboxes that they lead to, and of episodes.

    `end` sends what is left to send, and blocks.
    """

    def __init__(self, tracer: Tracer, end: Callable[[], object]) -> None:
        self.tracer = tracer
        self._end = end

    def on_event(self, event: Event) -> None:
        """Events of the server have no span; each request has one."""

    def episode(self, suite: str, task: str, public_id: str) -> Emit:
        """What makes the spans of an episode."""
        names = {"episode": public_id, "suite": suite, "task": task}
        return EpisodeSpans(self.tracer, {f"decathlon.{key}": name for key, name in names.items()}).on_event

    async def end(self) -> bool:
        """Send what has not been sent yet, for FLUSH_SECONDS at most; whether that was enough."""
        # The process does not wait for a daemon's end, as it would for one of anyio's threads.
        thread = Thread(target=self._end, name="last spans", daemon=True)
        thread.start()
        with anyio.move_on_after(FLUSH_SECONDS, shield=True):
            while thread.is_alive():  # noqa: ASYNC110  (a thread has no event)
                await anyio.sleep(POLL_SECONDS)
        return not thread.is_alive()

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
        links = [Link(get_current_span(ambient).get_span_context())] if parent and ambient else []
        with self.tracer.start_as_current_span(
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
        span = self.tracer.start_span(
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
    """The trace context of a client; None if it sent none, or an invalid context."""
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


class EpisodeSpans:
    """Makes the spans of an episode's set-up and its grading.

    Each is a child of the span in whose context it begins: the set-up of the request that started the
    episode, as the runner's task has the context of that request, and the grading of the request that closed
    the attempt.
    """

    __slots__ = ("_attributes", "_grades", "_span", "_tracer")

    def __init__(self, tracer: Tracer, attributes: Mapping[str, str]) -> None:
        self._tracer, self._attributes = tracer, attributes
        self._span: Span | None = None
        self._grades = False

    def on_event(self, event: Event) -> None:
        """Begin or end a span."""
        match event:
            case Admitted():
                self._begin("set_up")
            case Ready():
                self._end()
            case Claimed():
                self._grades = True
                self._begin("grade")
            case Judged() if self._span is not None and self._grades:
                self._span.add_event("gen_ai.evaluation.result", _result(event))
                self._end(None if event.reward is not None else event.status)
            case Ended(ending):
                self._end(ending)
            case _:
                pass

    def _begin(self, name: str) -> None:
        self._span = self._tracer.start_span(name, attributes=self._attributes)

    def _end(self, error: str | None = None) -> None:
        """End the open span, if there is one; with an error it failed for this reason."""
        if self._span is not None:
            if error is not None:
                self._span.set_attribute("error.type", error)
                self._span.set_status(StatusCode.ERROR)
            self._span.end()
            self._span = None


def _result(verdict: Judged) -> dict[str, str | float]:
    result: dict[str, str | float] = {"gen_ai.evaluation.name": "reward"}
    if verdict.reward is None or verdict.success is None:
        return {**result, "error.type": verdict.status}
    label = "pass" if verdict.success else "fail"
    score = {"gen_ai.evaluation.score.value": float(verdict.reward), "gen_ai.evaluation.score.label": label}
    return {**result, **score}


def create(settings: Settings) -> AbstractAsyncContextManager[ExportedSpans] | None:
    """The spans of a server with these settings; None without `--spans`."""
    return exported_spans() if settings.of(SpanSettings).spans else None


@asynccontextmanager
async def exported_spans() -> AsyncGenerator[ExportedSpans]:
    """Spans that go to the collector which the variables OTEL_* name, by OTLP over HTTP.

    Raises SettingsError without OpenTelemetry's SDK, and for a variable that does not fit.
    """
    names = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    for name in names:
        if (protocol := os.environ.get(name, PROTOCOL)) != PROTOCOL:
            raise SettingsError(f"--spans: {name}={protocol}: only {PROTOCOL} can be used; leave it out")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise SettingsError(
            f"--spans requires OpenTelemetry's SDK ({error}); in the clone: pip install '.[otel]'"
        ) from None
    try:
        own = {SERVICE_NAME: SERVICE, SERVICE_VERSION: __version__}
        resource = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        exporter = OTLPSpanExporter()
        provider.add_span_processor(BatchSpanProcessor(exporter))
    except ValueError as error:
        raise SettingsError(f"--spans: a variable OTEL_* does not fit: {error}") from None
    spans = ExportedSpans(provider.get_tracer("decathlon_mcp", __version__), provider.shutdown)
    try:
        yield spans
    finally:
        if not await spans.end():
            # Otherwise its thread tries again for half a minute, in a process that may go on.
            exporter.shutdown()
