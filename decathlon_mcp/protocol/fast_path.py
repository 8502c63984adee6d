"""Recognises the tool calls that are served without the SDK, at a fraction of its cost.

Only what the SDK would accept, on an episode that is ready, is served that way. For everything else `prepare`
returns None and the SDK serves the request, so that there is one place that refuses requests. What a client
can notice is the same; `tests/http/test_fast_path.py` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from mcp.shared.inbound import X_MCP_HEADER_KEY
from mcp_types import CLIENT_CAPABILITIES_META_KEY, LOG_LEVEL_META_KEY, PROTOCOL_VERSION_META_KEY
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.types import Scope

from decathlon_mcp.episodes.episode import EpisodeAccess
from decathlon_mcp.episodes.operations import check_operation
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.episodes.tools import ToolRouter
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.foreign_names import MAX_NAME_CHARACTERS
from decathlon_mcp.protocol.context import RequestContext
from decathlon_mcp.protocol.envelopes import CALL, PROGRESS_TOKEN, ToolCall
from decathlon_mcp.protocol.fast_calls import (
    Background,
    FastCall,
    JsonCall,
    SessionlessCall,
    StreamedCall,
)
from decathlon_mcp.protocol.relay import OPERATION_KEY
from decathlon_mcp.protocol.results import is_sessionless
from decathlon_mcp.protocol.resumption import SessionStreams
from decathlon_mcp.protocol.sdk import SessionTransport
from decathlon_mcp.types import as_json

_VERSION = b"mcp-protocol-version"
SESSION_HEADER = b"mcp-session-id"
_METHOD = b"mcp-method"
_NAME = b"mcp-name"
_HEADERS = frozenset(
    {
        b"host",
        b"origin",
        b"authorization",
        b"content-type",
        b"accept",
        b"last-event-id",
        _VERSION,
        SESSION_HEADER,
        _METHOD,
        _NAME,
    }
)
"""The headers that are read here. A request that repeats one of them is the SDK's."""
_CHECKED_HEADERS = (b"host", b"origin", b"content-type", b"accept")
"""The headers by which a request may be refused whatever it asks for."""
MAX_KNOWN_HEADERS = 256
MAX_KNOWN_HEADERS_BYTES = 512
"""Combinations of their values that are remembered, and the size of each."""
_ARGUMENT_PREFIX = b"mcp-param-"
_CODED = b"=?"
"""Beginning of a header's value that stands for another value."""
_HANDSHAKE_VERSIONS = frozenset(version.encode() for version in HANDSHAKE_PROTOCOL_VERSIONS)
_MEDIA_TYPES = frozenset({"application/json", "text/event-stream"})


Accepts = Callable[[Mapping[bytes, bytes]], bool]


class Sessions(Protocol):
    """What is needed of `sessions.SessionManager`."""

    def transport(self, session_id: str) -> SessionTransport | None:
        """The transport of an open session."""
        ...

    def resumable_streams(self, session_id: str) -> SessionStreams | None:
        """The streams of a session whose client can come back for an answer."""
        ...

    def start_soon(self, function: Callable[..., Any], *arguments: object) -> None:
        """Run a function in the background."""
        ...


class FastPath:
    """The fast path at the addresses of one session manager.

    `accepts`: whether a POST with these headers may come from where it comes from. `sessionless`: whether the
    addresses are served to revisions without sessions.
    """

    def __init__(self, sessions: Sessions, accepts: Accepts, *, sessionless: bool) -> None:
        self._sessions = sessions
        self._background = Background(sessions.start_soon)
        self._sessionless = sessionless
        self._accepts = accepts
        self._acceptable: dict[tuple[bytes | None, ...], bool] = {}
        self._tools: WeakKeyDictionary[ToolRouter, frozenset[str]] = WeakKeyDictionary()

    def prepare(
        self, headers: Mapping[bytes, bytes] | None, body: bytes, request_context: RequestContext
    ) -> FastCall | None:
        """The call that a POST asks for, which must be served now; None if the SDK must serve the POST.

        `headers`: what `read_headers` returned. The client's token and its access to the episode must have
        been checked.
        """
        access = request_context.access
        if access is None or access.episode.state.phase is not Phase.READY:
            return None
        if headers is None or not self._is_acceptable(headers):
            return None
        call = ToolCall.read(body)
        if call is None or not self._is_plain(call, access):
            return None
        version = headers.get(_VERSION)
        if version is None or version in _HANDSHAKE_VERSIONS:
            return self._prepare_in_session(
                headers.get(SESSION_HEADER, b""), body, call, access, request_context
            )
        if (
            self._sessionless
            and SESSION_HEADER not in headers
            and _agree(headers, version.decode("latin-1"), call)
        ):
            return SessionlessCall(call, access, request_context, self._background)
        return None

    def _prepare_in_session(
        self,
        session: bytes,
        body: bytes,
        call: ToolCall,
        access: EpisodeAccess,
        request_context: RequestContext,
    ) -> FastCall | None:
        session_id = session.decode("latin-1")
        transport = self._sessions.transport(session_id)
        if transport is None or (connection := transport.live_connection) is None:
            return None
        streams = self._sessions.resumable_streams(session_id)
        if streams is not None:
            if streams.in_progress(call.id) is not None:
                return None  # a repetition, or a conflict
            if (stream := streams.open(call.id, body)) is not None:
                return StreamedCall(
                    call, access, request_context, self._background, transport, connection, streams, stream
                )
        return JsonCall(call, access, request_context, self._background, transport, connection)

    def _is_acceptable(self, headers: Mapping[bytes, bytes]) -> bool:
        # A client's headers are always the same.
        values = tuple(map(headers.get, _CHECKED_HEADERS))
        if (known := self._acceptable.get(values)) is not None:
            return known
        found = self._check_headers(headers)
        if sum(len(value or b"") for value in values) <= MAX_KNOWN_HEADERS_BYTES:
            if len(self._acceptable) >= MAX_KNOWN_HEADERS:
                self._acceptable.clear()
            self._acceptable[values] = found
        return found

    def _check_headers(self, headers: Mapping[bytes, bytes]) -> bool:
        accept = headers.get(b"accept", b"").decode("latin-1")
        return self._accepts(headers) and _MEDIA_TYPES.issubset(
            part.partition(";")[0].strip() for part in accept.split(",")
        )

    def _is_plain(self, call: ToolCall, access: EpisodeAccess) -> bool:
        """Whether the call is one of a task's tool, and asks for nothing but the result."""
        meta, router = call.meta, access.episode.router
        if router is None or PROGRESS_TOKEN in meta or LOG_LEVEL_META_KEY in meta:
            return False
        if isinstance(call.id, str) and len(call.id) >= MAX_NAME_CHARACTERS:
            return False
        if OPERATION_KEY in meta:
            try:
                check_operation(meta[OPERATION_KEY])
            except BadRequestError:
                return False
        if (tools := self._tools.get(router)) is None:
            self._tools[router] = tools = _plain_tools(router)
        return call.name in tools


def read_headers(scope: Scope) -> dict[bytes, bytes] | None:
    """The values of `_HEADERS`; None if one is repeated, or an argument is repeated in a header."""
    headers: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _HEADERS:
            if name in headers:
                return None
            headers[name] = value.strip(b" \t")
        elif name.startswith(_ARGUMENT_PREFIX):
            return None
    return headers


def _agree(headers: Mapping[bytes, bytes], version: str, call: ToolCall) -> bool:
    """Whether the headers of a request without a session agree with its body."""
    name = headers.get(_NAME, _CODED)
    return (
        is_sessionless(version)
        and call.meta.get(PROTOCOL_VERSION_META_KEY) == version
        and CLIENT_CAPABILITIES_META_KEY in call.meta
        and headers.get(_METHOD) == CALL.encode()
        and not name.startswith(_CODED)
        and name.decode("latin-1") == call.name
    )


def _plain_tools(router: ToolRouter) -> frozenset[str]:
    """The task's tools of which no argument must be repeated in a header."""
    own, marker = (router.claim_name, router.evaluate_name), X_MCP_HEADER_KEY.encode()
    return frozenset(
        tool["name"]
        for tool in router.tools
        if tool["name"] not in own and marker not in as_json(tool["inputSchema"])
    )
