"""Forms as a browser has them: names of inputs, what was typed, and fields as a template draws them.

An input is named by its place in the form, `f.0.2`, so that nothing of a schema is part of a name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.page.play.drafts import Draft, Path, empty_draft, is_filled
from decathlon_mcp.plugins.page.play.schema import Field, Kind, display_value

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
    """One field as a template draws it. `number`: of an item, or of an option.

    `inner`: the fields of a group, the items of a list, or the options of a union, of which `draft` says
    which is chosen.
    """

    form: Field
    name: str
    label: str
    draft: Draft
    error: str
    inner: tuple[ShownField, ...] = ()
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
            # That of the chosen option is shown there.
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
        """The form as it was last saved; an empty one if it was not."""
        return self._forms.get((public_id, tool), (SavedForm(), 0))[0]

    def save(self, public_id: str, tool: str, form: SavedForm, size_bytes: int) -> None:
        """Keep a form. `size_bytes`: about what it takes."""
        key = (public_id, tool)
        self._bytes += size_bytes - self._forms.pop(key, (form, 0))[1]
        self._forms[key] = (form, size_bytes)
        while self._bytes > MAX_SAVED_BYTES:
            _, (_, size_bytes) = self._forms.popitem(last=False)
            self._bytes -= size_bytes
