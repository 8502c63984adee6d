"""Sessions of revisions with a handshake: each belongs to the path and the token that it was opened with.

With a store, sessions survive their server: a session that is not open here but in the store is opened again
by the first request that names it.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING, Literal, NamedTuple

import anyio

from decathlon_mcp.episodes.admission import share_of
from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import AtCapacityError, UnknownEpisodeError
from decathlon_mcp.protocol.messages import RESUMABLE_SINCE
from decathlon_mcp.storage.store import SessionRow
from decathlon_mcp.types import JsonObject

if TYPE_CHECKING:
    from decathlon_mcp.protocol.requests import Request, RequestContext

AddressKind = Literal["task", "episode", "lobby"]
MAX_SESSIONS = 10_000
"""Open sessions, ten for each of the most episodes that a machine can have."""
MAX_AGENT_SESSIONS = 1_000
"""Open sessions at the address of one episode's agent, which needs no token. Some clients open a session for
every call and never end it; a session without requests ends after the idle time."""
MAX_STREAMS = 4
"""GET streams of one session. Clients open another stream before they notice that a stream is broken."""
MAX_QUEUED_MESSAGES = 256
"""Messages that wait for a client to read a stream; a stream that is full takes none."""
SESSION_RETRY_SECONDS = 30.0
LOG_LEVELS = ("debug", "info", "notice", "warning", "error", "critical", "alert", "emergency")
"""In ascending order of severity."""
_TOOLS_CHANGED = b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed","params":{}}'


class Address(NamedTuple):
    """An MCP address. `name`: the task's or the episode's in it; `path`: without a slash at the end."""

    kind: AddressKind = "lobby"
    name: str = ""
    path: str = ""


class Stream:
    """A session's own stream of messages. `end` ends it without a fault, `lose` when its client is gone."""

    def __init__(self) -> None:
        self.is_lost = False
        self._messages: deque[bytes] = deque()
        self._is_over = False
        self._changed = anyio.Event()

    def offer(self, message: bytes) -> bool:
        """Send a message; False if the stream is over, or its client reads nothing."""
        if self._is_over or len(self._messages) >= MAX_QUEUED_MESSAGES:
            return False
        self._messages.append(message)
        self._changed.set()
        return True

    def end(self) -> None:
        self._is_over = True
        self._changed.set()

    def lose(self) -> None:
        self.is_lost = True
        self.end()

    async def next(self) -> bytes | None:
        """The next message; None once the stream is over."""
        while not self._messages and not self._is_over:
            self._changed = anyio.Event()
            await self._changed.wait()
        return None if self.is_lost or not self._messages else self._messages.popleft()


class Session:
    """One session, from `initialize` on. Over stdio the process is one, without an id."""

    def __init__(
        self,
        session_id: str | None,
        version: str,
        *,
        address: Address = Address(),  # noqa: B008  (it is immutable)
        token: str | None = None,
        shares: frozenset[tuple[str, str]] = frozenset(),
    ) -> None:
        self.id = session_id
        self.owner = session_id or secrets.token_hex(16)
        """Names it among the owners of episodes."""
        self.version = version
        self.address = address
        self.token = token
        self.access: EpisodeAccess | None = None
        """Access to the episode that the session is, or has started last."""
        self.shares = shares
        """The token, and the agent's address, whose sessions are counted and limited."""
        self.log_level = "debug"
        """The lowest level of log messages that the client gets."""
        self.generation = 0
        """Generation of this server, if the session's client can come back for an answer; else 0."""
        self.ends_stream = False
        """Whether the session's next GET stream is ended soon, see `endpoints.END_STREAM_SECONDS`."""
        self.sessions: Sessions | None = None
        """Where it is open: requests can name the session, as `initialize` has succeeded."""
        self.used_at = time.monotonic()
        self.requests: dict[Request, None] = {}
        """The requests without an answer, the oldest first."""
        self.streams: list[Stream] = []
        """Its GET streams, the newest last."""

    def save(self) -> None:
        """Store what a request has changed: the access, or the log level."""
        if self.sessions is not None:
            self.sessions.save(self)

    def cancel(self, request_id: object) -> None:
        """Cancel the newest request with this id, and requests with this id that wait for the same call."""
        if type(request_id) not in (int, str):
            return
        same = [each for each in self.requests if each.id == request_id]
        for request in same:
            if request is same[-1] or (request.call is not None and request.call == same[-1].call):
                request.cancel()

    def open_stream(self) -> Stream:
        """A new stream; the oldest beyond MAX_STREAMS ends."""
        self.streams.append(stream := Stream())
        if len(self.streams) > MAX_STREAMS:
            self.streams.pop(0).end()
        return stream

    def close_stream(self, stream: Stream) -> None:
        """A stream is over."""
        if stream in self.streams:
            self.streams.remove(stream)
        self.used_at = time.monotonic()

    def end_streams(self) -> None:
        """End all streams. Requests in progress are not affected."""
        for stream in self.streams:
            stream.end()

    def send(self, message: bytes) -> None:
        """Send a message on the newest stream that takes it; without a stream it is lost."""
        for stream in reversed(self.streams):
            if stream.offer(message):
                return

    def announce_tools(self) -> None:
        """Send `tools/list_changed`."""
        self.send(_TOOLS_CHANGED)


class Sessions:
    """The open sessions of a server.

    At most `MAX_SESSIONS` are open; on a server with several tokens, each may have its share of them. At a
    task's address the episode ends with its session.
    """

    def __init__(self, registry: EpisodeRegistry) -> None:
        self._registry = registry
        self._store = registry.store
        self._max_per_token = share_of(MAX_SESSIONS, registry.admission.share_per_token)
        self._open: dict[str, Session] = {}
        self._by_share = Counter[tuple[str, str]]()

    def find(self, session_id: str, context: RequestContext) -> Session | None:
        """The session that a request names, perhaps of an earlier server; None if it has no such session.

        Raises AtCapacityError if it would have to be opened again, and cannot.
        """
        session = self._open.get(session_id) or self._revive(session_id, context)
        if session is None or session.address != context.address or session.token != context.principal.token:
            return None
        return session

    def create(self, version: str, context: RequestContext, session_id: str | None = None) -> Session:
        """A session that `initialize` opens, once it has succeeded, with `add`.

        Raises AtCapacityError if there are too many, or too many of the same client's.
        """
        limits: dict[tuple[str, str], int] = {}
        if context.by_agent_id:
            limits["agent", context.address.path] = MAX_AGENT_SESSIONS
        if (token := context.share_key) is not None:
            limits["token", token] = self._max_per_token
        is_over = any(self._by_share[share] >= limit for share, limit in limits.items())
        if is_over or len(self._open) >= MAX_SESSIONS:
            raise AtCapacityError("too many open sessions", retryAfterSeconds=SESSION_RETRY_SECONDS)
        session = Session(
            session_id or secrets.token_hex(16),
            version,
            address=context.address,
            token=context.principal.token,
            shares=frozenset(limits),
        )
        if self._store is not None and version >= RESUMABLE_SINCE:
            session.generation = self._store.generation
        return session

    def add(self, session: Session) -> None:
        """A session is open."""
        self._open_now(session)
        self.save(session)

    def _open_now(self, session: Session) -> None:
        assert session.id is not None
        session.sessions, self._open[session.id] = self, session
        self._by_share.update(session.shares)

    def end(self, session: Session) -> None:
        """End a session: its requests get an error, and its streams end."""
        self._close(session)
        for request in tuple(session.requests):
            request.cancel(session_ended=True)

    def _close(self, session: Session) -> None:
        assert session.id is not None
        session.end_streams()
        if self._open.pop(session.id, None) is None:
            return
        for share in session.shares:
            self._by_share[share] -= 1
            if not self._by_share[share]:
                del self._by_share[share]
        if self._store is not None:
            if self._registry.shutdown.handing_over:
                return  # the next server opens it again
            self._store.delete(SessionRow, session.id)
        if session.address.kind == "task" and session.access is not None:
            session.access.episode.close()

    def end_streams(self) -> None:
        """End the GET streams of all sessions."""
        for session in self._open.values():
            session.end_streams()

    def end_unused(self) -> None:
        """End the sessions without a request or a stream for the idle time, and delete stored sessions.

        Raises DecathlonError if the store cannot be written.
        """
        idle_seconds = self._registry.options.limits.idle_seconds
        for session in list(self._open.values()):
            is_idle = not session.requests and not session.streams
            if is_idle and session.used_at < time.monotonic() - idle_seconds:
                self.end(session)
        if self._store is None:
            return
        live = {episode.id for episode in self._registry.live}
        for row in self._store.unused_sessions(time.time() - idle_seconds):
            if (session := self._open.get(row.id)) is not None:
                self.save(session)
            elif row.address == "task" and row.episode in live:
                # A task's session lasts as long as its episode.
                self._store.save(row)
            else:
                self._store.delete(SessionRow, row.id)

    def close_all(self) -> None:
        """This server ends. Requests in progress are left to their connections."""
        for session in list(self._open.values()):
            self._close(session)

    # the store

    def save(self, session: Session) -> None:
        """Store an open session."""
        if self._store is None or session.id is None:
            return
        data: JsonObject = {
            "token": session.token,
            "protocol_version": session.version,
            "log_level": session.log_level,
        }
        row = SessionRow(
            id=session.id,
            server="",  # the store's own name
            address=session.address.kind,
            path=session.address.path,
            episode=None if session.access is None else session.access.episode.id,
            data=data,
        )
        self._store.save(row)

    def _revive(self, session_id: str, context: RequestContext) -> Session | None:
        if (store := self._store) is None:
            return None
        row, principal = store.find_one(SessionRow, id=session_id, server=store.server), context.principal
        if row is None or (row.path, row.data.get("token")) != (context.address.path, principal.token):
            return None
        session = self.create(str(row.data.get("protocol_version")), context, session_id)
        level = row.data.get("log_level")
        session.log_level = level if level in LOG_LEVELS else "debug"
        session.ends_stream = True
        if row.episode is not None and context.address.kind != "episode":
            is_task, principal = context.address.kind == "task", principal.in_session(session_id)
            by = EpisodeAccess.by_session if is_task else EpisodeAccess.by_handle
            with suppress(UnknownEpisodeError):
                session.access = by(self._registry.find(row.episode, principal), principal)
        self._open_now(session)
        return session
