"""Forms of a browser: a tool's fields, what was typed into them, and the JSON arguments both ways.

What was typed is kept as the browser sends it, by the names of inputs. A name is the place of its field in
the form, `f.0.2`, so that nothing of a schema is part of a name. `f.0.n` is the number of items of a list,
`f.0.o` the chosen option of a union; a choice is sent as its index. Empty input is not sent; `""` is the
empty text.

A schema comes out of a sandbox. One of a kilobyte can describe more fields than there is memory for, and its
patterns can take years to match. Both would hold Python's lock, so that a thread would not help: forms are
made and read in another process, which is killed when its time is over.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar, cast

import anyio
import anyio.to_process
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from referencing import Registry
from referencing.exceptions import Unresolvable

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.json_limits import JsonLimitError, check_json
from decathlon_mcp.plugins.page.schema import Field, Kind, display_value
from decathlon_mcp.types import as_object

ROOT = "f"
MAX_ITEMS = 200
"""Items that a list in a form can have."""
MAX_SHOWN_FIELDS = 2_000
"""Fields of a form with the items of all lists: as many as a browser can send. Drawing them takes 10 ms."""
MAX_DESCRIPTION_CHARACTERS = 1_000
CHOICE_CHARACTERS = 100
MAX_SAVED_BYTES = 64 << 20
"""All forms together that are kept for the people who filled them in."""
INPUT_BYTES = 200
"""What an input takes besides its name and its text."""
READ_SECONDS = 5.0
"""Longest time for one form. The first one of a process takes about a second."""
EMPTY_TEXT = '""'
_BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "more than",
    "maximum": "at most",
    "exclusiveMaximum": "less than",
    "multipleOf": "a multiple of",
}
T = TypeVar("T")
Path: TypeAlias = tuple[str | int, ...]
"""Location in the arguments: property names and item indices."""
Inputs: TypeAlias = Mapping[str, str]
"""What was typed, by the names of the inputs; inputs that are missing are empty."""


class _Absent:
    """Marker for a value that is not sent."""


ABSENT: Final = _Absent()


class NotRepresentableError(ValueError):
    """A value that the form cannot represent; the user must edit it as JSON."""


def inputs_of(sent: Inputs, action: str) -> dict[str, str]:
    """The inputs of a form that a browser sent with this button.

    `add:NAME` adds an item to the list with this name, `remove:NAME:INDEX` removes one.
    """
    # Browsers send the lines of a text as CR LF.
    inputs = {name: text.replace("\r\n", "\n") for name, text in sent.items() if name.startswith(f"{ROOT}.")}
    kind, _, name = action.partition(":")
    if kind == "add":
        inputs[f"{name}.n"] = str(min(_count(inputs, name) + 1, MAX_ITEMS))
    if kind != "remove":
        return inputs
    name, _, index = name.rpartition(":")
    removed = int(index) if _is_number(index) else MAX_ITEMS
    if removed >= (count := _count(inputs, name)):
        return inputs
    kept: dict[str, str] = {}
    for key, text in inputs.items():
        number, dot, rest = key.removeprefix(f"{name}.").partition(".")
        if key.startswith(f"{name}.") and _is_number(number) and int(number) >= removed:
            if int(number) > removed:
                kept[f"{name}.{int(number) - 1}{dot}{rest}"] = text
        else:
            kept[key] = text
    return kept | {f"{name}.n": str(count - 1)}


def check_size(form: Field, inputs: Inputs, name: str = ROOT, count: int = 0) -> int:
    """Count the fields of a form with its items. Raises BadRequestError for more than MAX_SHOWN_FIELDS."""
    count += 1
    if count > MAX_SHOWN_FIELDS:
        # Lists in lists multiply: 20 inputs could describe a million fields.
        raise BadRequestError(f"a form has at most {MAX_SHOWN_FIELDS} fields: give the arguments as JSON")
    for inner, inner_name in _inner(form, name, inputs):
        count = check_size(inner, inputs, inner_name, count)
    return count


def _inner(form: Field, name: str, inputs: Inputs) -> list[tuple[Field, str]]:
    """Fields of a group, items of a list, or options of a union, with their names."""
    inner = form.fields or form.options or (form.items,) * _count(inputs, name)
    return [(each, f"{name}.{index}") for index, each in enumerate(inner) if each is not None]


def _count(inputs: Inputs, name: str) -> int:
    count = inputs.get(f"{name}.n", "0")
    return min(int(count), MAX_ITEMS) if _is_number(count) else 0


def _text(form: Field, name: str, inputs: Inputs) -> str:
    """What was typed into a field; of a choice or a union the index, or nothing."""
    match form.kind:
        case Kind.CHOICE if form.required and len(form.choices) == 1:
            return "0"
        case Kind.CHOICE | Kind.UNION:
            index = inputs.get(name if form.kind is Kind.CHOICE else f"{name}.o", "")
            return index if _is_number(index) and int(index) < len(form.choices or form.options) else ""
        case _:
            return inputs.get(name, "")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 6


def _is_filled(form: Field, name: str, inputs: Inputs) -> bool:
    """Whether the user entered anything."""
    match form.kind:
        case Kind.OBJECT:
            return any(
                _is_filled(each, inner_name, inputs) for each, inner_name in _inner(form, name, inputs)
            )
        case Kind.ARRAY:
            return _count(inputs, name) > 0
        case Kind.CHOICE if form.required and len(form.choices) == 1:
            return False
        case _:
            return _text(form, name, inputs) != ""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was typed into a form. `arguments`: JSON text of an object; None if there are `messages`.

    A message is at the name of the field that it is about.
    """

    arguments: str | None
    messages: Mapping[str, str]


def read_form(form: Field, inputs: Inputs) -> Reading:
    """The arguments that were typed, validated."""
    value, messages = _read(form, inputs, ROOT)
    return Reading(None if messages else _json_text(value), messages)


def text_of(form: Field, inputs: Inputs) -> str:
    """The readable part of what was typed as JSON text."""
    value = _Reader(inputs).value(form, ROOT, ())
    return _json_text({} if value is ABSENT else value, indent=2)


def _read(form: Field, inputs: Inputs, name: str) -> tuple[Any, dict[str, str]]:
    reader = _Reader(inputs)
    value = reader.value(form, name, ())
    if not reader.messages and value is not ABSENT:
        reader.validate(value, form.schema, ())
    return value, reader.messages


class _Reader:
    """Values of the fields of a form, ABSENT where nothing is sent, and what is wrong with them."""

    def __init__(self, inputs: Inputs) -> None:
        self._inputs = inputs
        self._names: dict[Path, str] = {}
        """Names of the fields that were read, by their place in the arguments."""
        self.messages: dict[str, str] = {}

    def value(self, form: Field, name: str, path: Path) -> Any:
        self._names[path] = name
        match form.kind:
            case Kind.OBJECT:
                value = self._object(form, name, path)
            case Kind.ARRAY:
                value = self._array(form, name, path)
            case Kind.UNION:
                chosen = _text(form, name, self._inputs)
                option = f"{name}.{chosen}"
                value = self.value(form.options[int(chosen)], option, path) if chosen else ABSENT
            case Kind.CHOICE:
                chosen = _text(form, name, self._inputs)
                value = form.choices[int(chosen)] if chosen else ABSENT
            case _:
                value = self._typed(form, _text(form, name, self._inputs), path)
        # An option of a union is at the same place, and has its own message.
        if value is ABSENT and form.required and self._names[path] not in self.messages:
            if form.has_default:
                return form.default
            if form.nullable:
                return None
            empty = ' (write "" for an empty text)' if form.kind in (Kind.TEXT, Kind.LONG_TEXT) else ""
            self._report(path, f"required{empty}")
        return value

    def validate(self, value: Any, schema: Mapping[str, Any], path: Path) -> None:
        for location, message in violations_of(value, schema):
            self._report((*path, *location), message)

    def _report(self, path: Path, message: str) -> None:
        """Put a message at the field that has this place in it; the first message of a field counts."""
        known = next(length for length in range(len(path), -1, -1) if path[:length] in self._names)
        if inside := path[known:]:
            message = f"{'.'.join(map(str, inside))}: {message}"
        self.messages.setdefault(self._names[path[:known]], message)

    def _object(self, form: Field, name: str, path: Path) -> Any:
        if not form.required and not _is_filled(form, name, self._inputs):
            return ABSENT
        inner = _inner(form, name, self._inputs)
        values = {each.name: self.value(each, inner_name, (*path, each.name)) for each, inner_name in inner}
        return {key: value for key, value in values.items() if value is not ABSENT}

    def _array(self, form: Field, name: str, path: Path) -> Any:
        inner = _inner(form, name, self._inputs)
        if not inner and not (form.required and not form.nullable and not form.has_default):
            return ABSENT
        values = [self.value(each, item, (*path, index)) for index, (each, item) in enumerate(inner)]
        return [None if value is ABSENT else value for value in values]

    def _typed(self, form: Field, text: str, path: Path) -> Any:
        if not text:
            return ABSENT
        if form.kind in (Kind.TEXT, Kind.LONG_TEXT):
            value: Any = "" if text == EMPTY_TEXT else text
            self.validate(value, form.schema, path)
            return value
        may_be_text = form.kind is Kind.SCALAR and "string" in form.schema["type"]
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
        except ValueError as error:
            if may_be_text:
                return text
            self._report(path, f"not JSON: {error}" if form.kind is Kind.JSON else f"not a {form.kind.value}")
            return ABSENT
        if value is None and form.nullable:
            return None
        if not _fits(form.kind, value):
            self._report(path, f"not a {form.kind.value}")
            return ABSENT
        if may_be_text and violations_of(value, form.schema):
            return text
        self.validate(value, form.schema, path)
        return int(cast("float", value)) if form.kind is Kind.INTEGER else value


def _fits(kind: Kind, value: Any) -> bool:
    """Whether a number is one of its kind; 2.0 is a whole number."""
    if kind not in (Kind.INTEGER, Kind.NUMBER):
        return True
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return isinstance(value, int) or (math.isfinite(value) if kind is Kind.NUMBER else value.is_integer())


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def violations_of(value: Any, schema: Mapping[str, Any]) -> list[tuple[Path, str]]:
    """Validate a value. An invalid or external schema gives no violations: the tool decides."""
    try:
        validator: Any = Draft202012Validator(dict(schema), registry=Registry())
        errors = cast("list[ValidationError]", list(validator.iter_errors(value)))
    except (SchemaError, Unresolvable, RecursionError, TypeError, ValueError, AttributeError, re.error):
        return []
    return [_violation(error) for error in errors]


def _violation(error: ValidationError) -> tuple[Path, str]:
    location, limit = tuple(error.absolute_path), cast("Any", error.validator_value)
    match str(error.validator):
        case "required":
            missing = next(name for name in limit if name not in cast("Any", error.instance))
            return (*location, missing), "required"
        case word if word in _BOUNDS:
            return location, f"{_BOUNDS[word]} {limit:g}"
        case "minLength":
            return location, f"at least {limit} characters" if limit != 1 else "must not be empty"
        case "maxLength":
            return location, f"at most {limit} characters, not {len(cast('str', error.instance))}"
        case "pattern":
            return location, f"does not match {limit}"
        case "minItems":
            return location, f"at least {limit} in the list"
        case "maxItems":
            return location, f"at most {limit} in the list"
        case "uniqueItems":
            return location, "the list contains duplicates"
        case "anyOf" | "oneOf":
            return location, "matches none of the allowed kinds"
        case _:
            return location, " ".join(error.message.split())[:200]


def read_text(text: str) -> Reading:
    """Arguments as JSON text. Any object is accepted; to validate it is up to the tool."""
    text = text.strip() or "{}"
    try:
        check_json(text.encode("utf-8", "surrogatepass"))
        if as_object(json.loads(text, parse_constant=_refuse_constant)) is None:
            return Reading(None, {ROOT: "the arguments must be a JSON object: { … }"})
    except (ValueError, RecursionError, JsonLimitError) as error:
        return Reading(None, {ROOT: f"not JSON: {error}"})
    return Reading(text, {})


def fill_form(form: Field, text: str) -> dict[str, str] | str:
    """The inputs for arguments as JSON text, or as a text why the form cannot have them."""
    reading = read_text(text)
    if reading.arguments is None:
        return reading.messages[ROOT]
    try:
        inputs = _fill(form, json.loads(reading.arguments), ROOT)
        check_size(form, inputs)
    except (NotRepresentableError, BadRequestError) as error:
        return f"the form cannot represent this: {error}"
    return inputs


def _fill(form: Field, value: Any, name: str) -> dict[str, str]:
    """The inputs for a value. Raises NotRepresentableError if the form cannot have it."""
    label = form.name or "a value"
    match form.kind:
        case Kind.CHOICE:
            for index, choice in enumerate(form.choices):
                if choice == value and isinstance(choice, bool) is isinstance(value, bool):
                    return {name: str(index)}
            raise NotRepresentableError(f"{label} is not one of the choices")
        case Kind.OBJECT:
            found = as_object(value)
            if found is None:
                raise NotRepresentableError(f"{label} is not an object")
            if unknown := set(found).difference(each.name for each in form.fields):
                raise NotRepresentableError(f"unknown field {', '.join(sorted(unknown))}")
            inner = [
                _fill(each, found[each.name], inner_name)
                for each, inner_name in _inner(form, name, {})
                if each.name in found
            ]
            return {key: text for inputs in inner for key, text in inputs.items()}
        case Kind.ARRAY:
            if not isinstance(value, list) or form.items is None:
                raise NotRepresentableError(f"{label} is not a list")
            items = cast("list[Any]", value)
            if len(items) > MAX_ITEMS:
                raise NotRepresentableError(f"{label} has more than {MAX_ITEMS} items")
            inputs = {f"{name}.n": str(len(items))}
            for index, item in enumerate(items):
                inputs |= _fill(form.items, item, f"{name}.{index}")
            return inputs
        case Kind.UNION:
            for index, (option, inner_name) in enumerate(_inner(form, name, {})):
                try:
                    inputs = _fill(option, value, inner_name)
                except NotRepresentableError:
                    continue
                if not _read(option, inputs, inner_name)[1]:
                    return {f"{name}.o": str(index), **inputs}
            raise NotRepresentableError(f"{label} matches none of the allowed kinds")
        case Kind.TEXT | Kind.LONG_TEXT if isinstance(value, str):
            return {name: value or EMPTY_TEXT}
        case Kind.SCALAR if isinstance(value, str) and value:
            if _read(form, {name: value}, name) == (value, {}):
                return {name: value}
        case Kind.TEXT | Kind.LONG_TEXT:
            raise NotRepresentableError(f"{label} is not a {form.kind.value}")
        case _ if value is not None and not _fits(form.kind, value):
            raise NotRepresentableError(f"{label} is not a {form.kind.value}")
        case _:
            pass
    return {name: json.dumps(value, ensure_ascii=False)}


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


@dataclass(frozen=True, slots=True)
class ShownField:
    """One field as a template draws it."""

    form: Field
    name: str
    label: str
    text: str
    """What was typed; of a choice or a union the index."""
    error: str
    inner: tuple[ShownField, ...]
    """Fields of a group, items of a list, or options of a union."""
    is_filled: bool

    @property
    def kind(self) -> str:
        """What is drawn."""
        match self.form.kind:
            case Kind.OBJECT | Kind.ARRAY | Kind.UNION | Kind.CHOICE as kind:
                return kind.name.lower()
            case Kind.LONG_TEXT | Kind.JSON:
                return "lines"
            case _:
                return "lines" if "\n" in self.text or "\r" in self.text else "line"

    @property
    def rows(self) -> int:
        """Height of an input of several lines."""
        return min(16, max(3, self.text.count("\n") + 2))

    @property
    def has_errors(self) -> bool:
        return bool(self.error) or any(each.has_errors for each in self.inner)

    @property
    def is_open(self) -> bool:
        """Whether an optional group is unfolded."""
        return self.form.required or self.is_filled or self.has_errors

    @property
    def hint(self) -> str:
        """What is expected, with the default."""
        return f"{self.form.hint}, default {self._default}" if self.form.has_default else self.form.hint

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
            return f"{self._default} (default)"
        return "choose …" if self.form.required and not self.form.nullable else "not sent"

    @property
    def _default(self) -> str:
        return display_value(self.form.default)[:CHOICE_CHARACTERS]


def show_form(
    form: Field, inputs: Inputs, messages: Mapping[str, str], name: str = ROOT, label: str = ""
) -> ShownField:
    """A form with what was typed, and messages at the fields that they are about."""
    inner = tuple(
        show_form(each, inputs, messages, inner_name, each.name if form.kind is Kind.OBJECT else "")
        for each, inner_name in _inner(form, name, inputs)
    )
    text, error = _text(form, name, inputs), messages.get(name, "")
    return ShownField(form, name, label, text, error, inner, _is_filled(form, name, inputs))


@dataclass(frozen=True, slots=True)
class SavedForm:
    """A form as it was last sent: inputs, or JSON text. `problem`: what is wrong with the whole."""

    inputs: Inputs = field(default_factory=dict[str, str])
    text: str | None = None
    messages: Mapping[str, str] = field(default_factory=dict[str, str])
    problem: str = ""


class SavedForms:
    """The forms that people filled in, by episode and tool; the oldest go when there are too many."""

    def __init__(self) -> None:
        self._forms: OrderedDict[tuple[str, str], tuple[SavedForm, int]] = OrderedDict()
        self._bytes = 0

    def get(self, public_id: str, tool: str) -> SavedForm:
        """The form as it was last saved; an empty form if it was not."""
        return self._forms.get((public_id, tool), (SavedForm(), 0))[0]

    def save(self, public_id: str, tool: str, form: SavedForm, sent: Inputs) -> None:
        """Keep a form. `sent`: what came from the browser, names that are no field's too."""
        size_bytes = sum(len(name) + len(text) + INPUT_BYTES for name, text in sent.items())
        key = (public_id, tool)
        self._bytes += size_bytes - self._forms.pop(key, (form, 0))[1]
        self._forms[key] = (form, size_bytes)
        while self._bytes > MAX_SAVED_BYTES:
            _, (_, size_bytes) = self._forms.popitem(last=False)
            self._bytes -= size_bytes


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
