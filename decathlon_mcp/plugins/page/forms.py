"""Forms of a browser: names of inputs, typed texts, and fields as a template draws them.

An input is named by its place in the form, `f.0.2`, so that nothing of a schema is part of a name.

A schema comes out of a sandbox. One of a kilobyte can describe more fields than there is memory for, and its
patterns can take years to match. Both would hold Python's lock, so that a thread would not help: forms are
made and read in another process, which is killed when its time is over.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import anyio
import anyio.to_process

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.json_limits import JsonLimitError, check_json
from decathlon_mcp.plugins.page.drafts import (
    Draft,
    NotRepresentableError,
    Path,
    draft_from_value,
    empty_draft,
    is_filled,
    partial_value,
    read_draft,
    refuse_constant,
)
from decathlon_mcp.plugins.page.schema import Field, Kind, display_value, form_from_schema
from decathlon_mcp.types import as_object

ROOT = "f"
MAX_ITEMS = 200
"""Items that a list in a form can have."""
MAX_DRAFT_FIELDS = 2_000
"""Fields of a form with the items of all lists: as many as a browser can send. Drawing them takes 10 ms."""
MAX_DESCRIPTION_CHARACTERS = 1_000
CHOICE_CHARACTERS = 100
MAX_SAVED_BYTES = 64 << 20
"""All forms together that are kept for the people who filled them in."""
LINES = ("\n", "\r")
T = TypeVar("T")
READ_SECONDS = 5.0
"""Longest time for one form. The first one of a process takes about a second."""
MAX_FORM_FIELDS = 500
MAX_CHOICES = 2_000
"""Limits of a form; the arguments of a tool with more are given as JSON."""
JSON_ONLY = Field("", Kind.JSON, {}, required=True)
"""The form of a tool whose schema gives none."""


@dataclass(frozen=True, slots=True)
class Change:
    """A button of a list: add an item to the list with this name, or remove its item `index`."""

    name: str
    index: int | None = None

    @classmethod
    def parse(cls, action: str) -> Change | None:
        """From the value of the button, `add:NAME` or `remove:NAME:INDEX`."""
        kind, _, rest = action.partition(":")
        if kind == "add":
            return cls(rest)
        name, _, index = rest.rpartition(":")
        return cls(name, int(index)) if kind == "remove" and _is_number(index) else None


def read_inputs(form: Field, inputs: Mapping[str, str], change: Change | None = None) -> Draft:
    """The draft of what a browser sent. Inputs that are missing are empty.

    Raises BadRequestError for more than MAX_DRAFT_FIELDS.
    """
    return _Inputs(inputs, change).read(form, ROOT)


class _Inputs:
    """The inputs of one form. `change`: to a list in it."""

    def __init__(self, inputs: Mapping[str, str], change: Change | None) -> None:
        self._inputs = inputs
        self._change = change
        self._fields = 0

    def read(self, form: Field, name: str) -> Draft:
        self._fields += 1
        if self._fields > MAX_DRAFT_FIELDS:
            # Lists in lists multiply: 20 inputs could describe a million fields.
            raise BadRequestError(f"a form has at most {MAX_DRAFT_FIELDS} fields: give the arguments as JSON")
        match form.kind:
            case Kind.OBJECT:
                return {
                    inner.name: self.read(inner, f"{name}.{index}") for index, inner in enumerate(form.fields)
                }
            case Kind.ARRAY if form.items is not None:
                return self._items(form.items, name)
            case Kind.UNION:
                chosen = self._inputs.get(f"{name}.o", "")
                if not _is_number(chosen) or int(chosen) >= len(form.options):
                    return (None, None)
                index = int(chosen)
                return (index, self.read(form.options[index], f"{name}.{index}"))
            case Kind.CHOICE:
                chosen = self._inputs.get(name, "")
                return int(chosen) if _is_number(chosen) and int(chosen) < len(form.choices) else None
            case _:
                # Browsers send the lines of a text as CR LF.
                return self._inputs.get(name, "").replace("\r\n", "\n")

    def _items(self, form: Field, name: str) -> Draft:
        count, change = self._inputs.get(f"{name}.n", "0"), self._change
        items = [
            self.read(form, f"{name}.{index}")
            for index in range(min(int(count), MAX_ITEMS) if _is_number(count) else 0)
        ]
        if change is not None and change.name == name:
            if change.index is None and len(items) < MAX_ITEMS:
                items.append(empty_draft(form))
            elif change.index is not None:
                del items[change.index : change.index + 1]
        return items


def count_fields(draft: Draft) -> int:
    """About as many fields as a form with this draft has."""
    match draft:
        case dict():
            return 1 + sum(map(count_fields, cast("dict[str, Draft]", draft).values()))
        case list() | tuple():
            return 1 + sum(map(count_fields, cast("Sequence[Draft]", draft)))
        case _:
            return 1


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6


@dataclass(frozen=True, slots=True)
class ShownField:
    """One field as a template draws it."""

    form: Field
    name: str
    label: str
    draft: Draft
    error: str
    inner: tuple[ShownField, ...] = ()
    """Fields of a group, items of a list, or options of a union; `draft` names the chosen option."""
    number: int = 0
    has_errors: bool = False

    @property
    def kind(self) -> str:
        """What is drawn."""
        match self.form.kind:
            case Kind.OBJECT | Kind.ARRAY | Kind.UNION | Kind.CHOICE as kind:
                return kind.name.lower()
            case Kind.LONG_TEXT | Kind.JSON:
                return "lines"
            case _:
                return "lines" if any(end in str(self.draft) for end in LINES) else "line"

    @property
    def rows(self) -> int:
        """Height of an input of several lines."""
        return min(16, max(3, str(self.draft).count("\n") + 2))

    @property
    def is_open(self) -> bool:
        """Whether an optional group is unfolded."""
        return self.form.required or self.has_errors or is_filled(self.form, self.draft)

    @property
    def hint(self) -> str:
        """What is expected, with the default."""
        hint = self.form.hint
        if self.form.has_default:
            hint += f", default {display_value(self.form.default)[:CHOICE_CHARACTERS]}"
        return hint

    @property
    def description(self) -> str:
        return self.form.description[:MAX_DESCRIPTION_CHARACTERS]

    @property
    def choices(self) -> tuple[str, ...]:
        """The texts of a choice."""
        return tuple(display_value(value)[:CHOICE_CHARACTERS] or '""' for value in self.form.choices)

    @property
    def prompt(self) -> str:
        """Text while nothing is chosen."""
        if self.form.has_default:
            return f"{display_value(self.form.default)[:CHOICE_CHARACTERS]} (default)"
        return "choose …" if self.form.required and not self.form.nullable else "not sent"


def show_form(
    form: Field,
    draft: Draft,
    messages: Mapping[Path, str],
    *,
    path: Path = (),
    name: str = ROOT,
    label: str | None = None,
    number: int = 0,
) -> ShownField:
    """A form with what was typed, and messages at the fields that they are about."""
    inner: list[ShownField] = []
    error = messages.get(path, "")
    match form.kind:
        case Kind.OBJECT:
            inner = [
                show_form(each, draft[each.name], messages, path=(*path, each.name), name=f"{name}.{index}")
                for index, each in enumerate(form.fields)
            ]
        case Kind.ARRAY if form.items is not None:
            inner = [
                show_form(
                    form.items,
                    item,
                    messages,
                    path=(*path, index),
                    name=f"{name}.{index}",
                    label="",
                    number=index,
                )
                for index, item in enumerate(draft)
            ]
        case Kind.UNION:
            for index, option in enumerate(form.options):
                chosen = draft[0] == index
                inner.append(
                    show_form(
                        option,
                        draft[1] if chosen else empty_draft(option),
                        messages if chosen else {},
                        path=path,
                        name=f"{name}.{index}",
                        label="",
                        number=index,
                    )
                )
            # An error of the chosen option is shown there.
            error = error if draft[0] is None else ""
        case _:
            pass
    return ShownField(
        form,
        name,
        form.name if label is None else label,
        draft,
        error,
        tuple(inner),
        number,
        bool(error) or any(each.has_errors for each in inner),
    )


@dataclass(frozen=True, slots=True)
class SavedForm:
    """A form as it was last sent: a draft, or JSON text. `problem`: what is wrong with the whole."""

    draft: Draft = None
    text: str | None = None
    messages: Mapping[Path, str] = field(default_factory=dict[Path, str])
    problem: str = ""


class SavedForms:
    """The forms that people filled in, by episode and tool; the oldest go when there are too many."""

    def __init__(self) -> None:
        self._forms: OrderedDict[tuple[str, str], tuple[SavedForm, int]] = OrderedDict()
        self._bytes = 0

    def get(self, public_id: str, tool: str) -> SavedForm:
        """The form as it was last saved; an empty form if it was not."""
        return self._forms.get((public_id, tool), (SavedForm(), 0))[0]

    def save(self, public_id: str, tool: str, form: SavedForm, size_bytes: int) -> None:
        """Keep a form. `size_bytes`: about what it takes."""
        key = (public_id, tool)
        self._bytes += size_bytes - self._forms.pop(key, (form, 0))[1]
        self._forms[key] = (form, size_bytes)
        while self._bytes > MAX_SAVED_BYTES:
            _, (_, size_bytes) = self._forms.popitem(last=False)
            self._bytes -= size_bytes


@dataclass(frozen=True, slots=True)
class Reading:
    """What was typed into a form. `arguments`: JSON text of an object; None if there are `messages`."""

    arguments: str | None
    messages: Mapping[Path, str]


class TooSlowError(Exception):
    """A form took longer than READ_SECONDS."""


class FormReader:
    """Runs the functions of this module."""

    def __init__(self) -> None:
        self._limiter = anyio.CapacityLimiter(2)

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run a function in another process. Raises TooSlowError, and what the function raises."""
        async with self._limiter:
            try:
                with anyio.fail_after(READ_SECONDS):
                    return await anyio.to_process.run_sync(function, *arguments, cancellable=True)
            except (TimeoutError, anyio.BrokenWorkerProcess):
                raise TooSlowError from None


def make_form(schema: str) -> Field:
    """The form of a tool with this schema, as JSON text."""
    form = form_from_schema(json.loads(schema))
    fields = choices = 0
    for each in _all_fields(form):
        fields, choices = fields + 1, choices + len(each.choices)
        if fields > MAX_FORM_FIELDS or choices > MAX_CHOICES:
            return JSON_ONLY
    return form


def _all_fields(field: Field) -> Iterator[Field]:
    yield field
    for inner in (*field.fields, *field.options, *((field.items,) if field.items else ())):
        yield from _all_fields(inner)


def read_form(form: Field, draft: Draft) -> Reading:
    """The arguments that were typed, validated."""
    found = read_draft(form, draft)
    messages: dict[Path, str] = {}
    for violation in found.violations:
        messages.setdefault(violation.path, violation.message)
    return Reading(None if messages else _json_text(found.value), messages)


def read_text(text: str) -> Reading:
    """Arguments as JSON text. Any object is accepted; to validate it is up to the tool."""
    text = text.strip() or "{}"
    try:
        check_json(text.encode("utf-8", "surrogatepass"))
        if as_object(json.loads(text, parse_constant=refuse_constant)) is None:
            return Reading(None, {(): "the arguments must be a JSON object: { … }"})
    except (ValueError, RecursionError, JsonLimitError) as error:
        return Reading(None, {(): f"not JSON: {error}"})
    return Reading(text, {})


def text_of(form: Field, draft: Draft) -> str:
    """The readable part of a draft as JSON text."""
    return _json_text(partial_value(form, draft), indent=2)


def _json_text(value: object, *, indent: int | None = None) -> str:
    """JSON for people to read, that UTF-8 can encode."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    # Lone surrogates can be in a schema, and in JSON that somebody types.
    return text if is_encodable(text) else json.dumps(value, indent=indent)


def is_encodable(text: str) -> bool:
    """Whether UTF-8 can encode a text, and so an address or a request have it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def draft_of(form: Field, text: str) -> Draft | str:
    """The draft for arguments as JSON text, or as a text why the form cannot have them."""
    reading = read_text(text)
    if reading.arguments is None:
        return reading.messages[()]
    try:
        draft = draft_from_value(form, json.loads(reading.arguments))
    except NotRepresentableError as error:
        return f"the form cannot represent this: {error}"
    if count_fields(draft) > MAX_DRAFT_FIELDS:
        return f"the form cannot represent this: it would have more than {MAX_DRAFT_FIELDS} fields"
    return draft
