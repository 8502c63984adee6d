"""Metrics of one server for Prometheus: what its layers report as it happens.

`Metrics` is made once for a server and given to the parts that report to it. What can be read at any time
(episodes by phase, the queue) is not counted here but read when somebody asks (`http/health.py`).

Everything is reported on the event loop's thread and read from another one.

Every label has a fixed set of values: suites, phases and endings of the server's own code, and tasks of its
catalogue. Nothing that a client sends becomes one.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from time import perf_counter
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

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
RecoveryResult = Literal["continued", "graded", "started_over", "ended"]
"""What became of an episode of a dead server."""

Opening = Literal["warm", "copied", "cold"]
"""Whether a sandbox had been opened ahead, or is a copy of a saved state."""

OUTCOMES: tuple[CallOutcome, ...] = ("ok", "error", "lost", "cancelled")
RECOVERY_RESULTS: tuple[RecoveryResult, ...] = ("continued", "graded", "started_over", "ended")

OPENINGS: tuple[Opening, ...] = ("warm", "copied", "cold")

TaskKey: TypeAlias = tuple[str, str]
"""A suite's name and a task's id."""


class Metrics:
    """The metrics of one server.

    `by_task`: episodes and verdicts are counted by task, not only by suite. `suites`, `endings`, `statuses`:
    values of labels whose counters begin at 0, unless they are counted by task.
    """

    def __init__(
        self,
        *,
        by_task: bool = False,
        suites: Collection[str] = (),
        endings: Collection[str] = (),
        statuses: Collection[str] = (),
    ) -> None:
        self.by_task = by_task
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
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
        for result in RECOVERY_RESULTS:
            self._recovered.labels(result)
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
        self.calls = {outcome: calls.labels(outcome) for outcome in OUTCOMES}
        call_seconds = Histogram(
            "decathlon_tool_call_seconds",
            "Duration of the parts of a call: `request` from the head of the HTTP request to the episode, "
            "`driver` until the sandbox has replied, `response` until the end of the HTTP response.",
            ("hop",),
            buckets=CALL_BUCKETS_SECONDS,
            registry=registry,
        )
        self.request_seconds = call_seconds.labels("request")
        self.driver_seconds = call_seconds.labels("driver")
        self.response_seconds = call_seconds.labels("response")
        # HTTP.
        self.open_connections = 0
        """Number of open HTTP connections."""
        connections = gauge("decathlon_http_connections", "Open HTTP connections.")
        connections.set_function(lambda: self.open_connections)
        self.responses = counter(
            "decathlon_http_responses", "HTTP responses that were begun, by status.", ("status",)
        )
        self.responses.labels(200)
        self.request_bytes = counter("decathlon_http_request_bytes", "Bytes of the bodies of MCP requests.")
        self.response_bytes = counter(
            "decathlon_http_response_bytes", "Bytes of the bodies of all HTTP responses."
        )
        # The server and its machine.
        self._generation = gauge("decathlon_generation", "Number of servers so far on this state folder.")
        self._sweeps = counter("decathlon_sweeps", "Sweeps for sandboxes that no episode has.")
        self._swept_sandboxes = counter("decathlon_swept_sandboxes", "Sandboxes that sweeps have removed.")
        self._openings = counter(
            "decathlon_sandbox_openings",
            "Sandboxes for agents and graders: `warm` if they had been opened ahead, `copied` if they are "
            "copies of saved states.",
            ("opening",),
        )
        for opening in OPENINGS:
            self._openings.labels(opening)
        ProcessCollector(registry=registry)
        if not by_task:
            # An alert on an increase does not see the first increment of a counter that did not exist before.
            for suite in suites:
                self.started.labels(suite)
                for ending in endings:
                    self.ended.labels(suite, ending)
                for status in statuses:
                    self.verdicts.labels(suite, status)

    @property
    def subject_labels(self) -> tuple[str, ...]:
        """The labels that say what was played."""
        return ("suite", "task") if self.by_task else ("suite",)

    def subject(self, key: TaskKey) -> tuple[str, ...]:
        """The values of `subject_labels`. The task must be one of the catalogue's."""
        return key if self.by_task else key[:1]

    def episode(self, suite: str, task: str) -> EpisodeMetrics:
        """What an episode reports to, one that begins or one of a dead server."""
        return EpisodeMetrics(self, (suite, task))

    def recovered(self, result: RecoveryResult) -> None:
        """It is known what became of an episode of a dead server."""
        self._recovered.labels(result).inc()

    def set_generation(self, generation: int) -> None:
        """The server has this generation: how many have been started on its state folder."""
        self._generation.set(generation)

    def sandbox_taken(self, opening: Opening) -> None:
        """An agent or a grader gets a sandbox."""
        self._openings.labels(opening).inc()

    def swept(self, sandboxes: int) -> None:
        """A sweep over one server's sandboxes is over and has removed as many."""
        self._sweeps.inc()
        self._swept_sandboxes.inc(sandboxes)


class EpisodeMetrics:
    """What one episode reports. Made by `Metrics.episode`."""

    __slots__ = ("_claimed_at", "_key", "_metrics", "_since")

    def __init__(self, metrics: Metrics, key: TaskKey) -> None:
        self._metrics = metrics
        self._key = key
        # When it was started or admitted, and claimed; None for what happened in another server.
        self._since: float | None = None
        self._claimed_at: float | None = None

    def started(self) -> None:
        """A client has started it; not called for an episode of a dead server."""
        self._since = perf_counter()
        self._metrics.started.labels(*self._metrics.subject(self._key)).inc()

    def recovered(self, result: RecoveryResult) -> None:
        """It is one of a dead server, and it is known what became of it."""
        self._metrics.recovered(result)

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

    def copied(self) -> None:
        """Its sandbox is a copy of a saved state."""
        self._metrics.sandbox_taken("copied")

    def called(self, outcome: CallOutcome, sent_at: float) -> None:
        """A call has ended that was sent at that time of `perf_counter`."""
        metrics = self._metrics
        metrics.calls[outcome].inc()
        metrics.driver_seconds.observe(perf_counter() - sent_at)

    def claimed(self) -> None:
        """The attempt is closed and will be graded."""
        self._claimed_at = perf_counter()

    def verdict_made(self, status: str, *, reward: float | None = None, success: bool | None = None) -> None:
        """There is a verdict, with this status, and with a reward and its success if it has them."""
        metrics = self._metrics
        metrics.verdicts.labels(*metrics.subject(self._key), status).inc()
        if self._claimed_at is not None:
            metrics.evaluation_seconds.observe(perf_counter() - self._claimed_at)

    def ended(self, ending: str) -> None:
        """It is over."""
        self._metrics.ended.labels(*self._metrics.subject(self._key), ending).inc()
