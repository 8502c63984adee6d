"""What MCP allows in the messages of a task's server: results of tools, definitions, and notifications.

An SDK client raises for a result that MCP does not allow, and refuses a whole list of tools for one
definition. An agent could end its own attempt that way, so everything is checked where it enters the server.
What the SDK refuses (`mcp_types` 2.3; 1.x, which also checks URIs) is refused here; a generated test compares
them.
"""

# Without postponed evaluation of annotations: the classes in `_result_decoder` refer to each other.

from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType
from pydantic import AnyUrl, TypeAdapter, UrlConstraints, ValidationError

from decathlon_mcp.json_limits import MAX_NODES, check_json, check_undecoded
from decathlon_mcp.types import JsonObject, as_object

MAX_URI_CHARACTERS = 1 << 16
"""Longest URI of a resource: parsing one takes longer than anything else in a result."""

MAX_READABLE_CHARACTERS = 20_000
"""How much of a refused result's text its caller can read."""

_Text: TypeAlias = str | None


class _Icon(Struct, rename="camel"):
    src: str
    mime_type: _Text = None
    sizes: list[str] | None = None
    theme: Literal["dark", "light"] | None = None


class ToolResult(Struct, frozen=True):
    """What the server itself reads of a result.

    `has_metas`: the content may contain a `_meta`. If a member occurs twice somewhere, the last one was read.
    """

    is_error: bool
    meta: JsonObject
    has_metas: bool


def read_result(data: bytes) -> ToolResult:
    """Check the JSON text of a tool's result.

    Raises `msgspec.ValidationError`, which names the place, for one that MCP does not allow, JsonLimitError
    for one that is too deep or has too many values, and ValueError or `msgspec.MsgspecError` for text that
    not every client could read.
    """
    try:
        result, is_defined = _decode_defined(data), True
    except msgspec.ValidationError:
        # It has a fault, or members that MCP does not define, which decoding does not look at.
        check_json(data)
        check_undecoded(data)
        result, is_defined = _decode_any(data), False
    if is_defined and len(data) > MAX_NODES:
        # What is no payload has at most one node for each byte.
        # The second length is that of its JSON.
        for length in (len, _encoded_length):
            if len(data) - sum(length(item.payload) for item in result.content) <= MAX_NODES:
                break
        else:
            check_json(data)
    has_metas = False
    for index, item in enumerate(result.content):
        has_metas |= item.may_have_metas
        _read_object(item.meta, f".content[{index}]._meta")
    _read_object(result.structured_content, ".structuredContent")
    return ToolResult(result.is_error, _read_object(result.meta, "._meta"), has_metas)


def readable_text(data: bytes) -> str:
    """The text in the JSON text of a result that `read_result` has refused, or the beginning of that itself.

    At most MAX_READABLE_CHARACTERS. Raises JsonLimitError as `read_result` does.
    """
    check_json(data)
    result = as_object(msgspec.json.decode(data)) or {}
    content = result.get("content")
    items = cast("list[object]", content) if isinstance(content, list) else []
    texts = [content] if isinstance(content, str) else [_text_of(item) for item in items]
    text = "\n".join(text for text in texts if text)
    return (text or data[:MAX_READABLE_CHARACTERS].decode(errors="replace"))[:MAX_READABLE_CHARACTERS]


def _text_of(item: object) -> str:
    text = (as_object(item) or {}).get("text")
    return text if isinstance(text, str) else ""


def _read_object(raw: Raw | UnsetType, place: str) -> JsonObject:
    """A member that is an object or null, if it is there."""
    if isinstance(raw, UnsetType):
        return {}
    data = bytes(raw)
    check_json(data)
    try:
        return _decode_object(data) or {}
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"{error} - at `${place}`") from None


_decode_object = msgspec.json.Decoder(JsonObject | None).decode
_encode = msgspec.json.Encoder().encode


def _encoded_length(payload: str) -> int:
    return len(_encode(payload))


_uri = TypeAdapter[AnyUrl](Annotated[AnyUrl, UrlConstraints(host_required=False)])


def _check_uri(uri: str) -> None:
    if len(uri) > MAX_URI_CHARACTERS:
        raise ValueError(f"`uri` has {len(uri)} characters, more than the limit of {MAX_URI_CHARACTERS}")
    try:
        _uri.validate_python(uri)
    except ValidationError:
        raise ValueError("`uri` is not a URI") from None


def _result_decoder(*, only_defined: bool) -> Any:
    """A decoder of results. `only_defined`: other members than MCP defines are a `ValidationError`."""

    class Annotations(Struct, rename="camel", forbid_unknown_fields=only_defined):
        audience: list[Literal["user", "assistant"]] | None = None
        priority: Annotated[float, Meta(ge=0, le=1)] | None = None
        last_modified: _Text = None

    class Icon(_Icon, forbid_unknown_fields=only_defined):
        pass

    class Item(Struct, tag_field="type", kw_only=True, rename="camel", forbid_unknown_fields=only_defined):
        annotations: Annotations | None = None
        meta: Raw | UnsetType = msgspec.field(name="_meta", default=UNSET)

        @property
        def payload(self) -> str:
            return ""

        @property
        def may_have_metas(self) -> bool:
            return self.meta is not UNSET

    class Text(Item, tag="text", kw_only=True):
        text: str

        @property
        def payload(self) -> str:
            return self.text

    class Image(Item, tag="image", kw_only=True):
        data: str
        mime_type: str

        @property
        def payload(self) -> str:
            return self.data

    class Audio(Image, tag="audio", kw_only=True):
        pass

    class Link(Item, tag="resource_link", kw_only=True):
        name: str
        uri: str
        title: _Text = None
        description: _Text = None
        mime_type: _Text = None
        size: int | None = None
        icons: list[Icon] | None = None

        def __post_init__(self) -> None:
            _check_uri(self.uri)

    class Contents(Struct, kw_only=True, rename="camel", forbid_unknown_fields=only_defined):
        uri: str
        mime_type: _Text = None
        meta: Raw | UnsetType = msgspec.field(name="_meta", default=UNSET)
        text: _Text = None
        blob: _Text = None

        def __post_init__(self) -> None:
            _check_uri(self.uri)
            if self.text is None and self.blob is None:
                raise ValueError("a resource has neither `text` nor `blob`")
            _read_object(self.meta, ".resource._meta")

    class Resource(Item, tag="resource", kw_only=True):
        resource: Contents

        @property
        def payload(self) -> str:
            return self.resource.text or self.resource.blob or ""

        @property
        def may_have_metas(self) -> bool:
            return True  # also in another `resource` before

    class Result(Struct, kw_only=True, rename="camel", forbid_unknown_fields=only_defined):
        content: list[Text | Image | Audio | Link | Resource]
        structured_content: Raw | UnsetType = UNSET
        is_error: bool = False
        meta: Raw | UnsetType = msgspec.field(name="_meta", default=UNSET)

    return msgspec.json.Decoder(Result).decode


_decode_defined = _result_decoder(only_defined=True)
_decode_any = _result_decoder(only_defined=False)


# Definitions of tools.


class _Schema(Struct, frozen=True):
    type: Literal["object"]
    properties: dict[str, JsonObject | bool] | None = None
    required: list[str] | None = None
    dialect: _Text = msgspec.field(name="$schema", default=None)


class _Hints(Struct, frozen=True, rename="camel"):
    title: _Text = None
    read_only_hint: bool | None = None
    destructive_hint: bool | None = None
    idempotent_hint: bool | None = None
    open_world_hint: bool | None = None


class _Execution(Struct, frozen=True, rename="camel"):
    task_support: Literal["forbidden", "optional", "required"] | None = None


_DEFINITION_MEMBERS: dict[str, Any] = {
    "title": _Text,
    "description": _Text,
    "inputSchema": _Schema,
    "execution": _Execution | None,
    "icons": list[_Icon] | None,
    "annotations": _Hints | None,
    "_meta": JsonObject | None,
}


def valid_definition(tool: JsonObject) -> JsonObject:
    """A tool's definition as every client accepts it. The name is not looked at.

    Members that MCP does not allow are left out; an `inputSchema` becomes one that allows any arguments.
    There is no `outputSchema`: an SDK client raises for each result that does not match it.
    """
    schema = tool.get("inputSchema")
    if isinstance(schema, dict) and "type" not in schema:
        tool = {**tool, "inputSchema": {"type": "object", **schema}}
    definition = {
        name: value
        for name, value in tool.items()
        if name != "outputSchema"
        and (name not in _DEFINITION_MEMBERS or _is_valid(value, _DEFINITION_MEMBERS[name]))
    }
    return {"inputSchema": {"type": "object"}, **definition}


# Notifications.


class ProgressParams(Struct, frozen=True):
    """The parameters of `notifications/progress`, whose token the server replaces."""

    # The SDK's client (2.3) fails for an integer that is no `float`.
    progress: float
    total: float | None = None
    message: _Text = None
    meta: JsonObject | None = msgspec.field(name="_meta", default=None)


class LogParams(Struct, frozen=True):
    """The parameters of `notifications/message`."""

    level: Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
    data: Any
    logger: _Text = None
    meta: JsonObject | None = msgspec.field(name="_meta", default=None)


def is_valid_notification(params: JsonObject, kind: type[ProgressParams | LogParams]) -> bool:
    """Whether MCP allows these parameters."""
    return _is_valid(params, kind)


def _is_valid(value: object, kind: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return False
    return True
