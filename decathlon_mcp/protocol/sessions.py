"""Sessions over streamable HTTP: each belongs to the path and the token that it was opened with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from mcp.server.lowlevel import Server
from mcp.server.transport_security import TransportSecuritySettings

from decathlon_mcp.episodes.admission import share_of
from decathlon_mcp.protocol.context import SCOPE_KEY, RequestContext, current_request_context
from decathlon_mcp.protocol.sdk import SessionManagerBase

MAX_AGENT_SESSIONS = 1_000
"""Open sessions at the address of one episode's agent, which needs no token. Some clients open a session for
every call and never end it; a session without requests ends after the idle time."""
_SSE_MARKERS = (
    b'"progressToken"',
    b'"initialize"',
    b'"tools/list"',
    b"claim_done",
    b"evaluate",
    b'"start_episode"',
    b'"list_tools"',
)
"""Parts of the bodies that `prefers_sse` is true for."""


def prefers_sse(body: bytes, accept: str) -> bool:
    """Whether a POST of the handshake era is answered as an SSE stream rather than as one JSON body."""
    # JSON is faster, but carries nothing before the result: a notification on it hangs the call. SSE is
    # needed for progress, and for calls that can be silent for long: after 300 s without a byte the Python
    # client closes its whole connection. The body is searched and not parsed, because a false match only
    # costs a little speed.
    return "text/event-stream" in accept and any(marker in body for marker in _SSE_MARKERS)


class SessionManager(SessionManagerBase):
    """The sessions of one server, with the request context that opened each of them.

    `max_sessions` bounds their number; on a server with several tokens, each may have the part
    `share_per_token` of it. `on_close` is called with that context when its session ends.
    """

    def __init__(
        self,
        server: Server[Any],
        *,
        security: TransportSecuritySettings,
        idle_seconds: float,
        max_body_bytes: int,
        max_sessions: int,
        share_per_token: float,
        on_close: Callable[[RequestContext], None],
    ) -> None:
        super().__init__(
            server,
            security_settings=security,
            session_idle_timeout=idle_seconds,
            max_request_body_size=max_body_bytes,
            max_sessions=max_sessions,
        )
        self._max_per_token = share_of(max_sessions, share_per_token)
        self._sessions_by_owner: Counter[tuple[str, str]] = Counter()
        self._openers: dict[str, RequestContext] = {}
        self._on_close = on_close

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
