"""`/metrics`: what the server counts, and what can be read at any time, for Prometheus."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

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
from decathlon_mcp.errors import AccessDeniedError
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.health import ServerState, server_state
from decathlon_mcp.plugins.metrics.metrics import Metrics
from decathlon_mcp.sandboxes.memory import available_bytes


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
