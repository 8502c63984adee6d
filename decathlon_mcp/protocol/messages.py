"""JSON-RPC messages as clients send them, and the ids of events.

A message is decoded once, without a tool's arguments. A message that cannot be served is refused under its id
wherever that can be read: a client waits for an answer to its request, whatever is wrong with it.
"""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from enum import StrEnum
from itertools import islice
from typing import Annotated, Any, Literal, TypeAlias, TypeGuard

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from decathlon_mcp.json_limits import JsonLimitError, check_json, check_undecoded
from decathlon_mcp.types import JsonObject, as_object, json_kind
from decathlon_mcp.validation import MAX_NAME_CHARACTERS

# Checked against `mcp_types` by tests/protocol/test_messages.py. Importing it, or anything of `mcp`, takes
# from a third of a second to some seconds.
HANDSHAKE_VERSIONS = ("2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25")
"""Protocol revisions with a handshake and sessions, the oldest first."""
SESSIONLESS_VERSIONS = ("2026-07-28",)
BATCH_VERSION = "2025-03-26"
"""The only revision with batches."""
RESUMABLE_SINCE = "2025-11-25"
"""The first revision whose clients accept an event without data."""
ENVELOPE_PREFIX = "io.modelcontextprotocol/"
VERSION_KEY = ENVELOPE_PREFIX + "protocolVersion"
CAPABILITIES_KEY = ENVELOPE_PREFIX + "clientCapabilities"
LOG_LEVEL_KEY = ENVELOPE_PREFIX + "logLevel"
SERVER_INFO_KEY = ENVELOPE_PREFIX + "serverInfo"
PROGRESS_TOKEN = "progressToken"
OPERATION_KEY = "decathlon/operation"
"""Key in the `_meta` of a request with the id under which its client would send it again."""
READY_KEY = "decathlon/ready"
"""Key in the `_meta` of a `tools/list`: true to wait until the episode is ready, besides its tools."""

INITIALIZE, DISCOVER, PING = "initialize", "server/discover", "ping"
CALL, LIST = "tools/call", "tools/list"
LIST_PROMPTS, GET_PROMPT = "prompts/list", "prompts/get"
SET_LEVEL, CANCELLED = "logging/setLevel", "notifications/cancelled"

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
INTERNAL_ERROR, REQUEST_CANCELLED = -32603, -32800
UNAUTHORIZED = -32001
HEADER_MISMATCH, MISSING_CLIENT_CAPABILITY, UNSUPPORTED_VERSION = -32020, -32021, -32022

MAX_BATCH = 100
"""Messages in one batch."""
MAX_REQUEST_ID_BYTES = 128
"""Longest JSON-RPC id of a request that a client can come back for: the id comes back in a header."""
_MAX_TOKENS = 10_000
"""Strings and brackets of an unreadable message that are searched for its id."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)

RequestId: TypeAlias = int | str


class McpError(Exception):
    """A JSON-RPC error.

    `request_id`: id of the request that the error answers, if no request was made of the message. `status`:
    HTTP status of the response, where the code does not decide the status.
    """

    def __init__(
        self,
        code: int,
        message: str,
        data: Any = None,
        *,
        request_id: RequestId | None = None,
        status: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data
        self.request_id = request_id
        self.status = status

    def to_json(self) -> JsonObject:
        data = {} if self.data is None else {"data": self.data}
        return {"code": self.code, "message": self.message, **data}


def check_version(requested: str | None) -> None:
    """Raise McpError for a revision that is not served without a session."""
    if requested not in SESSIONLESS_VERSIONS:
        data = {"supported": list(SESSIONLESS_VERSIONS), "requested": (requested or "")[:100]}
        raise McpError(UNSUPPORTED_VERSION, "Unsupported protocol version", data)


class Params(msgspec.Struct, frozen=True):
    """The members of a request's params that this server reads, as the client sent them."""

    name: Any = None
    arguments: Raw | UnsetType = UNSET
    meta: dict[str, Any] | None = msgspec.field(name="_meta", default=None)
    cursor: Any = None
    level: Any = None
    request_id: Any = msgspec.field(name="requestId", default=None)
    protocol_version: Any = msgspec.field(name="protocolVersion", default=None)
    capabilities: Any = None
    client_info: Any = msgspec.field(name="clientInfo", default=None)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """A request, a notification or a response."""

    jsonrpc: Literal["2.0"]
    id: int | Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS - 1)] | UnsetType | None = UNSET
    """None for a response only."""
    method: str = ""
    """Empty for a response."""
    params: Params | None = None
    result: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET

    @property
    def request_id(self) -> RequestId | None:
        """The id of a request; None for a notification and a response."""
        return None if not self.method or isinstance(self.id, UnsetType) else self.id

    @property
    def meta(self) -> JsonObject:
        return {} if self.params is None else self.params.meta or {}

    @property
    def handshake_version(self) -> str:
        """The revision of a session that this `initialize` opens: the requested one, or else the newest."""
        requested = None if self.params is None else self.params.protocol_version
        return requested if requested in HANDSHAKE_VERSIONS else HANDSHAKE_VERSIONS[-1]

    def arguments(self) -> bytes | None:
        """The arguments of a call as JSON text on one line; None without any. Raises McpError."""
        if self.params is None or isinstance(self.params.arguments, UnsetType):
            return None
        text = bytes(self.params.arguments)
        if text == b"null":
            return None
        try:
            check_undecoded(text)
            kind = None if text.startswith(b"{") else json_kind(json.loads(text))
        except ValueError as error:
            raise McpError(INVALID_PARAMS, f"tools/call: `arguments` is not valid JSON: {error}") from None
        if kind is not None:
            raise McpError(INVALID_PARAMS, f"tools/call: `arguments` must be an object, not {kind}")
        if b"\n" in text or b"\r" in text:
            # Only between tokens, as strings contain none. Messages to a sandbox are lines.
            text = msgspec.json.format(text, indent=-1)
        return text


_decode_message = msgspec.json.Decoder(Message).decode
_decode_batch = msgspec.json.Decoder(list[Raw]).decode


def request_id_text(request_id: RequestId | None) -> str:
    """A JSON-RPC id as JSON."""
    # The encoder takes ten times as long, and most ids are numbers.
    return str(request_id) if type(request_id) is int else json.dumps(request_id)


def is_request_id(value: object) -> TypeGuard[RequestId]:
    """Whether a value can be a request's id or a progress token."""
    return type(value) is int or (isinstance(value, str) and len(value) < MAX_NAME_CHARACTERS)


def read_message(body: bytes | bytearray | Raw) -> Message:
    """The message in a body, which has passed `json_limits.check_json`. Raises McpError."""
    try:
        message = _decode_message(body)
    except _UNREADABLE as error:
        # RFC 8259, section 8.1: a parser may ignore it. A second mark is no JSON.
        rest = (body := bytes(body)).removeprefix(_BYTE_ORDER_MARK)
        if len(rest) < len(body) and not rest.startswith(_BYTE_ORDER_MARK):
            return read_message(rest)
        raise _fault(body, error) from None
    if not message.method:
        if message.id is UNSET or (message.result is UNSET) == (message.error is UNSET):
            raise _invalid("this is no JSON-RPC message: it has no `method`", message.id)
    elif message.id is None:
        raise _invalid("a request's id is a string or an integer, not null")
    # A token is repeated in every notification of progress, as an id is in the answer.
    elif not is_request_id(token := message.meta.get(PROGRESS_TOKEN, 0)) and token is not None:
        text = f"`{PROGRESS_TOKEN}` is a string or an integer, not {_shown(token)}"
        raise McpError(INVALID_PARAMS, text, request_id=message.request_id)
    return message


def read_batch(body: bytes) -> list[Raw] | None:
    """The messages of a batch; None if the body is not an array, which `read_message` judges."""
    if not body.lstrip(b" \t\r\n").startswith(b"["):
        return None
    try:
        return _decode_batch(body)
    except _UNREADABLE:
        return None


def read_line(line: bytes) -> Message:
    """The message in a line from a client that is not limited otherwise. Raises McpError."""
    try:
        check_json(line)
    except JsonLimitError as error:
        raise McpError(INVALID_REQUEST, str(error), request_id=readable_id(line)) from None
    return read_message(line)


def _fault(body: bytes, error: Exception) -> McpError:
    """The error that answers a body which is not a readable message."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as fault:
        text = str(fault).partition("\n")[0][:MAX_NAME_CHARACTERS]
        return McpError(PARSE_ERROR, f"this is not JSON: {text}", request_id=readable_id(body))
    message = as_object(value)
    if message is None:
        return McpError(INVALID_REQUEST, f"a message is an object, not {json_kind(value)}")
    if "id" in message and not is_request_id(message["id"]):
        return _invalid(f"a request's id is a string or an integer, not {_shown(message['id'])}")
    request_id = readable_id(body)
    params = as_object({} if (given := message.get("params")) is None else given)
    if params is None:
        return _invalid(f"`params` must be an object, not {json_kind(given)}", request_id)
    if message.get("jsonrpc") != "2.0":
        return _invalid('`jsonrpc` must be "2.0"', request_id)
    if (method := message.get("method")) is not None and not isinstance(method, str):
        return _invalid(f"`method` must be a string, not {json_kind(method)}", request_id)
    if (meta := params.get("_meta")) is not None and not isinstance(meta, dict):
        text = f"`params._meta` must be an object, not {json_kind(meta)}"
        return McpError(INVALID_PARAMS, text, request_id=request_id)
    # Python's decoder takes what JSON does not have: NaN, and half of a pair of surrogates.
    return McpError(PARSE_ERROR, f"this is not valid JSON: {error}", request_id=request_id)


def _invalid(text: str, request_id: object = None) -> McpError:
    known = request_id if is_request_id(request_id) else None
    return McpError(INVALID_REQUEST, text, request_id=known)


def readable_id(body: bytes) -> RequestId | None:
    """The id of a request whose body cannot be read; None if there is none, or too much stands before it."""
    depth, is_next = 0, False
    for match in islice(_TOKEN.finditer(body), _MAX_TOKENS):
        token = match[0]
        depth += (token in (b"{", b"[")) - (token in (b"}", b"]"))
        if is_next and depth == 1:
            return _id_of(token)
        is_next = depth == 1 and token.startswith(b'"id"') and token.endswith(b":")
    return None


# One character class first, which is fast to search for. A string that does not end goes to the end of the
# text: tried again from each quotation mark in it, 16 KiB would take five seconds.
_TOKEN = re.compile(
    rb"""["\[\]{}0-9.eE+-](?:
        (?<=")[^"\\]*+(?:\\.[^"\\]*+)*+(?:"(?:\s*:)?|\\?\Z)
        |(?<=[0-9.eE+-])[0-9.eE+-]*+
    )?""",
    re.DOTALL | re.VERBOSE,
)
"""Keys with their colon, strings, numbers and brackets of a text that may not be JSON."""


def _id_of(token: bytes) -> RequestId | None:
    try:
        request_id = json.loads(token)
        str(request_id).encode()  # fails for half of a surrogate pair
    except ValueError:
        return None
    return request_id if is_request_id(request_id) else None


def _shown(value: object) -> str:
    return "one of 200 characters or more" if isinstance(value, str) else json_kind(value)


class Kind(StrEnum):
    """What a request asked for, and from what its answer is made again."""

    LIST = "list"
    """The tools: listed again."""
    CALL = "call"
    """A call of a task's tool: from the running call, or from the trajectory."""
    CLAIM = "claim"
    """From the claim in the episode's row."""
    EVALUATE = "evaluate"
    """Evaluated again, which gives the same verdict."""
    START = "start"
    """From the episode that the request has started."""
    OTHER = "other"
    """Cannot be made again: the client has to ask again."""


class EventId(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The id of an event, which is URL-safe Base64 of its members as a JSON array."""

    generation: int
    """Generation of the server that began the response."""
    number: int
    """Number of the response on that server; generation and number name the response."""
    kind: Kind
    request: Annotated[str, Meta(max_length=MAX_NAME_CHARACTERS)] | int
    """The request's JSON-RPC id, for the answer."""
    agent: Annotated[str, Meta(max_length=64)] = ""
    """The agent's id of the episode that a request at the lobby concerns."""
    is_answer: bool = False
    """Whether the event is the answer, not the first one."""

    @property
    def key(self) -> str:
        """The name of the response, see `RequestKeys`."""
        return f"{self.generation}.{self.number}"

    def __str__(self) -> str:
        return urlsafe_b64encode(msgspec.json.encode(self)).decode()

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """None if it is not an id of ours."""
        try:
            return _decode_event_id(urlsafe_b64decode(text))
        except _UNREADABLE:
            return None


_decode_event_id = msgspec.json.Decoder(EventId).decode
