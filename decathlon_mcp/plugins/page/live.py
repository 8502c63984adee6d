"""Live episodes: one snapshot a second, shared by all viewers, and made only while somebody looks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from time import monotonic

import anyio
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.http.health import server_state
from decathlon_mcp.plugins.page.rendering import marked
from decathlon_mcp.types import JsonObject

SNAPSHOT_SECONDS = 1.0
HEARTBEAT_SECONDS = 15.0
"""A stream without a change sends an empty line this often, so that its loss is noticed."""
MAX_STREAMS = 64
MAX_OWN_STREAMS = 16
"""Streams of one token."""
MAX_LIVE_ROWS = 1_000
"""Episodes that one viewer is shown; the counts are of all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveEpisode:
    """One episode that has not ended."""

    public_id: str
    task: str
    suite: str
    run: str | None
    model: str | None
    owner: str | None
    phase: str
    calls: int
    replies: int
    """Calls that have their reply."""
    started_at: float
    """Unix seconds."""
    waiting_for: str | None
    """What a queued episode waits for, as a text for people."""

    def to_json(self) -> JsonObject:
        """What of a row changes."""
        return {
            "id": self.public_id,
            "phase": self.phase,
            "calls": self.calls,
            "replies": self.replies,
            "waits": self.waiting_for and marked(self.waiting_for),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The server at one moment. `state`: as `/readyz` names it. `places`: limit of `sandboxes`."""

    episodes: tuple[LiveEpisode, ...]
    state: str
    queued: int
    sandboxes: int
    places: int

    def has(self, public_id: str) -> bool:
        """Whether an episode plays on this server; others of its state folder may play on another server."""
        return any(each.public_id == public_id for each in self.episodes)


def snapshot_of(registry: EpisodeRegistry) -> Snapshot:
    """What plays now on a server."""
    admission = registry.admission
    state, _ = server_state(registry)
    return Snapshot(
        episodes=tuple(map(_live_episode, registry.live)),
        state=str(state).replace("_", " "),
        queued=admission.queued,
        sandboxes=admission.active,
        places=admission.max_sandboxes,
    )


def _live_episode(episode: Episode) -> LiveEpisode:
    labels = episode.spec.labels
    return LiveEpisode(
        public_id=episode.public_id,
        task=episode.spec.task_name,
        suite=episode.sandbox_factory.suite.name,
        run=labels.get("run"),
        model=labels.get("model"),
        owner=episode.spec.owner.token,
        phase=str(episode.state.phase),
        calls=episode.calls.sent,
        replies=episode.trajectory.index.answered,
        started_at=episode.started_at,
        waiting_for=episode.ticket.waiting_for,
    )


@dataclass(frozen=True, slots=True)
class LiveQuery:
    """What one viewer looks at. `owner`: only that token's episodes. `episode`: only this id."""

    owner: str | None = None
    episode: str | None = None

    def has(self, episode: LiveEpisode) -> bool:
        """Whether an episode is part of it."""
        return self.owner in (None, episode.owner) and self.episode in (None, episode.public_id)


@dataclass
class LiveFeed:
    """The snapshots of one server.

    `make`: makes one, without blocking. `is_stopping`: whether the server stops, and its connections should
    end.
    """

    make: Callable[[], Snapshot]
    is_stopping: Callable[[], bool]
    streams: Counter[str | None] = field(default_factory=Counter["str | None"])
    """How many viewers of each owner have one."""
    _newest: Snapshot | None = None
    _made_at: float = 0.0
    _encoded: dict[LiveQuery, bytes] = field(default_factory=dict["LiveQuery", bytes])

    def snapshot(self) -> Snapshot:
        """The newest snapshot, at most `SNAPSHOT_SECONDS` old."""
        now = monotonic()
        # A little less than the streams' pause, so that each of their rounds has a new snapshot.
        if self._newest is None or now - self._made_at > 0.9 * SNAPSHOT_SECONDS:
            self._newest, self._made_at = self.make(), now
            self._encoded.clear()
        return self._newest

    def visible(self, query: LiveQuery) -> tuple[LiveEpisode, ...]:
        """The live episodes that a viewer sees, newest first."""
        found = filter(query.has, self.snapshot().episodes)
        return tuple(sorted(found, key=lambda each: -each.started_at)[:MAX_LIVE_ROWS])

    async def events(self, query: LiveQuery, is_open: Callable[[], bool]) -> AsyncGenerator[bytes]:
        """The server-sent events of one viewer, until the server stops or `is_open` returns False."""
        sent, sent_at = b"", monotonic()
        while not self.is_stopping() and is_open():
            event = self._event(query)
            if event != sent or monotonic() - sent_at > HEARTBEAT_SECONDS:
                yield event if event != sent else b":\n\n"
                sent, sent_at = event, monotonic()
            await anyio.sleep(SNAPSHOT_SECONDS)

    def _event(self, query: LiveQuery) -> bytes:
        snapshot = self.snapshot()
        if query not in self._encoded:
            value = {
                "state": snapshot.state,
                "queued": snapshot.queued,
                "sandboxes": snapshot.sandboxes,
                "places": snapshot.places,
                "live": sum(map(query.has, snapshot.episodes)),
                "episodes": [each.to_json() for each in self.visible(query)],
            }
            self._encoded[query] = b"data: " + json.dumps(value).encode() + b"\n\n"
        return self._encoded[query]


class LiveResponse(StreamingResponse):
    """The events for one viewer, as long as the browser reads them. `is_open`: whether its session is."""

    def __init__(self, feed: LiveFeed, query: LiveQuery, is_open: Callable[[], bool]) -> None:
        # nginx would collect events otherwise.
        headers = {"X-Accel-Buffering": "no"}
        super().__init__(feed.events(query, is_open), headers=headers, media_type="text/event-stream")
        self._streams = feed.streams
        self._owner = query.owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Counted here and not in the generator, which begins in another task: of viewers who come at the same
        # time, all would get a stream.
        self._streams[self._owner] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._streams[self._owner] -= 1
