"""What a task's server sent, without what MCP does not allow in it.

Faulty optional members are left out. Without a valid required member, a content item becomes a text that
says so, an `inputSchema` one that allows any arguments, and a result or a notification is refused.

Only what `mcp_schema` refuses comes here: a valid message is neither decoded again nor encoded. Members that
MCP does not define are not looked at, and everything that is kept of a result keeps its text.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType, UnionType
from typing import Any, Union, cast, get_args, get_origin

import msgspec
from msgspec import Raw, Struct, UnsetType, ValidationError
from msgspec.structs import FieldInfo
from msgspec.structs import fields as fields_of

from decathlon_mcp.driver.mcp_schema import (
    AnyResult,
    Definition,
    InputSchema,
    LogParams,
    ProgressParams,
    ResultMeta,
)
from decathlon_mcp.json_limits import check_json
from decathlon_mcp.types import JsonObject, as_json_with_raw, as_object

MAX_NODES = 10_000
"""Values and keys in the `content` of a result that is repaired, such as 1,250 texts with a null in each.
They take 10 ms, 25 ms if all of them are at fault."""
MAX_GROWN_BYTES = 1 << 20
"""A longer result may not become longer when it is repaired: a reply's limit is at least as high."""
MAX_FAULT_CHARACTERS = 500
"""How much of a description of a fault, which can quote the message, is relayed."""
MAX_QUOTED_CHARACTERS = 2_000
"""How much of a content item without a text is quoted in the text that replaces it."""
_ANY_ARGUMENTS = {"type": "object"}

_decode_members = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_items = msgspec.json.Decoder(list[Raw]).decode


def repaired_result(data: bytes) -> bytes:
    """The JSON text of a tool's result that `read_result` has refused, without what MCP does not allow.

    `structuredContent` becomes a text if it is no object and there is no other content, or if it is one and
    `content` is missing. `isError` is read leniently, as Pydantic does: 1 and "true" are true.

    Raises `msgspec.ValidationError` for what is no object, has no list `content`, or is over a limit of this
    module, and JsonLimitError. The caller checks the new text again.
    """
    check_json(data)
    members = _decode_members(data)
    content, structured = _present(members.get("content")), _present(members.get("structuredContent"))
    is_object = structured is not None and bytes(structured).startswith(b"{")
    if not is_object:
        members.pop("structuredContent", None)
    elif content is None:
        content = Raw(b"[]")
    if content is None:
        raise ValidationError("Object missing required field `content`")
    if not bytes(content).startswith(b"["):
        raise ValidationError("Expected `array` - at `$.content`")
    if check_json(bytes(content)) > MAX_NODES:
        raise ValidationError("too many values and keys to repair it - at `$.content`")
    items = [_repaired_item(item) for item in _decode_items(content)]
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


def valid_definition(tool: JsonObject) -> JsonObject:
    """A tool's definition as every client accepts it. The name is not looked at.

    There is no `outputSchema`: an SDK client raises for each result that does not match it.
    """
    if "outputSchema" in tool:
        tool = {name: value for name, value in tool.items() if name != "outputSchema"}
    try:
        msgspec.convert(tool, Definition)
    except (msgspec.MsgspecError, ValueError, OverflowError):
        return _repaired({**tool, "inputSchema": _valid_schema(tool.get("inputSchema"))}, Definition)
    return tool


def valid_notification(params: JsonObject, kind: type[ProgressParams | LogParams]) -> JsonObject | None:
    """The parameters of a notification without what MCP does not allow; None if a required one is faulty."""
    try:
        msgspec.convert(params, kind)
    except (msgspec.MsgspecError, ValueError, OverflowError):
        try:
            return _repaired(params, kind)
        except ValidationError:
            return None
    return params


def _valid_schema(schema: object) -> JsonObject:
    """The schema of a tool's arguments. A property whose own schema is no object allows what it says."""
    known = as_object(schema)
    if known is None:
        return _ANY_ARGUMENTS
    valid = {**known, "type": "object"}
    if (properties := as_object(known.get("properties"))) is not None:
        valid["properties"] = {
            name: value if isinstance(value, dict) else {"not": {}} if value is False else {}
            for name, value in properties.items()
        }
    return _repaired(valid, InputSchema)


# Content items.


def _repaired_item(item: Raw) -> Any:
    """A content item without what MCP does not allow in it, or a text instead of it."""
    members: dict[str, Raw] = {}
    try:
        members = _decode_members(item)
        return _repaired(members, _kind_of_item(_string(members.get("type"))))
    except ValidationError as error:
        return _text_item(
            f"[content that is not MCP: {str(error)[:MAX_FAULT_CHARACTERS]}]\n{_readable(item, members)}"
        )


def _kind_of_item(name: str) -> type[Struct]:
    if name not in _ITEM_KINDS:
        raise ValidationError("its `type` is none of MCP's")
    return _ITEM_KINDS[name]


def _readable(item: Raw, members: Mapping[str, Raw]) -> str:
    """The text of a content item or of the resource in it, else the beginning of what it is."""
    resource = _members_of(members.get("resource"))
    if text := _string(members.get("text")) or _string(resource.get("text")):
        return text
    # Base64 is not for reading.
    shown: Any = {name: value for name, value in members.items() if name != "data"} if members else item
    if resource:
        shown["resource"] = {name: value for name, value in resource.items() if name != "blob"}
    return as_json_with_raw(shown)[:MAX_QUOTED_CHARACTERS].decode(errors="ignore")


def _text_item(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def _string(raw: Raw | None) -> str:
    """The string that a member is; empty for anything else."""
    return msgspec.json.decode(raw) if raw is not None and bytes(raw).startswith(b'"') else ""


def _members_of(raw: Raw | None) -> dict[str, Raw]:
    return _decode_members(raw) if raw is not None and bytes(raw).startswith(b"{") else {}


def _present(raw: Raw | None) -> Raw | None:
    """A member that is there and not null."""
    return None if raw is None or bytes(raw) == b"null" else raw


def _lenient_bool(raw: Raw) -> Any:
    return msgspec.json.decode(raw, type=bool, strict=False)


def _repaired_meta(raw: Raw) -> Any:
    return _repaired(raw, ResultMeta)


# Any part of a message.


def _repaired(value: Any, kind: Any) -> Any:
    """JSON or a `Raw` without the members and items that a kind does not allow in it.

    Raises `msgspec.ValidationError` if a required member is faulty.
    """
    if (item_kind := _item_kind(kind)) is not None:
        kept: Any = []
        for item in _opened(value, list):
            try:
                kept.append(_repaired(item, item_kind))
            except ValidationError:
                continue
        return kept
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        _check(value, kind)
        return value
    kept, known = {}, _fields(kind)
    for name, member in _opened(value, dict).items():
        field = known.get(name)
        try:
            kept[name] = member if field is None else _repaired(member, _member_kind(field.type))
        except ValidationError:
            if field is not None and field.required:
                raise
    _check(kept, kind)
    return kept


def _opened(value: Any, kind: type[dict[str, Any] | list[Any]]) -> Any:
    """An object or an array, whose members or items stay JSON text if it was one."""
    if isinstance(value, Raw):
        return _decode_members(value) if kind is dict else _decode_items(value)
    return msgspec.convert(value, kind)


def _check(value: Any, kind: Any) -> None:
    """Raise `msgspec.ValidationError` for JSON, which may have a `Raw` in it, that is not of this kind."""
    try:
        msgspec.json.decode(value if isinstance(value, Raw) else as_json_with_raw(value), type=kind)
    except (msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise ValidationError(str(error)) from None


@cache
def _fields(kind: type[Struct]) -> Mapping[str, FieldInfo]:
    return MappingProxyType({field.encode_name: field for field in fields_of(kind)})


@cache
def _member_kind(kind: Any) -> Any:
    """The type of a member that is there. A `Raw`, which is not decoded for valid results, is an object."""
    if get_origin(kind) in (Union, UnionType):
        kind = Union[tuple(arm for arm in get_args(kind) if arm is not UnsetType)]  # noqa: UP007
    return JsonObject if kind is Raw else kind


@cache
def _item_kind(kind: Any) -> Any:
    """The class of an array's items, if it is an array of objects."""
    (item,) = get_args(kind) if get_origin(kind) is list else (None,)
    return item if isinstance(item, type) and issubclass(item, Struct) else None


def _item_kinds() -> dict[str, type[Struct]]:
    """The classes of content items by their `type`."""
    (item,) = get_args(_fields(AnyResult)["content"].type)
    return {cast("str", kind.__struct_config__.tag): kind for kind in get_args(item)}


_ITEM_KINDS = _item_kinds()
