"""Spans of one server for OpenTelemetry, which `--spans` switches on.

Here are the spans of an episode's set-up and grading, and the export; `protocol/spans.py` has those of
requests. OpenTelemetry's API comes with the SDK of MCP. Its own SDK is an extra, which only `exported_spans`
imports: that takes a third of a second.

A span has no argument, no reply, no message of an error and no id that gives access: a collector is read by
more people than may play.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from threading import Thread

import anyio
from opentelemetry.trace import Span, StatusCode, Tracer

from decathlon_mcp import __version__
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.plugins.spans.settings import SpanSettings
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.metrics import EpisodeMetrics, Metrics, TaskKey

FLUSH_SECONDS = 2.0
"""How long the end of a server may wait for its collector: systemd and users wait for it."""
POLL_SECONDS = 0.02
PROTOCOL = "http/protobuf"
SERVICE = "decathlon-mcp"


class ExportedSpans:
    """Makes spans with `tracer`. `end` sends what is left to send, and blocks."""

    def __init__(self, tracer: Tracer, end: Callable[[], object]) -> None:
        self.tracer = tracer
        self._end = end

    def episode(self, metrics: Metrics, key: TaskKey, public_id: str) -> EpisodeSpans:
        """What an episode reports to instead of `metrics.episode`."""
        return EpisodeSpans(metrics, key, self.tracer, public_id)

    async def end(self) -> bool:
        """Send what has not been sent yet, for FLUSH_SECONDS at most; whether that was enough."""
        # The process does not wait for a daemon's end, as it would for that of one of anyio's threads.
        thread = Thread(target=self._end, name="last spans", daemon=True)
        thread.start()
        with anyio.move_on_after(FLUSH_SECONDS, shield=True):
            while thread.is_alive():  # noqa: ASYNC110  (a thread has no event)
                await anyio.sleep(POLL_SECONDS)
        return not thread.is_alive()


class EpisodeSpans(EpisodeMetrics):
    """Metrics of one episode, and spans of its set-up and its grading.

    Each is a child of the span in whose context it begins: the set-up of the request that started the
    episode, as the runner's task has the context of that request, and the grading of the one that closed the
    attempt.
    """

    __slots__ = ("_attributes", "_span", "_tracer")

    def __init__(self, metrics: Metrics, key: TaskKey, tracer: Tracer, public_id: str) -> None:
        super().__init__(metrics, key)
        suite, task = key
        self._attributes = {
            "decathlon.episode": public_id,
            "decathlon.suite": suite,
            "decathlon.task": task,
        }
        self._tracer = tracer
        self._span: Span | None = None

    def admitted(self) -> None:
        super().admitted()
        self._span = self._tracer.start_span("set_up", attributes=self._attributes)

    def ready(self) -> None:
        super().ready()
        self._end()

    def claimed(self) -> None:
        super().claimed()
        self._span = self._tracer.start_span("grade", attributes=self._attributes)

    def verdict_made(self, status: str, *, reward: float | None = None, success: bool | None = None) -> None:
        super().verdict_made(status, reward=reward, success=success)
        if self._span is None or self._claimed_at is None:
            return  # nothing was graded
        result: dict[str, str | float] = {"gen_ai.evaluation.name": "reward"}
        if reward is None or success is None:
            result["error.type"] = status
        else:
            result["gen_ai.evaluation.score.value"] = float(reward)
            result["gen_ai.evaluation.score.label"] = "pass" if success else "fail"
        self._span.add_event("gen_ai.evaluation.result", result)
        self._end(None if reward is not None else status)

    def ended(self, ending: str) -> None:
        super().ended(ending)
        self._end(ending)

    def _end(self, error: str | None = None) -> None:
        """End the open span, if there is one; with an error it failed for this reason."""
        if self._span is not None:
            if error is not None:
                self._span.set_attribute("error.type", error)
                self._span.set_status(StatusCode.ERROR)
            self._span.end()
            self._span = None


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
