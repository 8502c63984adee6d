"""The MCP schema of messages from a task's server, and the repair of messages with a fault.

An SDK client raises for a result that MCP does not allow, waits for ever for a result whose `_meta` is null,
and refuses a whole list of tools for one definition. An agent could end its own attempt that way, so
everything is checked where it enters the server. Faulty optional members are left out. Without a valid
required member, a content item becomes a text that says so, an `inputSchema` a schema that allows any
arguments, and a result or a notification is refused. Members that MCP does not define are not looked at.

The classes here are the published schemas of all revisions (2024-11-05 to 2026-07-28), in which an optional
member may be absent and never null. They are stricter where an SDK's client is: Base64, `lastModified` and
two members of `_meta` (TypeScript 1.32 and 2.4), URIs (Python 1.x). Generated tests compare them with all
four SDKs.
"""

# Without postponed evaluation of annotations: the classes in `_result_types` refer to each other.

import copy
from contextlib import suppress
from typing import Annotated, Any, Literal, TypeAlias, cast

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType, ValidationError
from pydantic import AnyUrl, TypeAdapter, UrlConstraints
from pydantic import ValidationError as PydanticError

from decathlon_mcp.json_limits import MAX_NODES, check_json, check_undecoded
from decathlon_mcp.types import JsonObject, as_json_with_raw, as_object

MAX_URI_CHARACTERS = 1 << 16
"""Longest URI of a resource: parsing one takes longer than anything else in a result."""
MAX_READABLE_CHARACTERS = 20_000
"""How much of a refused result's text its caller can read."""
MAX_SAFE_INTEGER = (1 << 53) - 1
"""Largest integer of a `progressToken` that TypeScript's clients accept."""
MAX_REPAIRED_NODES = 10_000
"""Values and keys in the `content` of a result that is repaired, such as 1,250 texts with a null in each.
They take 10 ms, 25 ms if all of them are at fault."""
MAX_GROWN_BYTES = 1 << 20
"""A longer result may not become longer when it is repaired: a reply's limit is at least as high."""
MAX_FAULTS = 20
"""Faults of a content item or a definition that are removed one by one: each takes as long as reading all of
it. After them, whole members of it are removed."""
MAX_FAULT_CHARACTERS = 500
"""How much of a description of a fault, which can quote the message, is relayed."""
MAX_QUOTED_CHARACTERS = 2_000
"""How much of a content item without a text is quoted in the text that replaces it."""

_Text: TypeAlias = str | UnsetType
_UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError)


# Results.


class _Icon(Struct, rename="camel"):
    src: str
    mime_type: _Text = UNSET
    sizes: list[str] | UnsetType = UNSET
    theme: Literal["dark", "light"] | UnsetType = UNSET


class _RelatedTask(Struct, rename="camel"):
    task_id: str


_ProgressToken: TypeAlias = Annotated[int, Meta(ge=-MAX_SAFE_INTEGER, le=MAX_SAFE_INTEGER)] | str


class ResultMeta(Struct):
    """The `_meta` of a result or a notification. TypeScript's clients check these two members everywhere."""

    token: _ProgressToken | UnsetType = msgspec.field(name="progressToken", default=UNSET)
    task: _RelatedTask | UnsetType = msgspec.field(name="io.modelcontextprotocol/related-task", default=UNSET)


_uri = TypeAdapter[AnyUrl](Annotated[AnyUrl, UrlConstraints(host_required=False)])


def _check_uri(uri: str) -> None:
    if len(uri) > MAX_URI_CHARACTERS:
        raise ValueError(f"`uri` has {len(uri)} characters, more than the limit of {MAX_URI_CHARACTERS}")
    try:
        _uri.validate_python(uri)
    except PydanticError:
        raise ValueError("`uri` is not a URI") from None


_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_WHITE_SPACE = b" \t\n\f\r"


def _check_base64(text: str) -> None:
    """Raise ValueError for what a browser's `atob` does not read: padding may be missing."""
    digits = text.encode(errors="replace")
    if any(space in digits for space in _WHITE_SPACE):
        digits = digits.translate(None, _WHITE_SPACE)
    if len(digits) % 4 == 0:
        digits = digits.removesuffix(b"=").removesuffix(b"=")
    if len(digits) % 4 == 1 or digits.translate(None, _BASE64):
        raise ValueError("it is not Base64")


# The pattern of Zod, which TypeScript's clients use: a day that exists, and the offset.
_LEAP_DAY = r"(?:[0-9]{2}(?:[2468][048]|[13579][26]|0[48])|(?:[02468][048]|[13579][26])00)-02-29"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_MINUTE = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_Timestamp: TypeAlias = Annotated[
    str,
    Meta(
        pattern=rf"^(?:{_LEAP_DAY}|[0-9]{{4}}-{_DAY})T{_MINUTE}:[0-5][0-9](?:\.[0-9]+)?(?:Z|[+-]{_MINUTE})\Z"
    ),
]


def _result_types(*, plain: bool) -> Any:
    """The class of results, and the union of the classes of its content items.

    `plain`: members that MCP does not define are a `ValidationError`, and so are `_meta` and
    `structuredContent`, in which there may be anything.
    """

    class Part(Struct, kw_only=True, rename="camel", forbid_unknown_fields=plain):
        if not plain:
            meta: JsonObject | UnsetType = msgspec.field(name="_meta", default=UNSET)

    class Annotations(Struct, rename="camel", forbid_unknown_fields=plain):
        audience: list[Literal["user", "assistant"]] | UnsetType = UNSET
        priority: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
        last_modified: _Timestamp | UnsetType = UNSET

    class Icon(_Icon, forbid_unknown_fields=plain):
        pass

    class Item(Part, tag_field="type", kw_only=True):
        annotations: Annotations | UnsetType = UNSET

    class Text(Item, tag="text", kw_only=True):
        text: str

    class Image(Item, tag="image", kw_only=True):
        data: str
        mime_type: str

        def __post_init__(self) -> None:
            _check_base64(self.data)

    class Audio(Image, tag="audio", kw_only=True):
        pass

    class Link(Item, tag="resource_link", kw_only=True):
        name: str
        uri: str
        title: _Text = UNSET
        description: _Text = UNSET
        mime_type: _Text = UNSET
        size: int | UnsetType = UNSET
        icons: list[Icon] | UnsetType = UNSET

        def __post_init__(self) -> None:
            _check_uri(self.uri)

    class Contents(Part, kw_only=True):
        uri: str
        mime_type: _Text = UNSET
        text: _Text = UNSET
        blob: _Text = UNSET

        def __post_init__(self) -> None:
            _check_uri(self.uri)
            if self.text is UNSET and self.blob is UNSET:
                raise ValueError("a resource has neither `text` nor `blob`")
            if not isinstance(self.blob, UnsetType):
                _check_base64(self.blob)

    class Resource(Item, tag="resource", kw_only=True):
        resource: Contents

    class Result(Part, kw_only=True):
        content: list[Text | Image | Audio | Link | Resource]
        is_error: bool = False
        if not plain:
            structured_content: dict[str, Raw] | UnsetType = UNSET

    return Result, Text | Image | Audio | Link | Resource


_Result, _ContentItem = _result_types(plain=False)
_decode_plain = msgspec.json.Decoder(_result_types(plain=True)[0]).decode
_decode_result = msgspec.json.Decoder(_Result).decode
_decode_item = msgspec.json.Decoder(_ContentItem).decode
decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
decode_items = msgspec.json.Decoder(list[Raw]).decode
_encode = msgspec.json.Encoder().encode
_CHECKED_META = frozenset(ResultMeta.__struct_encode_fields__)
# Numbers keep their text.
_decode_any = msgspec.json.Decoder(float_hook=lambda text: Raw(text.encode())).decode


class ToolResult(Struct, frozen=True):
    """What the server itself reads of a result.

    `has_metas`: the content may contain a `_meta`. If a member occurs twice somewhere, the last one was read.
    """

    is_error: bool
    meta: JsonObject
    has_metas: bool


def read_result(data: bytes) -> ToolResult:
    """Check the JSON text of a tool's result.

    Raises `msgspec.ValidationError`, which names the place, for a result that MCP does not allow,
    JsonLimitError for too much depth or too many values, and ValueError or `msgspec.MsgspecError` for text
    that not every client could read.
    """
    try:
        result = _decode_plain(data)
    except ValidationError:
        pass  # it has a fault, or members that decoding does not look at
    else:
        if len(data) > MAX_NODES:
            # Outside of payloads there is at most one node for each byte. The second length is the JSON's.
            payloads = [getattr(item, "text", "") or getattr(item, "data", "") for item in result.content]
            if all(len(data) - sum(map(length, payloads)) > MAX_NODES for length in (len, _encoded_length)):
                check_json(data)
        return ToolResult(result.is_error, {}, has_metas=False)
    check_json(data)
    check_undecoded(data)
    result = _decode_result(data)
    meta: JsonObject = result.meta or {}
    msgspec.convert(meta, ResultMeta)
    # A resource may have one in another `resource` before.
    has_metas = any(item.meta is not UNSET or hasattr(item, "resource") for item in result.content)
    return ToolResult(result.is_error, meta, has_metas)


def _encoded_length(payload: str) -> int:
    return len(_encode(payload))


def readable_text(data: bytes) -> str:
    """The text in the JSON text of a result that `read_result` has refused, or the beginning of that itself.

    At most MAX_READABLE_CHARACTERS. Raises JsonLimitError as `read_result` does.
    """
    check_json(data)
    content = (as_object(msgspec.json.decode(data)) or {}).get("content")
    items = cast("list[object]", content) if isinstance(content, list) else []
    texts = [content] if isinstance(content, str) else map(_text_of, items)
    text = "\n".join(text for text in texts if text)
    return (text or data[:MAX_READABLE_CHARACTERS].decode(errors="replace"))[:MAX_READABLE_CHARACTERS]


def _text_of(item: object) -> str:
    """The text of a content item, or of the resource in it."""
    members = as_object(item) or {}
    texts = (members.get("text"), (as_object(members.get("resource")) or {}).get("text"))
    return next((text for text in texts if isinstance(text, str) and text), "")


def repaired_result(data: bytes) -> bytes:
    """The JSON text of a tool's result that `read_result` has refused, without what MCP does not allow.

    `structuredContent` becomes a text if it is no object and there is no other content, or if it is one and
    `content` is missing. `isError` is read leniently, as Pydantic does: 1 and "true" are true. What is kept
    keeps its text.

    Raises `msgspec.ValidationError` for what is no object, has no list `content`, or is over a limit of this
    module, and JsonLimitError. The caller checks the new text again.
    """
    check_json(data)
    members = decode_members(data)
    for name in ("content", "structuredContent"):
        if bytes(members.get(name, b"")) == b"null":
            del members[name]
    content, structured = members.get("content"), members.get("structuredContent")
    if structured is not None and not bytes(structured).startswith(b"{"):
        del members["structuredContent"]
    elif structured is not None and content is None:
        content = Raw(b"[]")
    if content is None:
        raise ValidationError("Object missing required field `content`")
    if not bytes(content).startswith(b"["):
        raise ValidationError("Expected `array` - at `$.content`")
    if check_json(bytes(content)) > MAX_REPAIRED_NODES:
        raise ValidationError("too many values and keys to repair it - at `$.content`")
    items = [_repaired_item(item) for item in decode_items(content)]
    if not items and structured is not None:
        items = [_text_item(bytes(structured).decode())]
    members["content"] = Raw(as_json_with_raw(items))
    for name, read in (("isError", _lenient_bool), ("_meta", _repaired_meta)):
        if (member := members.pop(name, None)) is not None:
            try:
                members[name] = read(member)
            except ValidationError:
                continue
    repaired = as_json_with_raw(members)
    if len(repaired) > max(len(data), MAX_GROWN_BYTES):
        raise ValidationError("too many faults to repair it")
    return repaired


def _repaired_item(item: Raw) -> Any:
    """A content item without what MCP does not allow in it, or a text instead of it."""
    try:
        _decode_item(item)
    except ValidationError:
        pass
    else:
        return item
    try:
        return _repaired(_decode_any(item), _ContentItem)
    except ValidationError as error:
        value = _decode_any(item)
        shown = _text_of(value)
        if not shown:
            members = as_object(value) or {}
            members.pop("data", None)  # Base64 is not for reading
            (as_object(members.get("resource")) or {}).pop("blob", None)
            shown = as_json_with_raw(value)[:MAX_QUOTED_CHARACTERS].decode(errors="ignore")
        return _text_item(f"[content that is not MCP: {str(error)[:MAX_FAULT_CHARACTERS]}]\n{shown}")


def _text_item(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _lenient_bool(raw: Raw) -> Any:
    return msgspec.json.decode(raw, type=bool, strict=False)


def _repaired_meta(raw: Raw) -> Any:
    return _repaired(_decode_any(raw), ResultMeta)


# Any message.


def _repaired(value: Any, kind: Any) -> Any:
    """JSON from which everything was removed that a kind does not allow in it; changes `value` itself.

    Raises `msgspec.ValidationError` if a required member is faulty.
    """
    fault, path, faults = ValidationError(), "", 0
    while True:
        try:
            msgspec.json.decode(as_json_with_raw(value), type=kind)
        except _UNREADABLE as error:
            text, faults = str(error), faults + 1
        else:
            return value
        if text == f"Object missing required field `{path[1:]}`":
            raise fault  # it was removed
        fault = ValidationError(text)
        path = text.rpartition(" - at `$")[2].removesuffix("`")
        if not path.startswith((".", "[")):
            raise fault
        _remove(value, path, whole=faults > MAX_FAULTS)


def _remove(value: Any, path: str, *, whole: bool) -> None:
    """Remove what a path as msgspec writes it, `.icons[0].src`, names. `whole`: the member it begins with."""
    if isinstance(value, list):
        index, _, rest = path[1:].partition("]")
        key: Any = int(index)
    else:
        # Names may have dots in them.
        names = [name for name in value if f"{path}.".startswith((f".{name}.", f".{name}["))]
        if not names:
            raise ValidationError(f"no value - at `${path}`")
        key, rest = names[0], path[len(names[0]) + 1 :]
    if whole or not rest:
        del value[key]
    else:
        _remove(value[key], rest, whole=False)


# Definitions and notifications.


class InputSchema(Struct, frozen=True):
    """The JSON Schema of a tool's arguments. TypeScript's clients allow no booleans in `properties`."""

    type: Literal["object"]
    properties: dict[str, JsonObject] | UnsetType = UNSET
    required: list[str] | UnsetType = UNSET
    dialect: _Text = msgspec.field(name="$schema", default=UNSET)


class _Hints(Struct, frozen=True, rename="camel"):
    title: _Text = UNSET
    read_only_hint: bool | UnsetType = UNSET
    destructive_hint: bool | UnsetType = UNSET
    idempotent_hint: bool | UnsetType = UNSET
    open_world_hint: bool | UnsetType = UNSET


class _Execution(Struct, frozen=True, rename="camel"):
    task_support: Literal["forbidden", "optional", "required"] | UnsetType = UNSET


class Definition(Struct, frozen=True, rename="camel"):
    """The definition of a tool without its name."""

    input_schema: InputSchema
    title: _Text = UNSET
    description: _Text = UNSET
    execution: _Execution | UnsetType = UNSET
    icons: list[_Icon] | UnsetType = UNSET
    annotations: _Hints | UnsetType = UNSET
    meta: JsonObject | UnsetType = msgspec.field(name="_meta", default=UNSET)


def valid_definition(tool: JsonObject) -> JsonObject:
    """A tool's definition as every client accepts it. The name is not looked at.

    There is no `outputSchema`: an SDK client raises for each result that does not match it.
    """
    if "outputSchema" in tool:
        tool = {name: value for name, value in tool.items() if name != "outputSchema"}
    try:
        msgspec.convert(tool, Definition)
    except _UNREADABLE:
        schema = _with_object_properties(as_object(tool.get("inputSchema")) or {})
        return _repaired(copy.deepcopy({**tool, "inputSchema": schema}), Definition)
    return tool


def _with_object_properties(schema: JsonObject) -> JsonObject:
    """The schema of an object. A property whose own schema is no object allows what it says."""
    valid = {**schema, "type": "object"}
    if (properties := as_object(schema.get("properties"))) is not None:
        valid["properties"] = {
            name: value if isinstance(value, dict) else {"not": {}} if value is False else {}
            for name, value in properties.items()
        }
    return valid


class ProgressParams(Struct, frozen=True):
    """The parameters of `notifications/progress`, whose token the server replaces."""

    # The SDK's client (2.3) fails for an integer that is no `float`.
    progress: float
    total: float | UnsetType = UNSET
    message: _Text = UNSET
    meta: ResultMeta | UnsetType = msgspec.field(name="_meta", default=UNSET)


class LogParams(Struct, frozen=True):
    """The parameters of `notifications/message`."""

    level: Literal["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
    data: Any
    logger: _Text = UNSET
    meta: ResultMeta | UnsetType = msgspec.field(name="_meta", default=UNSET)


def valid_notification(params: JsonObject, kind: type[ProgressParams | LogParams]) -> JsonObject | None:
    """The parameters of a notification without what MCP does not allow; None if a required part is faulty."""
    # A server can send a hundred a second, so that one with faults must take little longer than another.
    if _is_valid(params, kind):
        return params
    kept = dict(params)
    if (meta := as_object(params.get("_meta"))) is not None:
        kept["_meta"] = {
            name: value
            for name, value in meta.items()
            if name not in _CHECKED_META or _is_valid({name: value}, ResultMeta)
        }
    members = {member.encode_name: member.required for member in msgspec.structs.fields(kind)}
    required = {name: params[name] for name in members if members[name] and name in params}
    for name in members.keys() - required.keys() & kept.keys():
        if not _is_valid({**required, name: kept[name]}, kind):
            del kept[name]
    return kept if _is_valid(kept, kind) else None


def _is_valid(value: JsonObject, kind: type[Struct]) -> bool:
    with suppress(*_UNREADABLE):
        msgspec.convert(value, kind)
        return True
    return False
