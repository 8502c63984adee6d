"""What MCP allows in the messages of a task's server: results of tools, definitions, and notifications.

An SDK client raises for a result that MCP does not allow, waits for ever for one whose `_meta` is null, and
refuses a whole list of tools for one definition. An agent could end its own attempt that way, so everything
is checked where it enters the server, and what MCP does not allow is left out (`mcp_repair`). The classes
here are the published schemas of all revisions (2024-11-05 to 2026-07-28), in which an optional member may be
absent and never null. They are stricter where an SDK's client is: Base64, `lastModified` and two members of
`_meta` (TypeScript 1.32 and 2.4), URIs (Python 1.x). Generated tests compare them with all four SDKs.
"""

# Without postponed evaluation of annotations: the classes in `_result_type` refer to each other.

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

MAX_SAFE_INTEGER = (1 << 53) - 1
"""Largest integer of a `progressToken` that TypeScript's clients accept."""

_Text: TypeAlias = str | UnsetType


class _Icon(Struct, rename="camel"):
    src: str
    mime_type: _Text = UNSET
    sizes: list[str] | UnsetType = UNSET
    theme: Literal["dark", "light"] | UnsetType = UNSET


class _RelatedTask(Struct, rename="camel"):
    task_id: str


_ProgressToken: TypeAlias = Annotated[int, Meta(ge=-MAX_SAFE_INTEGER, le=MAX_SAFE_INTEGER)] | str
_TOKEN, _TASK = "progressToken", "io.modelcontextprotocol/related-task"


class ResultMeta(Struct):
    """The `_meta` of a result or a notification. TypeScript's clients check these two members everywhere."""

    token: _ProgressToken | UnsetType = msgspec.field(name=_TOKEN, default=UNSET)
    task: _RelatedTask | UnsetType = msgspec.field(name=_TASK, default=UNSET)


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
    meta = _read_object(result.meta, "._meta")
    if meta and (_TOKEN in meta or _TASK in meta):
        msgspec.convert(meta, ResultMeta)
    return ToolResult(result.is_error, meta, has_metas)


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
    """A member that is an object, if it is there."""
    if isinstance(raw, UnsetType):
        return {}
    data = bytes(raw)
    check_json(data)
    try:
        return _decode_object(data)
    except msgspec.ValidationError as error:
        raise msgspec.ValidationError(f"{error} - at `${place}`") from None


_decode_object = msgspec.json.Decoder(JsonObject).decode
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


_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_WHITE_SPACE = b" \t\n\f\r"


def _check_base64(text: str) -> None:
    """Raise ValueError for what a browser's `atob` does not read: padding may be missing."""
    digits = text.encode(errors="replace")
    others = digits.translate(None, _BASE64)
    if others.strip(b"="):
        digits, others = digits.translate(None, _WHITE_SPACE), others.translate(None, _WHITE_SPACE)
    padding = len(others)
    if (
        padding > 2
        or others != b"=" * padding
        or not digits.endswith(others)
        or (len(digits) % 4 != 0 if padding else len(digits) % 4 == 1)
    ):
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


def _result_type(*, only_defined: bool) -> Any:
    """The class of results. `only_defined`: other members than MCP defines are a `ValidationError`."""

    class Annotations(Struct, rename="camel", forbid_unknown_fields=only_defined):
        audience: list[Literal["user", "assistant"]] | UnsetType = UNSET
        priority: Annotated[float, Meta(ge=0, le=1)] | UnsetType = UNSET
        last_modified: _Timestamp | UnsetType = UNSET

    class Icon(_Icon, forbid_unknown_fields=only_defined):
        pass

    class Item(Struct, tag_field="type", kw_only=True, rename="camel", forbid_unknown_fields=only_defined):
        annotations: Annotations | UnsetType = UNSET
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

        def __post_init__(self) -> None:
            _check_base64(self.data)

        @property
        def payload(self) -> str:
            return self.data

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

    class Contents(Struct, kw_only=True, rename="camel", forbid_unknown_fields=only_defined):
        uri: str
        mime_type: _Text = UNSET
        meta: Raw | UnsetType = msgspec.field(name="_meta", default=UNSET)
        text: _Text = UNSET
        blob: _Text = UNSET

        def __post_init__(self) -> None:
            _check_uri(self.uri)
            if self.text is UNSET and self.blob is UNSET:
                raise ValueError("a resource has neither `text` nor `blob`")
            if not isinstance(self.blob, UnsetType):
                _check_base64(self.blob)
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

    return Result


AnyResult = _result_type(only_defined=False)
_decode_defined = msgspec.json.Decoder(_result_type(only_defined=True)).decode
_decode_any = msgspec.json.Decoder(AnyResult).decode


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
