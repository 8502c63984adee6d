"""Sessions over streamable HTTP: each belongs to the path and the token that it was opened with.

With a store, sessions survive their server: a session that is not open here but in the store is revived by
the first request that names it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import anyio
from mcp.server.connection import Connection
from mcp.server.context import CallNext, HandlerResult
from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings
from mcp_types import InitializeRequestParams
from msgspec import structs
from pydantic import ValidationError

from decathlon_mcp.episodes.access import EpisodeAccess
from decathlon_mcp.episodes.admission import share_of
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import AtCapacityError, UnknownEpisodeError
from decathlon_mcp.protocol.context import (
    SCOPE_KEY,
    RequestContext,
    current_request_context,
    request_context_of,
)
from decathlon_mcp.protocol.episode_tools import LOG_LEVEL_KEY
from decathlon_mcp.protocol.requests import RESUMABLE_SINCE
from decathlon_mcp.protocol.sdk import (
    Context,
    InitializedSession,
    SessionManagerBase,
    connection_of,
)
from decathlon_mcp.protocol.sdk_requests import CURRENT_KEY
from decathlon_mcp.storage.store import SessionRow, Store
from decathlon_mcp.types import JsonObject, as_json, as_object

AddressKind = Literal["task", "episode", "lobby"]
MAX_AGENT_SESSIONS = 1_000
"""Open sessions at the address of one episode's agent, which needs no token. Some clients open a session for
every call and never end it; a session without requests ends after the idle time."""
SESSION_RETRY_SECONDS = 30.0
MAX_CLIENT_PARAMS_BYTES = 16 << 10
"""Longest parameters of `initialize` that are stored. Of longer ones only the client's name is."""
MAX_CLIENT_NAME = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSession:
    """A session that is in the store.

    `path` and `token`: address and name of the token with which it was opened. `client_params`: those of
    `initialize`. `episode`: handle of the episode that it is, or started last.
    """

    id: str
    path: str
    token: str | None
    client_params: JsonObject
    protocol_version: str
    log_level: str | None = None
    episode: str | None = None

    @classmethod
    def from_row(cls, row: SessionRow) -> Self | None:
        """None if the row was written by a release with other rows."""
        data = row.data
        try:
            client_params = as_object(data["client_params"]) or {}
            InitializeRequestParams.model_validate(client_params, by_name=False)
            return cls(
                id=row.id,
                path=row.path,
                token=data["token"],
                client_params=client_params,
                protocol_version=str(data["protocol_version"]),
                log_level=data["log_level"],
                episode=row.episode,
            )
        except (KeyError, ValidationError):
            return None

    def opened_by(self, request_context: RequestContext) -> bool:
        """Whether a request has the path and the token with which the session was opened."""
        return (self.path, self.token) == (request_context.path, request_context.principal.token)

    def with_state(self, state: dict[str, Any]) -> Self:
        """The session with what can change in it, from the connection's state."""
        current: EpisodeAccess | None = state.get(CURRENT_KEY)
        episode = self.episode if current is None else current.episode.id
        log_level = state.get(LOG_LEVEL_KEY)
        if (episode, log_level) == (self.episode, self.log_level):
            return self
        return replace(self, episode=episode, log_level=log_level)


class SavedSessions:
    """The stored sessions of one kind of address."""

    def __init__(self, store: Store, registry: EpisodeRegistry, address: AddressKind) -> None:
        self.store = store
        self.address = address
        self._registry = registry

    @property
    def handing_over(self) -> bool:
        """Whether this server ends and leaves its sessions to the next one."""
        return self._registry.handing_over

    def save(self, session: SavedSession) -> None:
        """Insert or replace a session."""
        data: JsonObject = {
            "token": session.token,
            "client_params": session.client_params,
            "protocol_version": session.protocol_version,
            "log_level": session.log_level,
        }
        row = SessionRow(
            id=session.id,
            server="",  # the store's own name
            address=self.address,
            path=session.path,
            episode=session.episode,
            data=data,
        )
        self.store.save_session(row)

    def load(self, session_id: str) -> SavedSession | None:
        """A stored session of this kind of address."""
        row = self.store.session(session_id)
        return None if row is None or row.address != self.address else SavedSession.from_row(row)

    def delete(self, session_id: str) -> None:
        """Delete a session."""
        self.store.delete_session(session_id)

    def access(self, session: SavedSession, request_context: RequestContext) -> EpisodeAccess | None:
        """Access to the session's episode for a client that has the token it was opened with.

        None if it has none, or the registry does not know it any more.
        """
        if request_context.access is not None or session.episode is None:
            return request_context.access
        principal = request_context.principal
        try:
            episode = self._registry.find(session.episode, principal)
        except UnknownEpisodeError:
            return None
        if self.address == "task":
            return EpisodeAccess.by_session(episode, principal)
        return EpisodeAccess.by_handle(episode, principal)

    def connection_state(self, session: SavedSession, access: EpisodeAccess | None) -> dict[str, Any]:
        """The state of the session's connection."""
        state: dict[str, Any] = {}
        if session.log_level is not None:
            state[LOG_LEVEL_KEY] = session.log_level
        if self.address == "lobby" and access is not None:
            state[CURRENT_KEY] = access
        return state


class SessionManager(SessionManagerBase):
    """The sessions of one server, with the request context that opened each of them.

    `max_sessions` bounds their number; on a server with several tokens, each may have the part
    `share_per_token` of it. `on_close` is called with that context when its session ends. `saved`: the
    sessions in the store; None if they are to end with this process.
    """

    def __init__(
        self,
        server: Server[Any],
        *,
        idle_seconds: float,
        max_body_bytes: int,
        max_sessions: int,
        share_per_token: float,
        on_close: Callable[[RequestContext], None],
        saved: SavedSessions | None = None,
    ) -> None:
        super().__init__(
            server,
            # `http` has checked the request.
            security_settings=TransportSecuritySettings(enable_dns_rebinding_protection=False),
            session_idle_timeout=idle_seconds,
            max_request_body_size=max_body_bytes,
            max_sessions=max_sessions,
        )
        self._max_per_token = share_of(max_sessions, share_per_token)
        self._sessions_by_owner: Counter[tuple[str, str]] = Counter()
        self._openers: dict[str, RequestContext] = {}
        self._on_close = on_close
        self._saved = saved
        self._open: dict[str, SavedSession] = {}
        self._reviving: dict[str, anyio.Lock] = {}
        # First, so that it sees the final result of `initialize`.
        server.middleware.insert(0, self._keep_session)

    @property
    def saved(self) -> dict[str, SavedSession]:
        """The open sessions that are in the store."""
        return self._open

    def is_live(self, session_id: str) -> bool:
        """Whether `revive` would do nothing for a session that exists."""
        return self.is_open(session_id) and session_id not in self._reviving

    def opener(self, session_id: str | None) -> RequestContext | None:
        """The request context that opened a session; None if there is no such session."""
        return self._openers.get(session_id) if session_id else None

    def belongs_to_other(self, session_id: str | None, request_context: RequestContext) -> bool:
        """Whether the session was opened at another path or with another token."""
        # The SDK does not bind sessions to paths: with a session of the lobby, one could use a task's
        # address.
        opener = self.opener(session_id)
        if opener is None:
            return False
        return (opener.path, opener.principal.token) != (
            request_context.path,
            request_context.principal.token,
        )

    async def revive(self, session_id: str | None, request_context: RequestContext) -> None:
        """Open the request's session again if an earlier server has opened it, at this path with this token.

        Raises AtCapacityError if as many sessions are open as may be.
        """
        if session_id is None or self._saved is None:
            return
        # Without a lock, the second of two requests that arrive together meets a transport that is not
        # connected yet.
        if self.is_live(session_id):
            return
        lock = self._reviving.setdefault(session_id, anyio.Lock())
        try:
            async with lock:
                if not self.is_open(session_id):
                    await self._revive(self._saved, session_id, request_context)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._reviving.pop(session_id, None)

    async def _revive(self, saved: SavedSessions, session_id: str, request_context: RequestContext) -> None:
        session = saved.load(session_id)
        if session is None or not session.opened_by(request_context):
            return
        access = saved.access(session, request_context)
        opener = structs.replace(request_context, access=access, started=[])
        token = current_request_context.set(opener)
        self._open[session_id] = session
        try:
            transport = await self.revive_session(
                InitializedSession(
                    id=session.id,
                    client_params=session.client_params,
                    protocol_version=session.protocol_version,
                    state=saved.connection_state(session, access),
                )
            )
        finally:
            current_request_context.reset(token)
            if not self.is_open(session_id):
                del self._open[session_id]
        if transport is None:
            raise AtCapacityError("too many open sessions", retryAfterSeconds=SESSION_RETRY_SECONDS)
        saved.save(session)

    def resumable_generation(self, session_id: str) -> int | None:
        """This server's generation, for a session whose client can come back for an answer."""
        session = self._open.get(session_id)
        if self._saved is None or session is None or session.protocol_version < RESUMABLE_SINCE:
            return None
        return self._saved.store.generation

    async def _keep_session(self, ctx: Context, call_next: CallNext) -> HandlerResult:
        """Middleware: keep a session's connection, and its row in the store. Before the answer is sent."""
        connection = connection_of(ctx)
        session_id = connection.session_id
        transport = None if session_id is None else self.transport(session_id)
        if session_id is None or transport is None:
            return await call_next(ctx)
        if ctx.method == "initialize" and ctx.request_id is not None:
            result = await call_next(ctx)
            transport.connection = connection
            if self._saved is not None:
                self._save_opened(self._saved, session_id, ctx, as_object(result) or {})
            return result
        try:
            return await call_next(ctx)
        finally:
            self.save_state(session_id, connection)

    def save_state(self, session_id: str, connection: Connection) -> None:
        """Store what a request has changed in its session."""
        if self._saved is None or (session := self._open.get(session_id)) is None:
            return
        changed = session.with_state(connection.state)
        if changed is not session:
            self._open[session_id] = changed
            self._saved.save(changed)

    def _save_opened(
        self, saved: SavedSessions, session_id: str, ctx: Context, result: dict[str, Any]
    ) -> None:
        request_context = request_context_of(ctx)
        session = SavedSession(
            id=session_id,
            path=request_context.path,
            token=request_context.principal.token,
            client_params=stored_client_params(dict(ctx.params or {})),
            protocol_version=str(result.get("protocolVersion")),
            episode=None if request_context.access is None else request_context.access.episode.id,
        )
        self._open[session_id] = session
        saved.save(session)

    async def discard_opened_by(self, request_context: RequestContext) -> None:
        """End the session that this request opened, if it is still there."""
        # A failed `initialize` is answered with status 200, so the SDK keeps its session until it is idle.
        for session_id in [key for key, opener in self._openers.items() if opener is request_context]:
            # References in cycles keep an ended session's objects until they are collected, which is rare.
            self.forget_message(session_id, SCOPE_KEY, request_context)
            await self.discard(session_id)

    def may_open_session(self) -> bool:
        request_context = current_request_context.get()
        assert request_context is not None
        return self._has_room_for(request_context)

    def refuse_if_full(self, request_context: RequestContext) -> None:
        """Raise AtCapacityError if the request cannot open another session."""
        if self.is_full or not self._has_room_for(request_context):
            raise AtCapacityError("too many open sessions", retryAfterSeconds=SESSION_RETRY_SECONDS)

    def _has_room_for(self, request_context: RequestContext) -> bool:
        """Whether the owner of the request has fewer sessions than its share."""
        key = _owner_key(request_context)
        if key is None:
            return True
        limit = self._max_per_token if key[0] == "token" else min(MAX_AGENT_SESSIONS, self._max_per_token)
        return self._sessions_by_owner[key] < limit

    def session_opened(self, session_id: str) -> None:
        request_context = current_request_context.get()
        assert request_context is not None
        self._openers[session_id] = request_context
        if (key := _owner_key(request_context)) is not None:
            self._sessions_by_owner[key] += 1

    def session_closed(self, session_id: str) -> None:
        session = self._open.pop(session_id, None)
        if self._saved is not None:
            if self._saved.handing_over:
                return
            if session is not None:
                self._saved.delete(session_id)
        if (request_context := self._openers.pop(session_id, None)) is not None:
            if (key := _owner_key(request_context)) is not None:
                self._sessions_by_owner[key] -= 1
                if not self._sessions_by_owner[key]:
                    del self._sessions_by_owner[key]
            self._on_close(request_context)


def _owner_key(request_context: RequestContext) -> tuple[str, str] | None:
    """Whose sessions are counted together: a token's, or those at an agent's address; None for all others."""
    if request_context.by_agent_id:
        return "agent", request_context.path
    token = request_context.principal.share_key
    return None if token is None else ("token", token)


def stored_client_params(params: JsonObject) -> JsonObject:
    """The parameters of an `initialize`, shortened if they are long."""
    if len(as_json(params)) <= MAX_CLIENT_PARAMS_BYTES:
        return params
    info = as_object(params.get("clientInfo")) or {}
    shortened = {name: str(info.get(name, ""))[:MAX_CLIENT_NAME] for name in ("name", "version")}
    return {"protocolVersion": params.get("protocolVersion"), "capabilities": {}, "clientInfo": shortened}


def delete_unused(registry: EpisodeRegistry, is_open: dict[str, SavedSession]) -> None:
    """Delete the sessions that no client has used for the idle time. `is_open`: those of this process."""
    store = registry.store
    if store is None:
        return
    live = {episode.id for episode in registry.live}
    for row in store.unused_sessions(time.time() - registry.idle_seconds):
        if row.id in is_open or (row.address == "task" and row.episode in live):
            # The SDK ends an open session, and a task's session lasts as long as its episode.
            store.save_session(row)
        else:
            store.delete_session(row.id)
