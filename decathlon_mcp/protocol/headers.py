"""Headers of HTTP requests: reads them, and checks that they agree with the body (required by 2026-07-28)."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import anyio.to_thread

from decathlon_mcp.protocol.messages import (
    CALL,
    CAPABILITIES_KEY,
    HANDSHAKE_VERSIONS,
    SESSIONLESS_VERSIONS,
    VERSION_KEY,
    McpError,
    Message,
    RequestId,
)
from decathlon_mcp.types import JsonObject

MAX_KNOWN_HEADERS = 256
MAX_KNOWN_HEADER_BYTES = 512
SESSION, VERSION = b"mcp-session-id", b"mcp-protocol-version"
_METHOD, _NAME = b"mcp-method", b"mcp-name"
_NAMED = {CALL: "name", "prompts/get": "name", "resources/read": "uri"}
"""Methods whose requests name something, which the header `Mcp-Name` repeats."""


class Headers(dict[bytes, bytes]):
    """The headers of a request by their names, without surrounding spaces; of repeated ones the first."""

    # RFC 9110, section 5.5: spaces around a value are not part of it. httptools keeps trailing spaces.
    def __init__(self, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
        super().__init__()
        self.repeated: set[bytes] = set()
        for name, value in headers:
            if name in self:
                self.repeated.add(name)
            else:
                self[name] = value.strip(b" \t")

    def text(self, name: bytes) -> str | None:
        value = self.get(name)
        return None if value is None else value.decode("latin-1")

    def texts(self) -> dict[str, str]:
        """All of them as text."""
        return {name.decode("latin-1"): value.decode("latin-1") for name, value in self.items()}

    @property
    def accepts(self) -> tuple[bool, bool]:
        """Whether the client takes JSON, and events."""
        # A client's header is always the same.
        accept = self.get(b"accept", b"")
        return _known_types(accept) if len(accept) <= MAX_KNOWN_HEADER_BYTES else _media_types(accept)

    @property
    def is_sessionless(self) -> bool:
        """Whether they name a revision without sessions, or one that is not known."""
        version = self.text(VERSION)
        return version is not None and version not in HANDSHAKE_VERSIONS


def _media_types(accept: bytes) -> tuple[bool, bool]:
    # RFC 9110, section 8.3.1: media types are case-insensitive.
    types = {part.partition(b";")[0].strip().lower() for part in accept.split(b",")}
    return (
        bool(types & {b"application/json", b"application/*", b"*/*"}),
        bool(types & {b"text/event-stream", b"text/*", b"*/*"}),
    )


_known_types = lru_cache(MAX_KNOWN_HEADERS)(_media_types)


def _agrees(message: Message, headers: Headers) -> bool:
    """Whether the headers of a request without a session plainly agree with its body."""
    version, meta = headers.text(VERSION), message.meta
    named = _NAMED.get(message.method)
    return (
        version in SESSIONLESS_VERSIONS
        and meta.get(VERSION_KEY) == version
        and CAPABILITIES_KEY in meta
        and headers.text(_METHOD) == message.method
        and not headers.repeated & {VERSION, _METHOD, _NAME}
        and (
            named is None
            or (named == "name" and message.params is not None and headers.text(_NAME) == message.params.name)
        )
        and not headers.get(_NAME, b"").startswith(b"=?")
    )


async def check_routing(message: Message, headers: Headers) -> None:
    """Raise McpError unless the headers of a request without a session agree with its body."""
    if _agrees(message, headers):
        return
    inbound = await _inbound()
    if repeated := headers.repeated & {VERSION, _METHOD, _NAME}:
        raise _repeated(min(repeated), message.id)
    params = None if message.params is None else {"name": message.params.name, "_meta": message.params.meta}
    route = inbound.classify_inbound_request(
        {"method": message.method, "params": params}, headers=headers.texts()
    )
    if isinstance(route, inbound.InboundLadderRejection):
        _raise_rejection(route, message.id)


async def check_argument_headers(
    schema: Mapping[str, Any], arguments: bytes | None, headers: Headers, request_id: RequestId
) -> None:
    """Raise McpError unless the arguments that headers repeat are the same there."""
    inbound = await _inbound()
    values: JsonObject = {} if arguments is None else json.loads(arguments)
    _raise_rejection(inbound.validate_mcp_param_headers(schema, values, headers.texts()), request_id)
    for name in headers.repeated:
        if name.startswith(b"mcp-param-"):
            raise _repeated(name, request_id)


def _repeated(name: bytes, request_id: RequestId) -> McpError:
    return McpError(-32020, f"{name.decode()} header appears more than once", request_id=request_id)


def _raise_rejection(rejection: Any, request_id: RequestId) -> None:
    if rejection is not None:
        raise McpError(rejection.code, rejection.message, rejection.data, request_id=request_id)


async def _inbound() -> Any:
    """The SDK's checks of headers. Imported where a request needs them: it takes some seconds."""
    return await anyio.to_thread.run_sync(importlib.import_module, "mcp.shared.inbound")
