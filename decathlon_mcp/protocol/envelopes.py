"""What a POST's body asks for, read without decoding a tool's arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import msgspec
import pydantic_core
from msgspec import UNSET, Raw, UnsetType

from decathlon_mcp.json_limits import check_undecoded
from decathlon_mcp.types import JsonObject, as_object

PROGRESS_TOKEN = "progressToken"
CALL = "tools/call"
LIST = "tools/list"
CANCELLED = "notifications/cancelled"
_LONG_SILENCES = frozenset({"initialize", "tools/list"})
"""Methods that can be silent for long: at a task's address they wait for the episode."""
_LONG_TOOLS = frozenset({"claim_done", "local-claim_done", "evaluate", "start_episode", "list_tools"})
"""This server's tools that can be silent for long."""
_NESTED_CALL = "call_tool"
"""The lobby's tool that calls another one."""
START_TOOL = "start_episode"

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
