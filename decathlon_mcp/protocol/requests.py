"""Requests: what a POST's body asks for, and requests for tools as what serves them sees them.

A body is read without decoding a tool's arguments. What serves a request for tools (`ToolRequest`) is the
same over HTTP and stdio, in every revision.

A client whose stream of events breaks sends a GET with the id of the last event that it got. The id says
which request is meant, and that is all that is needed: the answer is made again from what the episode has on
record (see `Kind`), also by a server that was started meanwhile.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, TypeAlias, get_args
from urllib.parse import quote, unquote

import msgspec
import pydantic_core
from mcp.server.connection import Connection
from msgspec import UNSET, Raw, UnsetType

from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.episodes.operations import RunningCall, check_operation
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.json_limits import check_undecoded
from decathlon_mcp.protocol.context import RequestContext
from decathlon_mcp.storage.logged_calls import Origin, request_id_text
from decathlon_mcp.suites.tool_names import CLAIM, EVALUATE, LOCAL, spell
from decathlon_mcp.types import JsonObject, Names, as_object

PROGRESS_TOKEN = "progressToken"
CALL = "tools/call"
LIST = "tools/list"
CANCELLED = "notifications/cancelled"
_LONG_SILENCES = frozenset({"initialize", "tools/list"})
"""Methods that can be silent for long: at a task's address they wait for the episode."""
_CLAIM_TOOLS = {spell(names, LOCAL, CLAIM) for names in get_args(Names)}
_LONG_TOOLS = frozenset({*_CLAIM_TOOLS, EVALUATE, "start_episode", "list_tools"})
"""This server's tools that can be silent for long."""
_NESTED_CALL = "call_tool"
"""The lobby's tool that calls another one."""
START_TOOL = "start_episode"
OPERATION_KEY = "decathlon/operation"
"""Key in the `_meta` of a request with the id under which its client would send it again."""
ENVELOPE_PREFIX = "io.modelcontextprotocol/"
RESUMABLE_SINCE = "2025-11-25"
"""The first protocol revision whose clients accept an event without data."""
MAX_REQUEST_ID_BYTES = 128
"""Longest JSON-RPC id of a request that can be resumed: the id comes back in a header."""
LAST_EVENT_KEY = "decathlon.last_event_id"
"""Key of the header `Last-Event-ID` in the ASGI scope."""
_EVENT_ID = re.compile(
    r"([0-9]{1,18})\.(0|last)\.([a-z]{1,8})\.([!-\-/-~]{1,512})(?:\.([0-9A-Za-z_-]{1,64}))?"
)

RequestId: TypeAlias = int | str


class _CallParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: Raw | UnsetType = UNSET
    meta: dict[str, Any] | UnsetType = msgspec.field(name="_meta", default=UNSET)


class _Call(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    jsonrpc: Literal["2.0"]
    id: RequestId
    method: Literal["tools/call"]
    params: _CallParams


class _ListParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    meta: dict[str, Any] | UnsetType = msgspec.field(name="_meta", default=UNSET)


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    jsonrpc: Literal["2.0"]
    id: RequestId
    method: Literal["tools/list"]
    params: _ListParams = msgspec.field(default_factory=_ListParams)


class _Request(msgspec.Struct, frozen=True):
    id: RequestId
    method: str


class _Tool(msgspec.Struct, frozen=True):
    name: str = ""


class _Params(msgspec.Struct, frozen=True):
    name: Any = None
    arguments: Raw | UnsetType = UNSET
    meta: Any = msgspec.field(name="_meta", default=None)


class _Message(msgspec.Struct, frozen=True):
    method: str = ""
    params: _Params = msgspec.field(default_factory=_Params)


_decode_call = msgspec.json.Decoder(_Call).decode
_decode_list = msgspec.json.Decoder(_List).decode
_decode_message = msgspec.json.Decoder(_Message).decode
_decode_request = msgspec.json.Decoder(_Request).decode
_decode_tool = msgspec.json.Decoder(_Tool).decode
_UNREADABLE = (msgspec.MsgspecError, ValueError, RecursionError)


class McpRequest(msgspec.Struct, frozen=True):
    """A well-formed `tools/call` or `tools/list`.

    `id`: as the client sent it. `name` and `arguments` (JSON text of an object on one line, None if there are
    none) are those of a call.
    """

    id: RequestId
    method: str = CALL
    name: str = ""
    arguments: bytes | None = None
    meta: JsonObject = msgspec.field(default_factory=dict[str, Any])

    @classmethod
    def read(cls, body: bytes) -> McpRequest | None:
        """None for any other message, and for one that only the SDK can judge.

        These are messages with members that the protocol does not have, and JSON that some decoders refuse.
        """
        try:
            check_undecoded(body)
            return cls._of_call(body)
        except _UNREADABLE:
            pass
        try:
            return cls._of_list(_decode_list(body))
        except _UNREADABLE:
            return None

    @classmethod
    def _of_list(cls, message: _List) -> McpRequest:
        meta = {} if isinstance(message.params.meta, UnsetType) else message.params.meta
        return cls(message.id, LIST, meta=meta)

    @classmethod
    def _of_call(cls, body: bytes) -> McpRequest | None:
        message = _decode_call(body)
        params = message.params
        arguments = None if isinstance(params.arguments, UnsetType) else bytes(params.arguments)
        if arguments is not None and not arguments.startswith(b"{"):
            if arguments != b"null":
                return None
            arguments = None
        if arguments is not None and (b"\n" in arguments or b"\r" in arguments):
            # Only between tokens, as strings contain none. Messages to a sandbox are lines.
            arguments = msgspec.json.format(arguments, indent=-1)
        meta = {} if isinstance(params.meta, UnsetType) else params.meta
        return cls(message.id, CALL, params.name, arguments, meta)

    @property
    def starts_episode(self) -> bool:
        """Whether it calls the tool that starts an episode."""
        return self.name == START_TOOL

    @property
    def prefers_events(self) -> bool:
        """Whether the answer is better sent as events than as one JSON body, see `Envelope.prefers_sse`."""
        nested = _nested_name(self.arguments or b"") if self.name == _NESTED_CALL else ""
        tools = (self.name, nested)
        return Envelope(self.method, tools, self.meta).prefers_sse


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message's method and its params' `_meta`; for `tools/call` also the tool.

    `tools`: the tool's name, and that of the tool which a call of the lobby's `call_tool` names. A message
    that cannot be read has an empty method: the SDK refuses it.
    """

    method: str = ""
    tools: tuple[str, ...] = ()
    meta: JsonObject = field(default_factory=dict[str, Any])

    @classmethod
    def read(cls, body: bytes) -> Envelope:
        """The envelope of any message."""
        try:
            message = _decode_message(body)
        except _UNREADABLE:
            return cls._read_slowly(body)
        params = message.params
        arguments = b"" if isinstance(params.arguments, UnsetType) else bytes(params.arguments)
        nested = _nested_name(arguments) if params.name == _NESTED_CALL else ""
        return cls._of(message.method, params.name, nested, params.meta)

    @classmethod
    def _read_slowly(cls, body: bytes) -> Envelope:
        """As the SDK reads messages: it accepts NaN, and params that are no object."""
        try:
            message = as_object(pydantic_core.from_json(body)) or {}
        except ValueError:
            return cls()
        params = as_object(message.get("params")) or {}
        nested = (as_object(params.get("arguments")) or {}).get("name")
        return cls._of(message.get("method"), params.get("name"), str(nested), params.get("_meta"))

    @classmethod
    def _of(cls, method: object, name: object, nested: str, meta: object) -> Envelope:
        tools: tuple[str, ...] = ()
        if method == CALL and isinstance(name, str):
            tools = (name, nested) if name == _NESTED_CALL else (name,)
        return cls(method if isinstance(method, str) else "", tools, as_object(meta) or {})

    @property
    def starts_episode(self) -> bool:
        """Whether it calls the tool that starts an episode."""
        return START_TOOL in self.tools

    @property
    def prefers_sse(self) -> bool:
        """Whether the answer is better sent as a stream of events than as one JSON body."""
        # JSON is faster, but carries nothing before the result: a notification on it hangs the call. A stream
        # is needed for progress, and for requests that can be silent for long: after 300 s without a byte the
        # Python client closes its whole connection.
        return (
            PROGRESS_TOKEN in self.meta
            or self.method in _LONG_SILENCES
            or any(tool in _LONG_TOOLS for tool in self.tools)
        )


def request_id_of(body: bytes) -> RequestId | None:
    """The id of a request; None for any other message, and for one that cannot be read."""
    try:
        return _decode_request(body).id
    except _UNREADABLE:
        return None


def _nested_name(arguments: bytes) -> str:
    try:
        return _decode_tool(arguments).name
    except _UNREADABLE:
        return ""


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


class EventId(msgspec.Struct, frozen=True):
    """The id of an event: GENERATION.NUMBER.KIND.REQUEST, at the lobby with .AGENT.

    `generation`: of the server that sent it. `is_answer`: whether it is the answer's (the number is `last`)
    or that of the first event (0). `request`: the request's JSON-RPC id. `agent`: the agent's id of the
    episode that a request at the lobby concerns.
    """

    generation: int
    kind: Kind
    request: int | str
    agent: str = ""
    is_answer: bool = False

    def __str__(self) -> str:
        text = request_id_text(self.request)
        # A dot is not escaped by `quote`, and separates the parts.
        request = text if text.isdigit() else quote(text, safe="").replace(".", "%2E")
        agent = f".{self.agent}" if self.agent else ""
        return f"{self.generation}.{'last' if self.is_answer else '0'}.{self.kind}.{request}{agent}"

    @classmethod
    def parse(cls, text: str) -> EventId | None:
        """None if it is not an id of ours."""
        if (match := _EVENT_ID.fullmatch(text)) is None:
            return None
        generation, number, kind, request, agent = match.groups()
        try:
            value = json.loads(unquote(request, errors="strict"))
            if isinstance(value, bool) or not isinstance(value, int | str):
                return None
            str(value).encode()  # no lone surrogates
            return cls(int(generation), Kind(kind), value, agent or "", number == "last")
        except ValueError:
            return None


Result: TypeAlias = JsonObject | Reply
"""What a request for tools returns: a result, or the reply of a task's server."""


class ToolRequest(ABC):
    """A `tools/call` or `tools/list` that has passed the checks.

    `name` and `arguments` (JSON text of an object, None if there are none) are those of a call. `meta`: the
    params' `_meta`. `is_sessionless`: whether the protocol revision has no sessions. `connection`: that of
    the session, or of a process over stdio; None without a session. `can_stream`: notifications can be sent
    before the result.
    """

    def __init__(
        self,
        message: McpRequest,
        context: RequestContext,
        *,
        connection: Connection | None,
        is_sessionless: bool,
        can_stream: bool,
    ) -> None:
        self.method = message.method
        self.id = message.id
        self.name = message.name
        self.arguments = message.arguments
        self.meta = message.meta
        self.context = context
        self.connection = connection
        self.is_sessionless = is_sessionless
        self.can_stream = can_stream
        self.call: RunningCall | int | None = None
        """The call of a task's tool that the request began or repeats, once that is known."""

    @property
    def session_id(self) -> str | None:
        return None if self.connection is None else self.connection.session_id

    @property
    def state(self) -> dict[str, Any]:
        """What is kept for the session."""
        return {} if self.connection is None else self.connection.state

    @property
    def progress_token(self) -> Any:
        return self.meta.get(PROGRESS_TOKEN)

    @property
    def has_operation(self) -> bool:
        """Whether the client has chosen an operation id for the request."""
        return OPERATION_KEY in self.meta

    @cached_property
    def origin(self) -> Origin:
        """By what the client knows the request when it sends it again. Raises BadRequestError."""
        operation = check_operation(self.meta[OPERATION_KEY]) if self.has_operation else None
        session = self.session_id
        return Origin(operation, session, None if session is None else self.id)

    @property
    def operation(self) -> str | None:
        """An id that stays the same when the client sends the request again; None if it has none."""
        return next(iter(self.origin.operations), None)

    @property
    def last_operation(self) -> str | None:
        """As `operation`, but in a session the one that a client has which comes back for the answer."""
        return next(reversed(self.origin.operations), None)

    @property
    def call_params(self) -> CallParams:
        """The parameters of a call, as the task's server gets them."""
        relayed = {
            key: value
            for key, value in self.meta.items()
            if key != OPERATION_KEY and not key.startswith(ENVELOPE_PREFIX)
        }
        return CallParams(self.arguments, relayed)

    def decoded_arguments(self) -> JsonObject | None:
        """The arguments of a call, decoded. Raises BadRequestError."""
        if self.arguments is None:
            return None
        try:
            return as_object(json.loads(self.arguments))
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the arguments are not valid JSON: {error}") from None

    @property
    @abstractmethod
    def base_url(self) -> str | None:
        """The server's public URL if configured, otherwise the one the client used; None without HTTP."""

    @property
    @abstractmethod
    def is_http(self) -> bool:
        """Whether it came over HTTP."""

    @property
    @abstractmethod
    def protocol_version(self) -> str:
        """The protocol revision in use."""

    @abstractmethod
    def http_header(self, name: str) -> str | None:
        """The value of an HTTP header, by its name in lower case; None if there is none."""

    @abstractmethod
    async def accepted(self, kind: Kind, *, agent: str = "") -> None:
        """The request is on record where it needs to be: from now on its client may come back for the answer.

        `agent`: the agent's id of the episode, for a request at the lobby.
        """

    @abstractmethod
    async def notify(self, method: str, params: JsonObject, *, with_reply: bool = True) -> None:
        """Send a notification, before the reply or on the session's own stream."""

    @abstractmethod
    async def is_gone(self) -> bool:
        """Whether the connection broke on which the client waits for the reply."""
