"""Headers of HTTP requests: reads them, and checks that they agree with the body (required by 2026-07-28)."""

from __future__ import annotations

import importlib
import json
from base64 import b64decode
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import anyio.to_thread

from decathlon_mcp.protocol.messages import (
    CALL,
    CAPABILITIES_KEY,
    GET_PROMPT,
    HANDSHAKE_VERSIONS,
    HEADER_MISMATCH,
    INVALID_PARAMS,
    VERSION_KEY,
    McpError,
    Message,
    RequestId,
    check_version,
)
from decathlon_mcp.types import JsonObject

MAX_KNOWN_HEADERS = 256
"""Values of `Accept` that are remembered: a client's is always the same."""
SESSION, VERSION = b"mcp-session-id", b"mcp-protocol-version"
_METHOD, _NAME = b"mcp-method", b"mcp-name"
_NAMED = frozenset({CALL, GET_PROMPT})
"""Methods whose requests name something, which the header `Mcp-Name` repeats."""


class Headers(dict[bytes, bytes]):
    """The headers of a request by their names, without surrounding spaces; of repeated headers the first."""

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
        return _media_types(self.get(b"accept", b""))

    @property
    def is_sessionless(self) -> bool:
        """Whether they name a revision without sessions, or an unknown revision."""
        version = self.text(VERSION)
        return version is not None and version not in HANDSHAKE_VERSIONS


@lru_cache(MAX_KNOWN_HEADERS)
def _media_types(accept: bytes) -> tuple[bool, bool]:
    # RFC 9110, section 8.3.1: media types are case-insensitive.
    types = {part.partition(b";")[0].strip().lower() for part in accept.split(b",")}
    return (
        bool(types & {b"application/json", b"application/*", b"*/*"}),
        bool(types & {b"text/event-stream", b"text/*", b"*/*"}),
    )


def check_routing(message: Message, headers: Headers) -> None:
    """Raise McpError unless the headers of a request without a session agree with its body."""
    meta = message.meta
    if missing := [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in meta]:
        text = f"params._meta is missing the required {' and '.join(missing)}"
        raise McpError(INVALID_PARAMS, text, request_id=message.request_id)
    body: dict[bytes, Any] = {VERSION: meta[VERSION_KEY], _METHOD: message.method}
    if message.method in _NAMED and message.params is not None and message.params.name is not None:
        body[_NAME] = message.params.name
    if repeated := headers.repeated & {VERSION, _METHOD, _NAME}:
        raise _mismatch(f"{min(repeated).decode()} header appears more than once", message.request_id)
    for name, value in body.items():
        header = headers.text(name)
        if (_decoded(header) if name == _NAME else header) != value or header is None:
            text = f"{name.decode()} header does not match the body's {value!r:.100}"
            raise _mismatch(text, message.request_id)
    check_version(headers.text(VERSION))


def _decoded(header: str | None) -> str | None:
    """A header's value, which is in Base64 if it is not plain ASCII; None if it cannot be decoded."""
    if header is None or not (header.startswith("=?base64?") and header.endswith("?=")):
        return header
    try:
        return b64decode(header[9:-2], validate=True).decode()
    except ValueError:
        return None


async def check_argument_headers(
    schema: Mapping[str, Any], arguments: bytes | None, headers: Headers, request_id: RequestId
) -> None:
    """Raise McpError unless the arguments that headers repeat are the same there."""
    # The SDK's check of schemas. Its import takes some seconds.
    inbound: Any = await anyio.to_thread.run_sync(importlib.import_module, "mcp.shared.inbound")
    values: JsonObject = {} if arguments is None else json.loads(arguments)
    rejection = inbound.validate_mcp_param_headers(schema, values, headers.texts())
    if rejection is not None:
        raise _mismatch(rejection.message, request_id)
    for name in headers.repeated:
        if name.startswith(b"mcp-param-"):
            raise _mismatch(f"{name.decode()} header appears more than once", request_id)


def _mismatch(text: str, request_id: RequestId | None) -> McpError:
    return McpError(HEADER_MISMATCH, text, request_id=request_id)
