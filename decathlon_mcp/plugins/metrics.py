"""Metrics of one server for Prometheus, `/metrics`: what has happened in it, counted and timed.

What can be read at any time (episodes by phase, the queue) is not counted here but read when somebody asks
(`Scrape`). Events come on the event loop's thread, and another thread reads the counters.

Every label has a fixed set of values: suites, phases and endings of the server's own code, and tasks of its
catalogue. Nothing that a client sends becomes one.
"""

from __future__ import annotations

import collections
from collections.abc import Collection, Iterable, Iterator
from functools import partial
from itertools import chain
from time import perf_counter
from typing import Any, get_args

import anyio.to_thread
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decathlon_mcp import __version__
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import AccessDeniedError
from decathlon_mcp.events import (
    Admitted,
    Called,
    CallOutcome,
    Claimed,
    Emit,
    Ended,
    Event,
    Judged,
    Opening,
    Ready,
    Recovered,
    RecoveryResult,
    ResponseOver,
    SandboxTaken,
    Started,
    Swept,
)
from decathlon_mcp.grading.verdict import Status
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.health import ServerState, server_state
from decathlon_mcp.plugins.settings import MetricSettings
from decathlon_mcp.sandboxes.machine_limits import available_bytes
from decathlon_mcp.settings import Settings

CALL_BUCKETS_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""From the server's own share of a call, under a millisecond, to programs that run for minutes."""
PHASE_BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""From a process of the starter suite to the default deadline of an evaluation."""


def create(settings: Settings, catalogue: Catalogue) -> Metrics:
    """The metrics of a server with these suites."""
    suites = [suite.name for suite in catalogue.suites]
    return Metrics(by_task=settings.of(MetricSettings).metrics_tasks, suites=suites)


class Metrics:
    """The metrics of one server, an `events.Listener`.

    `by_task`: episodes and verdicts are counted by task, not only by suite. `suites`: their counters begin at
    0, unless they are counted by task.
    """

    def __init__(self, *, by_task: bool = False, suites: Collection[str] = ()) -> None:
        self.by_task = by_task
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        phases = partial(Histogram, registry=registry, buckets=PHASE_BUCKETS_SECONDS)
        subject = self.subject_labels
        # Episodes.
        self.started = counter("decathlon_episodes_started", "Episodes that clients have started.", subject)
        self.ended = counter(
            "decathlon_episodes_ended", "Episodes that have ended, by the reason.", (*subject, "ending")
        )
        self._recovered = counter(
            "decathlon_episodes_recovered",
            "Episodes of a dead server that this one found, by what became of them.",
            ("result",),
        )
        self.queue_seconds = phases(
            "decathlon_queue_seconds", "Time from an episode's start until it may open its sandbox."
        )
        self.opening_seconds = phases(
            "decathlon_opening_seconds",
            "Time from when it may open its sandbox until its tools can be called, if the set-up succeeds.",
        )
        self.verdicts = counter(
            "decathlon_evaluations",
            "Verdicts by status (forfeited: cannot be graded, perhaps by the agent's doing), also of those "
            "that were not evaluated.",
            (*subject, "status"),
        )
        self.evaluation_seconds = phases(
            "decathlon_evaluation_seconds", "Time from the end of an attempt to its verdict."
        )
        # Calls.
        calls = counter("decathlon_tool_calls", "Calls that were sent to tasks' MCP servers.", ("outcome",))
        self.calls = {outcome: calls.labels(outcome) for outcome in get_args(CallOutcome)}
        call_seconds = Histogram(
            "decathlon_tool_call_seconds",
            "Duration of the parts of a call: `request` from the head of the HTTP request to the episode, "
            "`driver` until the sandbox has replied, `response` until the end of the HTTP response.",
            ("hop",),
            buckets=CALL_BUCKETS_SECONDS,
            registry=registry,
        )
        self._request_seconds = call_seconds.labels("request")
        self.driver_seconds = call_seconds.labels("driver")
        self._response_seconds = call_seconds.labels("response")
        # HTTP.
        self._responses = counter(
            "decathlon_http_responses", "HTTP responses that are over, by status.", ("status",)
        )
        self._responses.labels(200)
        self._request_bytes = counter("decathlon_http_request_bytes", "Bytes of the bodies of MCP requests.")
        self._response_bytes = counter(
            "decathlon_http_response_bytes", "Bytes of the bodies of all HTTP responses."
        )
        # The server and its machine.
        self._sweeps = counter("decathlon_sweeps", "Sweeps for sandboxes that no episode has.")
        self._swept_sandboxes = counter("decathlon_swept_sandboxes", "Sandboxes that sweeps have removed.")
        self._openings = counter(
            "decathlon_sandbox_openings",
            "Sandboxes for agents and graders: `warm` if they had been opened ahead, `copied` if they are "
            "copies of saved states.",
            ("opening",),
        )
        ProcessCollector(registry=registry)
        # An alert on an increase does not see the first increment of a counter that did not exist before.
        for family, values in ((self._recovered, RecoveryResult), (self._openings, Opening)):
            for value in get_args(values):
                family.labels(value)
        for suite in () if by_task else suites:
            self.started.labels(suite)
            for ending in Ending:
                self.ended.labels(suite, ending.name.lower())
            for status in get_args(Status):
                self.verdicts.labels(suite, status)

    @property
    def subject_labels(self) -> tuple[str, ...]:
        """The labels that say what was played."""
        return ("suite", "task") if self.by_task else ("suite",)

    def subject(self, suite: str, task: str) -> tuple[str, ...]:
        """The values of `subject_labels`. The task must be one of the catalogue's."""
        return (suite, task) if self.by_task else (suite,)

    def episode(self, suite: str, task: str, public_id: str) -> Emit:
        """What counts an episode."""
        return EpisodeMetrics(self, self.subject(suite, task)).on_event

    def on_event(self, event: Event) -> None:
        """Count an event of the server."""
        match event:
            case ResponseOver(status, request_bytes, response_bytes, call_seconds):
                self._responses.labels(status).inc()
                self._request_bytes.inc(request_bytes)
                self._response_bytes.inc(response_bytes)
                if call_seconds is not None:
                    self._request_seconds.observe(call_seconds[0])
                    self._response_seconds.observe(call_seconds[1])
            case SandboxTaken(opening):
                self._openings.labels(opening).inc()
            case Swept(sandboxes):
                self._sweeps.inc()
                self._swept_sandboxes.inc(sandboxes)
            case Recovered(result):
                self._recovered.labels(result).inc()
            case _:
                pass


class EpisodeMetrics:
    """Counts what happens in one episode. `subject`: the labels of what is played."""

    __slots__ = ("_claimed_at", "_metrics", "_since", "_subject")

    def __init__(self, metrics: Metrics, subject: tuple[str, ...]) -> None:
        self._metrics, self._subject = metrics, subject
        # When it was started or admitted, and claimed; None for what happened in another server.
        self._since: float | None = None
        self._claimed_at: float | None = None

    def on_event(self, event: Event) -> None:
        """Count an event of the episode."""
        metrics = self._metrics
        match event:
            case Called(outcome, sent_at):
                metrics.calls[outcome].inc()
                metrics.driver_seconds.observe(perf_counter() - sent_at)
            case Started():
                self._since = perf_counter()
                metrics.started.labels(*self._subject).inc()
            case Admitted():
                now = perf_counter()
                if self._since is not None:
                    metrics.queue_seconds.observe(now - self._since)
                self._since = now
            case Ready():
                if self._since is not None:
                    metrics.opening_seconds.observe(perf_counter() - self._since)
                self._since = None
            case Claimed():
                self._claimed_at = perf_counter()
            case Judged(status):
                metrics.verdicts.labels(*self._subject, status).inc()
                if self._claimed_at is not None:
                    metrics.evaluation_seconds.observe(perf_counter() - self._claimed_at)
            case Ended(ending):
                metrics.ended.labels(*self._subject, ending).inc()
            case _:
                metrics.on_event(event)


def metrics_of(registry: EpisodeRegistry) -> Metrics:
    """The metrics that count a server's events."""
    (metrics,) = (listener for listener in registry.events.listeners if isinstance(listener, Metrics))
    return metrics


def metrics_route(registry: EpisodeRegistry, tokens: Tokens, *_: Any, has_page: bool) -> Route:
    """The route of the application to the metrics.

    They have names of suites and tasks and counts of all tokens, so they need the token of a controller or an
    administrator if the server has tokens, and the host name is checked, so that no page in a browser can
    read them.
    """

    async def respond(request: Request) -> Response:
        if tokens and not tokens.require(request.headers.get("authorization")).controls:
            raise AccessDeniedError("metrics need the token of a controller or an administrator")
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # What belongs to the event loop is read here. The text takes milliseconds, so a thread writes it.
        metrics = metrics_of(registry)
        scrape = Scrape(list(current_values(registry, metrics)), metrics.registry)
        text = await anyio.to_thread.run_sync(encode, scrape)
        return Response(text, headers={"Content-Type": content_type})

    return Route("/metrics", respond, name="metrics for Prometheus")


class Scrape(Collector):
    """What one request to `/metrics` gets: metrics that were read just now, then what has been counted."""

    def __init__(self, current: Iterable[Metric], counted: Collector) -> None:
        self._current = current
        self._counted = counted

    def collect(self) -> Iterator[Metric]:
        for family in chain(self._current, self._counted.collect()):
            # prometheus_client adds the time at which each series began; it is a switch of the whole process
            # whether it does, and they would double the number of series.
            family.samples = [one for one in family.samples if not one.name.endswith("_created")]
            yield family


def current_values(registry: EpisodeRegistry, metrics: Metrics) -> Iterator[Metric]:
    """The metrics that can be read at any time."""
    admission, disk, store = registry.admission, registry.options.disk, registry.store
    info = GaugeMetricFamily("decathlon_info", "1, with the version of the server.", labels=["version"])
    info.add_metric([__version__], 1)
    yield info
    state, _ = server_state(registry)
    states = GaugeMetricFamily(
        "decathlon_state", "1 for the state that `/readyz` reports, 0 for the others.", labels=["state"]
    )
    for other in ServerState:
        states.add_metric([str(other)], other is state)
    yield states
    counts = collections.Counter(
        ((episode.sandbox_factory.suite.name, episode.spec.task_name), episode.state.phase)
        for episode in registry.live
    )
    episodes = GaugeMetricFamily(
        "decathlon_episodes",
        "Episodes that have not ended, by phase.",
        labels=[*metrics.subject_labels, "phase"],
    )
    by_subject = collections.Counter[tuple[str, ...]]()
    if not metrics.by_task:
        # Series that are always there can be added up and compared; with tasks they would be too many.
        for suite in registry.catalogue.suites:
            by_subject.update({(suite.name, phase): 0 for phase in Phase if phase is not Phase.ENDED})
    for (key, phase), count in counts.items():
        by_subject[*metrics.subject(*key), phase] += count
    for labels, count in by_subject.items():
        episodes.add_metric(labels, count)
    yield episodes
    for name, documentation, value in (
        (
            "generation",
            "Number of servers so far on this state folder.",
            1 if store is None else store.generation,
        ),
        ("http_connections", "Open HTTP connections.", registry.events.open_connections),
        ("sandboxes", "Episodes that have a sandbox or open one.", admission.active),
        (
            "sandboxes_limit",
            "`--max-sandboxes`, or what the limit of open files has room for.",
            admission.max_sandboxes,
        ),
        ("pool_idle", "Sandboxes that were opened ahead and are not used yet.", registry.source.idle),
        ("pool_opening", "Sandboxes that are being opened ahead.", registry.source.opening),
        ("queue_length", "Episodes that wait until they may open their sandbox.", admission.queued),
        ("memory_available_bytes", "Available memory of the machine.", _available_bytes()),
        ("memory_floor_bytes", "Available memory below which openings wait.", admission.memory.floor_bytes),
        ("memory_waiting", "Openings that wait for available memory.", admission.memory.waiting),
        ("disk_free_bytes", "Free space in the state folder.", _free_bytes(registry)),
        ("disk_floor_bytes", "Free space below which no episode starts.", disk.floor_bytes),
    ):
        yield GaugeMetricFamily(f"decathlon_{name}", documentation, value)


def _available_bytes() -> float:
    available = available_bytes()
    return float("nan") if available is None else available


def _free_bytes(registry: EpisodeRegistry) -> float:
    try:
        return registry.options.disk.free_bytes()
    except OSError:
        return float("nan")
