"""Forms made and read in another process.

A schema comes out of a sandbox. One of a kilobyte can describe more fields than there is memory for, and its
patterns can take years to match. Both would hold Python's lock, so that a thread would not help: a process is
killed when its time is over.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.to_process

from decathlon_mcp.json_limits import JsonLimitError, check_json
from decathlon_mcp.plugins.page.play.drafts import (
    Draft,
    NotRepresentableError,
    Path,
    draft_from_value,
    partial_value,
    read_draft,
)
from decathlon_mcp.plugins.page.play.forms import MAX_DRAFT_FIELDS, count_fields
from decathlon_mcp.plugins.page.play.schema import Field, Kind, form_from_schema
from decathlon_mcp.types import as_object

T = TypeVar("T")

READ_SECONDS = 5.0
"""Longest time for one form. The first one of a process takes about a second."""
MAX_FORM_FIELDS = 500
MAX_CHOICES = 2_000
"""Limits of a form; the arguments of a tool with more are given as JSON."""
JSON_ONLY = Field("", Kind.JSON, {}, required=True)
"""The form of a tool whose schema gives none."""


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
    for field in _all_fields(form):
        fields, choices = fields + 1, choices + len(field.choices)
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
        if as_object(json.loads(text, parse_constant=_refuse_constant)) is None:
            return Reading(None, {(): "the arguments must be a JSON object: { … }"})
    except (ValueError, RecursionError, JsonLimitError) as error:
        return Reading(None, {(): f"not JSON: {error}"})
    return Reading(text, {})


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


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
