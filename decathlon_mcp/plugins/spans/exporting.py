"""Spans of one server for OpenTelemetry, which `--spans` switches on.

Here are the spans of an episode's set-up and grading, and the export; `requests.py` has those of requests.
OpenTelemetry's API comes with the SDK of MCP. Its own SDK is an extra, which only `exported_spans` imports:
that takes a third of a second.

A span has no argument, no reply, no message of an error and no id that gives access: a collector is read by
more people than may play.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from threading import Thread

import anyio
from opentelemetry.trace import Span, StatusCode, Tracer

from decathlon_mcp import __version__
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.events import Admitted, Claimed, Emit, Ended, Event, Judged, Ready
from decathlon_mcp.plugins.spans.requests import RequestSpans
from decathlon_mcp.plugins.spans.settings import SpanSettings
from decathlon_mcp.settings import Settings

FLUSH_SECONDS = 2.0
"""How long the end of a server may wait for its collector: systemd and users wait for it."""
POLL_SECONDS = 0.02
PROTOCOL = "http/protobuf"
SERVICE = "decathlon-mcp"


class ExportedSpans:
    """Makes spans with `tracer`. `end` sends what is left to send, and blocks."""

    def __init__(self, tracer: Tracer, end: Callable[[], object]) -> None:
        self.tracer = tracer
        self.serve = RequestSpans(tracer).serve
        self._end = end

    def on_event(self, event: Event) -> None:
        """Events of the server have no span; each request has one."""

    def episode(self, suite: str, task: str, public_id: str) -> Emit:
        """What makes the spans of an episode."""
        names = {"episode": public_id, "suite": suite, "task": task}
        return EpisodeSpans(self.tracer, {f"decathlon.{key}": name for key, name in names.items()}).on_event

    async def end(self) -> bool:
        """Send what has not been sent yet, for FLUSH_SECONDS at most; whether that was enough."""
        # The process does not wait for a daemon's end, as it would for that of one of anyio's threads.
        thread = Thread(target=self._end, name="last spans", daemon=True)
        thread.start()
        with anyio.move_on_after(FLUSH_SECONDS, shield=True):
            while thread.is_alive():  # noqa: ASYNC110  (a thread has no event)
                await anyio.sleep(POLL_SECONDS)
        return not thread.is_alive()


class EpisodeSpans:
    """Makes the spans of an episode's set-up and its grading.

    Each is a child of the span in whose context it begins: the set-up of the request that started the
    episode, as the runner's task has the context of that request, and the grading of the one that closed the
    attempt.
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
