"""`/healthz` and `/readyz`: whether the server works, and whether it can start an episode."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.http.refusals import json_line
from decathlon_mcp.storage.disk import RETRY_SECONDS as DISK_RETRY_SECONDS

RECOVERY_RETRY_SECONDS = 2.0
"""When to ask a server again that is starting, takes over the episodes of a dead server, or has no engine."""


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
    """The state of the server, and in how many seconds it may change, if that can be estimated."""
    if registry.shutdown.has_begun:
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


def health_routes(registry: EpisodeRegistry) -> list[Route]:
    """The endpoints for monitoring one server.

    They are for probes: they need no token, and answer under every host name, because a probe often knows an
    address only.
    """

    def numbers() -> dict[str, int]:
        admission = registry.admission
        live = len(registry.live)
        return {"episodes": live, "sandboxes": admission.active, "waiting": admission.queued}

    async def health(request: Request) -> Response:
        """200 as long as the server answers, whatever its state."""
        state, _ = server_state(registry)
        return json_line({"status": HEALTH_WORDS.get(state, "ok"), "state": str(state), **numbers()})

    async def readiness(request: Request) -> Response:
        """200 if an episode could be started now, else 503."""
        state, retry_seconds = server_state(registry)
        why = registry.why_unwritable() if state is ServerState.UNWRITABLE else None
        return json_line(
            {"status": str(state), **({"why": why} if why else {}), **numbers()},
            200 if state is ServerState.READY else 503,
            None if retry_seconds is None else {"Retry-After": f"{retry_seconds:.0f}"},
        )

    return [Route("/healthz", health), Route("/readyz", readiness)]
