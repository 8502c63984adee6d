"""Sessions in the store: what a server needs to continue those of a server that ended."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from mcp_types import InitializeRequestParams
from pydantic import ValidationError

from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import UnknownEpisodeError
from decathlon_mcp.protocol.context import RequestContext
from decathlon_mcp.protocol.episode_tools import LOG_LEVEL_KEY
from decathlon_mcp.protocol.tool_changes import CURRENT_KEY
from decathlon_mcp.storage.store import SessionRow, Store
from decathlon_mcp.types import JsonObject, as_json, as_object

AddressKind = Literal["task", "episode", "lobby"]
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
