"""`/healthz`, `/readyz` and `/metrics`: whether the server works, can start an episode, and what it does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import chain

import anyio.to_thread
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decathlon_mcp import __version__
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import AccessDeniedError, AtCapacityError
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.lines import JsonLine
from decathlon_mcp.sandboxes.memory import available_bytes
from decathlon_mcp.storage.disk import RETRY_SECONDS as DISK_RETRY_SECONDS

RECOVERY_RETRY_SECONDS = 2.0
"""When to ask a server again that is starting, takes over the episodes of a dead one, or has no engine."""


class ServerState(StrEnum):
    """What a server can do, as `/readyz` reports it. The first that applies counts."""

    DRAINING = "draining"
    STARTING = "starting"
    RECOVERING = "recovering"
    NO_ENGINE = "no_engine"
    DISK_LOW = "disk_low"
    UNWRITABLE = "unwritable"
    FULL = "full"
    READY = "ready"


HEALTH_WORDS: Mapping[ServerState, str] = {
    ServerState.DRAINING: "draining",
    ServerState.DISK_LOW: "disk_full",
}
"""`status` of `/healthz`, which is for clients that do not read `state`; `ok` for every other state."""


def server_state(registry: EpisodeRegistry) -> tuple[ServerState, float | None]:
    """The state of the server, and in how many seconds it may be another one, if that can be estimated."""
    if registry.closing:
        return ServerState.DRAINING, None
    if not registry.is_running:
        return ServerState.STARTING, RECOVERY_RETRY_SECONDS
    if registry.recovering:
        return ServerState.RECOVERING, RECOVERY_RETRY_SECONDS
    if not all(factory.provider.is_available for factory in registry.factories.values()):
        return ServerState.NO_ENGINE, RECOVERY_RETRY_SECONDS
    if registry.options.disk.is_low():
        return ServerState.DISK_LOW, DISK_RETRY_SECONDS
    if registry.why_unwritable() is not None:
        return ServerState.UNWRITABLE, RECOVERY_RETRY_SECONDS
    try:
        registry.admission.refuse_if_full()
    except AtCapacityError as error:
        return ServerState.FULL, error.data["retryAfterSeconds"]
    return ServerState.READY, None


PROBE_PATHS = frozenset({"/healthz", "/readyz"})
"""Paths that answer under every host name."""


class HealthEndpoints:
    """The endpoints for monitoring one server.

    `/healthz` and `/readyz` are for probes: they need no token, and answer under every host name, because a
    probe often knows an address only. `/metrics` has names of suites and tasks and counts of all tokens, so
    it needs the token of a controller or an administrator if the server has tokens, and the host name is
    checked, so that no page in a browser can read it.
    """

    def __init__(self, registry: EpisodeRegistry, tokens: Tokens) -> None:
        self._registry = registry
        self._tokens = tokens

    def routes(self) -> list[Route]:
        """The routes of the application to these endpoints."""
        return [
            Route("/healthz", self._health),
            Route("/readyz", self._readiness),
            Route("/metrics", self._metrics),
        ]

    async def _health(self, request: Request) -> Response:
        """200 as long as the server answers, whatever its state."""
        state, _ = server_state(self._registry)
        return JsonLine({"status": HEALTH_WORDS.get(state, "ok"), "state": str(state), **self._numbers()})

    async def _readiness(self, request: Request) -> Response:
        """200 if an episode could be started now, else 503."""
        state, retry_seconds = server_state(self._registry)
        why = self._registry.why_unwritable() if state is ServerState.UNWRITABLE else None
        return JsonLine(
            {"status": str(state), **({"why": why} if why else {}), **self._numbers()},
            status_code=200 if state is ServerState.READY else 503,
            headers=None if retry_seconds is None else {"Retry-After": f"{retry_seconds:.0f}"},
        )

    def _numbers(self) -> dict[str, int]:
        admission = self._registry.admission
        return {
            "episodes": len(self._registry.live),
            "sandboxes": admission.active,
            "waiting": admission.queued,
        }

    async def _metrics(self, request: Request) -> Response:
        """The metrics, in the text format of Prometheus or in OpenMetrics.

        Raises UnauthorizedError, AccessDeniedError.
        """
        if self._tokens and not self._tokens.require(request.headers.get("authorization")).controls:
            raise AccessDeniedError("metrics need the token of a controller or an administrator")
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        # What belongs to the event loop is read here. The text takes milliseconds, so a thread writes it.
        scrape = Scrape(list(current_values(self._registry)), self._registry.metrics.registry)
        text = await anyio.to_thread.run_sync(encode, scrape)
        return Response(text, headers={"Content-Type": content_type})


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


def current_values(registry: EpisodeRegistry) -> Iterator[Metric]:
    """The metrics that can be read at any time."""
    admission, metrics, disk = registry.admission, registry.metrics, registry.options.disk
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
    counts = Counter(
        ((episode.sandbox_factory.suite.name, episode.spec.task_name), episode.state.phase)
        for episode in registry.live
    )
    episodes = GaugeMetricFamily(
        "decathlon_episodes",
        "Episodes that have not ended, by phase.",
        labels=[*metrics.subject_labels, "phase"],
    )
    by_subject: Counter[tuple[str, ...]] = Counter()
    if not metrics.by_task:
        # Series that are always there can be added up and compared; with tasks they would be too many.
        for suite in registry.catalogue.suites:
            by_subject.update({(suite.name, phase): 0 for phase in Phase if phase is not Phase.ENDED})
    for (key, phase), count in counts.items():
        by_subject[*metrics.subject(key), phase] += count
    for labels, count in by_subject.items():
        episodes.add_metric(labels, count)
    yield episodes
    for name, documentation, value in (
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
