"""Recognises the requests that are served without the SDK (`exchanges`), at a fraction of its cost.

Only what the SDK would accept is served that way. For everything else `prepare` returns None and the SDK
serves the request, so that there is one place that refuses requests. What a client can notice is the same;
`tests/http/test_exchanges.py` compares both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from mcp.shared.inbound import X_MCP_HEADER_KEY
from mcp_types import CLIENT_CAPABILITIES_META_KEY, PROTOCOL_VERSION_META_KEY
from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.types import Scope

from decathlon_mcp.episodes.operations import check_operation
from decathlon_mcp.episodes.tools.offered import ToolRouter
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.foreign_names import MAX_NAME_CHARACTERS
from decathlon_mcp.labels import LABEL_HEADER
from decathlon_mcp.protocol.context import RequestContext
from decathlon_mcp.protocol.exchanges import Exchange, Watch
from decathlon_mcp.protocol.requests import (
    CALL,
    MAX_REQUEST_ID_BYTES,
    OPERATION_KEY,
    PROGRESS_TOKEN,
    EventId,
    McpRequest,
)
from decathlon_mcp.protocol.results import is_sessionless
from decathlon_mcp.protocol.sdk import SessionTransport
from decathlon_mcp.storage.logged_calls import request_id_text
from decathlon_mcp.types import as_json

SESSION = b"mcp-session-id"
"""Name of the header with a session's id."""
LABELS = LABEL_HEADER.encode()
_VERSION = b"mcp-protocol-version"
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
        b"content-length",
        b"transfer-encoding",
        _VERSION,
        SESSION,
        LABELS,
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

    def resumable_generation(self, session_id: str) -> int | None:
        """This server's generation, for a session whose client can come back for an answer."""
        ...

    def start_soon(self, function: Callable[..., Any], *arguments: object) -> None:
        """Run a function in the background."""
        ...


class Recognition:
    """Recognises requests at the addresses of one session manager.

    `accepts`: whether a POST with these headers may come from where it comes from. `sessionless`: whether the
    addresses are served to revisions without sessions. `of_episode`: whether they are those of episodes,
    whose tools decide which headers a request needs.
    """

    def __init__(self, sessions: Sessions, accepts: Accepts, *, sessionless: bool, of_episode: bool) -> None:
        self._sessions = sessions
        self._watch = Watch(sessions.start_soon)
        self._sessionless = sessionless
        self._of_episode = of_episode
        self._accepts = accepts
        self._acceptable: dict[tuple[bytes | None, ...], bool] = {}
        self._plain_tools: WeakKeyDictionary[ToolRouter, frozenset[str]] = WeakKeyDictionary()

    def prepare(
        self,
        headers: Mapping[bytes, bytes] | None,
        body: bytes,
        context: RequestContext,
        scope: Scope,
    ) -> Exchange | None:
        """The exchange for a POST, which must be served now; None if the SDK must serve the POST.

        `headers`: what `read_headers` returned. The client's token and its access to the episode must have
        been checked.
        """
        if (self._of_episode and context.access is None) or headers is None:
            return None
        if not self._is_acceptable(headers):
            return None
        message = McpRequest.read(body)
        if message is None or not _is_plain(message):
            return None
        version = headers.get(_VERSION)
        if version is None or version in _HANDSHAKE_VERSIONS:
            session_id = headers.get(SESSION, b"").decode("latin-1")
            return self._in_session(session_id, message, context, scope)
        if (
            self._sessionless
            and SESSION not in headers
            and message.method == CALL
            and _agree(headers, version.decode("latin-1"), message)
            and not self._needs_headers(message.name, context)
        ):
            return Exchange(
                message,
                context,
                connection=None,
                transport=None,
                watch=self._watch,
                scope=scope,
                can_stream=True,
            )
        return None

    def resume(
        self, session_id: str, event_id: EventId, context: RequestContext, scope: Scope
    ) -> Exchange | None:
        """The exchange for a GET of a client that comes back for an answer; None if its session has none."""
        return self._in_session(session_id, McpRequest(event_id.request), context, scope, event_id)

    def _in_session(
        self,
        session_id: str,
        message: McpRequest,
        context: RequestContext,
        scope: Scope,
        resumed: EventId | None = None,
    ) -> Exchange | None:
        transport = self._sessions.transport(session_id)
        if transport is None or (connection := transport.live_connection) is None:
            return None
        generation = self._sessions.resumable_generation(session_id)
        if len(request_id_text(message.id)) > MAX_REQUEST_ID_BYTES:
            generation = None
        if generation is None and (resumed is not None or message.method != CALL):
            return None
        return Exchange(
            message,
            context,
            connection=connection,
            transport=transport,
            watch=self._watch,
            scope=scope,
            can_stream=message.prefers_events,
            generation=generation,
            resumed=resumed,
        )

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

    def _needs_headers(self, tool: str, context: RequestContext) -> bool:
        """Whether an argument of the tool must be repeated in a header, which the SDK checks."""
        if not self._of_episode:
            return False  # no tool of the lobby has such an argument
        router = None if context.access is None else context.access.episode.tools.router
        if router is None:
            return True
        if (plain := self._plain_tools.get(router)) is None:
            self._plain_tools[router] = plain = _plain_tools(router)
        return tool not in plain


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


def _is_plain(message: McpRequest) -> bool:
    """Whether what the server repeats of the message has an allowed length and type."""
    token = message.meta.get(PROGRESS_TOKEN, 0)
    if any(isinstance(value, str) and len(value) >= MAX_NAME_CHARACTERS for value in (message.id, token)):
        return False
    if type(token) not in (int, str):
        return False
    if OPERATION_KEY in message.meta:
        try:
            check_operation(message.meta[OPERATION_KEY])
        except BadRequestError:
            return False
    return True


def _agree(headers: Mapping[bytes, bytes], version: str, message: McpRequest) -> bool:
    """Whether the headers of a request without a session agree with its body."""
    name = headers.get(_NAME, _CODED)
    return (
        is_sessionless(version)
        and message.meta.get(PROTOCOL_VERSION_META_KEY) == version
        and CLIENT_CAPABILITIES_META_KEY in message.meta
        and headers.get(_METHOD) == CALL.encode()
        and not name.startswith(_CODED)
        and name.decode("latin-1") == message.name
    )


def _plain_tools(router: ToolRouter) -> frozenset[str]:
    """The tools of which no argument must be repeated in a header."""
    marker = X_MCP_HEADER_KEY.encode()
    return frozenset(
        tool["name"] for tool in router.evaluator_tools if marker not in as_json(tool["inputSchema"])
    )
