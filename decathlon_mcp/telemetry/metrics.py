"""Metrics of one server for Prometheus: what its layers report as it happens.

`Metrics` is made once for a server and given to the parts that report to it. What can be read at any time
(episodes by phase, the queue) is not counted here but read when somebody asks (`http/health.py`).

Everything is reported on the event loop's thread and read from another one.

Decided 2026-11-22: what is counted for every request uses `LoopCounter` and `LoopHistogram`. The counters and
histograms of prometheus_client take a lock and cost 0.3 to 0.9 us each; a call reports eight numbers.

Every label has a fixed set of values: suites, phases and endings of the server's own code, and tasks of its
catalogue. Nothing that a client sends becomes one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping
from itertools import accumulate
from time import perf_counter
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

CALL_BUCKETS_SECONDS = (
    *(0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0),
)
"""From the server's own share of a call, under a millisecond, to programs that run for minutes."""
PHASE_BUCKETS_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""From a process of the starter suite to the default deadline of an evaluation."""

CallOutcome = Literal["ok", "error", "lost", "cancelled"]
"""`error`: the reply is an error or has `isError`. `lost`: no reply came, as the sandbox or the server in it
ended. `cancelled`: the client gave up."""
Hop = Literal["request", "driver", "response"]
"""Parts of a call, in order. `request`: from the head of the HTTP request to the episode. `driver`: until the
driver's reply. `response`: until the end of the response was given to the network."""
RecoveryResult = Literal["continued", "graded", "started_over", "ended"]
"""What became of an episode of a dead server."""
SweptKind = Literal["sandboxes", "folders"]

OUTCOMES: tuple[CallOutcome, ...] = ("ok", "error", "lost", "cancelled")
HOPS: tuple[Hop, ...] = ("request", "driver", "response")
RECOVERY_RESULTS: tuple[RecoveryResult, ...] = ("continued", "graded", "started_over", "ended")
SWEPT_KINDS: tuple[SweptKind, ...] = ("sandboxes", "folders")

TaskKey: TypeAlias = tuple[str, str]
"""A suite's name and a task's id."""


class LoopCounter(Collector):
    """A counter with one label, or without labels, that only the event loop's thread increments."""

    def __init__(
        self, name: str, documentation: str, label: str = "", values: Collection[str] = ("",)
    ) -> None:
        self._name, self._documentation, self._label = name, documentation, label
        self._totals: dict[str, int] = dict.fromkeys(values, 0)

    def add(self, value: str = "", count: int = 1) -> None:
        """Increment the counter of a label's value."""
        self._totals[value] = self._totals.get(value, 0) + count

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily(
            self._name, self._documentation, labels=[self._label] if self._label else []
        )
        # A copy, because the dictionary may grow meanwhile.
        for value, total in self._totals.copy().items():
            family.add_metric([value] if self._label else [], total)
        yield family


class LoopHistogram(Collector):
    """A histogram of seconds with one label, that only the event loop's thread observes.

    What is read has whole observations in its buckets; the sum may be one observation apart.
    """

    def __init__(
        self, name: str, documentation: str, label: str, values: Collection[str], bounds: tuple[float, ...]
    ) -> None:
        self._name, self._documentation, self._label = name, documentation, label
        self._bounds = bounds
        self._buckets = {value: [0] * (len(bounds) + 1) for value in values}
        self._sums = dict.fromkeys(values, 0.0)

    def observe(self, value: str, seconds: float) -> None:
        """Add an observation to the histogram of a label's value."""
        self._buckets[value][bisect_left(self._bounds, seconds)] += 1
        self._sums[value] += seconds

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._documentation, labels=[self._label])
        bounds = [*map(str, self._bounds), "+Inf"]
        for value, buckets in self._buckets.items():
            cumulative = list(zip(bounds, accumulate(buckets.copy()), strict=True))
            family.add_metric([value], cumulative, self._sums[value])
        yield family


class Metrics:
    """The metrics of one server. `by_task`: episodes and verdicts are counted by task, not only by suite."""

    def __init__(self, *, by_task: bool = False) -> None:
        self.by_task = by_task
        self.registry = registry = CollectorRegistry()
        subject = self.subject_labels
        # Episodes.
        self._started = Counter(
            "decathlon_episodes_started", "Episodes that clients have started.", subject, registry=registry
        )
        self.ended = Counter(
            "decathlon_episodes_ended",
            "Episodes that have ended, by the reason.",
            (*subject, "ending"),
            registry=registry,
        )
        self._recovered = Counter(
            "decathlon_episodes_recovered",
            "Episodes of a dead server that this one found, by what became of them.",
            ("result",),
            registry=registry,
        )
        for result in RECOVERY_RESULTS:
            self._recovered.labels(result)
        self.queue_seconds = Histogram(
            "decathlon_queue_seconds",
            "Time from an episode's start until it has a place for its sandbox.",
            buckets=PHASE_BUCKETS_SECONDS,
            registry=registry,
        )
        self.opening_seconds = Histogram(
            "decathlon_opening_seconds",
            "Time from then until its tools can be called; only openings that succeeded.",
            buckets=PHASE_BUCKETS_SECONDS,
            registry=registry,
        )
        self.verdicts = Counter(
            "decathlon_evaluations",
            "Verdicts by status, also those of episodes that were not evaluated.",
            (*subject, "status"),
            registry=registry,
        )
        self.evaluation_seconds = Histogram(
            "decathlon_evaluation_seconds",
            "Time from the end of an attempt to its verdict.",
            buckets=PHASE_BUCKETS_SECONDS,
            registry=registry,
        )
        # Calls.
        self.calls = LoopCounter(
            "decathlon_tool_calls", "Calls that were sent to tasks' MCP servers.", "outcome", OUTCOMES
        )
        self.call_seconds = LoopHistogram(
            "decathlon_tool_call_seconds",
            "Duration of the parts of a call; request and response only over HTTP.",
            "hop",
            HOPS,
            CALL_BUCKETS_SECONDS,
        )
        # HTTP.
        self.connections = Gauge("decathlon_http_connections", "Open HTTP connections.", registry=registry)
        self.responses = LoopCounter(
            "decathlon_http_responses", "HTTP responses that were begun, by status.", "status", ("200",)
        )
        self.request_bytes = LoopCounter("decathlon_http_request_bytes", "Bytes of HTTP requests' bodies.")
        self.response_bytes = LoopCounter("decathlon_http_response_bytes", "Bytes of HTTP responses' bodies.")
        for collector in (
            *(self.calls, self.call_seconds),
            *(self.responses, self.request_bytes, self.response_bytes),
        ):
            registry.register(collector)
        # The server and its machine.
        self._generation = Gauge(
            "decathlon_generation", "Number of servers so far on this state folder.", registry=registry
        )
        self._sweeps = Counter("decathlon_sweeps", "Searches for what dead servers left.", registry=registry)
        self._swept = Counter(
            "decathlon_swept", "What sweeps have removed, by kind.", ("kind",), registry=registry
        )
        for kind in SWEPT_KINDS:
            self._swept.labels(kind)
        ProcessCollector(registry=registry)

    @property
    def subject_labels(self) -> tuple[str, ...]:
        """The labels that say what was played."""
        return ("suite", "task") if self.by_task else ("suite",)

    def subject(self, key: TaskKey) -> tuple[str, ...]:
        """The values of `subject_labels`. The task must be one of the catalogue's."""
        return key if self.by_task else key[:1]

    def episode(self, suite: str, task: str, *, recovered: bool = False) -> EpisodeMetrics:
        """What a new episode reports to. `recovered`: it was started by a dead server."""
        if not recovered:
            self._started.labels(*self.subject((suite, task))).inc()
        return EpisodeMetrics(self, (suite, task), None if recovered else perf_counter())

    def recovered(self, result: RecoveryResult) -> None:
        """An episode of a dead server was found in the store."""
        self._recovered.labels(result).inc()

    def set_generation(self, generation: int) -> None:
        """The server has this generation: how many have been started on its state folder."""
        self._generation.set(generation)

    def swept(self, removed: Mapping[SweptKind, int]) -> None:
        """A search for what dead servers left is over; `removed`: how many of each kind."""
        self._sweeps.inc()
        for kind, count in removed.items():
            self._swept.labels(kind).inc(count)

    def relayed(self, request_seconds: float, response_seconds: float) -> None:
        """A call's HTTP response has ended: the time before the episode had it, and after its reply."""
        self.call_seconds.observe("request", request_seconds)
        self.call_seconds.observe("response", response_seconds)


class EpisodeMetrics:
    """What one episode reports. Made by `Metrics.episode`."""

    __slots__ = ("_claimed_at", "_key", "_metrics", "_since")

    def __init__(self, metrics: Metrics, key: TaskKey, since: float | None) -> None:
        self._metrics = metrics
        self._key = key
        # When it was queued or admitted; None for what happened in another server.
        self._since = since
        self._claimed_at: float | None = None

    def admitted(self) -> None:
        """It has a place and its opening begins."""
        now = perf_counter()
        if self._since is not None:
            self._metrics.queue_seconds.observe(now - self._since)
        self._since = now

    def ready(self) -> None:
        """Its tools can be called."""
        if self._since is not None:
            self._metrics.opening_seconds.observe(perf_counter() - self._since)
        self._since = None

    def called(self, outcome: CallOutcome, sent_at: float) -> None:
        """A call has ended that was sent at that time of `perf_counter`."""
        self._metrics.calls.add(outcome)
        self._metrics.call_seconds.observe("driver", perf_counter() - sent_at)

    def claimed(self) -> None:
        """The attempt is closed and will be graded."""
        self._claimed_at = perf_counter()

    def verdict_made(self, status: str) -> None:
        """There is a verdict, with this status."""
        metrics = self._metrics
        metrics.verdicts.labels(*metrics.subject(self._key), status).inc()
        if self._claimed_at is not None:
            metrics.evaluation_seconds.observe(perf_counter() - self._claimed_at)

    def ended(self, ending: str) -> None:
        """It is over."""
        self._metrics.ended.labels(*self._metrics.subject(self._key), ending).inc()
