"""What the code has the last word on, tables and more: written from it, between two marks of a page.

    .venv/bin/python docs/tables.py

A page says `<!-- table: NAME -->` and `<!-- end -->`; what stands between them is replaced. `tests/docs`
fails where a page is not as this would write it.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

from annotated_types import Ge, Gt
from decathlon_client.errors import error_from_code
from pydantic.fields import FieldInfo

import decathlon_mcp.app  # noqa: F401  # pyright: ignore[reportUnusedImport]  (defines every error)
from decathlon_mcp.cli.app import serve
from decathlon_mcp.cli.options import PREFIX, SECTIONS, SERVE_NAMES
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.http.errors import STATUS
from decathlon_mcp.protocol.lobby_tools import LOBBY_TOOLS
from decathlon_mcp.protocol.results import CODES, TOOL_FAILURES, error_code
from decathlon_mcp.settings import Settings
from docs.docstrings import Definition, definitions, exported, methods, paragraphs, section

DOCS = Path(__file__).parent
CLIENT = DOCS.parent / "clients" / "decathlon_client"
CLIENT_MODULES = ("decathlon", "episode", "values", "batch", "progress", "lockstep", "opener")
"""In this order they are told; whatever else exports a name comes after."""
VERDICT = DOCS.parent / "decathlon_mcp" / "rewards" / "verdict.py"
OURS_ALONE = frozenset({"bad_settings", "bad_metrics"})
"""Codes that end a server's start, or stand in a verdict."""
SCORED = "when `status` is `scored`"
PRESENT = {"success": SCORED, "reward": SCORED, "signature": "once it is signed, as a server does at once"}
JSON_TYPES: Mapping[Any, str] = {
    str: "string",
    bool: "boolean",
    float: "number",
    int: "number",
    type(None): "null",
}
MARKED = re.compile(r"(<!-- table: (?P<name>[\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def flag(name: str) -> str:
    """A setting's name as a command line has it, and as a variable."""
    return f"`--{name.replace('_', '-')}`<br>`{PREFIX}{name.upper()}`"


def settings() -> Iterator[str]:
    """Every setting of the model, in the sections of `--help`; what only `serve` takes comes first."""
    yield from _headed("Address, only of `serve`", _address())
    for title, names in SECTIONS.items():
        rows = [_setting(name, Settings.model_fields[name]) for name in names if name != "config"]
        yield from _headed(title, rows)


def _headed(title: str, rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield from (f"## {title}", "")
    yield from table(("setting", "default", "what it is"), rows)
    yield ""


def _setting(name: str, field: FieldInfo) -> tuple[str, str, str]:
    told, _, instead = (field.description or "").partition(" [")
    told = told.removesuffix(".")
    words = [f"`{choice}`" for choice in choices_of(field.annotation)]
    choices = "" if all(word in told for word in words) else ", ".join(words)
    least = next((f"more than {each.gt}" for each in limits(field) if isinstance(each, Gt)), "")
    least = next((f"at least {each.ge}" for each in limits(field) if isinstance(each, Ge)), least)
    notes = "; ".join(each for each in (choices and f"one of {choices}", least) if each)
    return flag(name), _default(field, instead.rstrip("]")), f"{told}{f' ({notes})' if notes else ''}"


def _default(field: FieldInfo, instead: str) -> str:
    if instead:
        return instead
    if field.default_factory is not None:
        return "`$XDG_STATE_HOME/decathlon-mcp`"
    match field.default:
        case None:
            return "none"
        case tuple():
            return ", ".join(f"`{each}`" for each in cast("tuple[object, ...]", field.default))
        case float() | int():
            return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)
        case _:
            return f"`{field.default}`"


def choices_of(annotation: Any) -> tuple[str, ...]:
    """The words that a setting may be, where it may only be one of some."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(choice for part in get_args(annotation) for choice in choices_of(part))
    return ()


def limits(field: FieldInfo) -> Iterator[Any]:
    """What bounds a setting's value, wherever in its annotation that stands."""
    yield from field.metadata
    for part in get_args(field.annotation):
        yield from getattr(part, "__metadata__", ())
        for more in getattr(part, "__metadata__", ()):
            yield from getattr(more, "metadata", ())


def _address() -> Iterator[tuple[str, str, str]]:
    told = dict(re.findall(r"^(\w+)\n    (.+)$", inspect.cleandoc(serve.__doc__ or ""), re.MULTILINE))
    for name in SERVE_NAMES:
        default = inspect.signature(serve).parameters[name].default
        yield flag(name), f"`{default}`" if default else "none", told[name].rstrip(".")


def errors() -> Iterator[str]:
    """Our errors by their code, as clients get them."""
    yield from table(
        ("`data.code`", "JSON-RPC", "HTTP", "ask again?", "what it says"),
        [
            (
                f"`{kind.code}`",
                "result, `isError`" if kind.code in TOOL_FAILURES else str(error_code(kind(""))),
                str(STATUS.get(kind.code, "")),
                "yes" if kind.retryable else "no",
                re.sub(r"(?<!\.)\.$", "", inspect.getdoc(kind) or ""),
            )
            for kind in _kinds()
        ],
    )


def _kinds() -> list[type[DecathlonError]]:
    """As the edge lists them, but for those that no client meets."""
    order = {code: place for place, code in enumerate((*CODES, *sorted(TOOL_FAILURES)))}
    kinds = [kind for kind in DecathlonError.__subclasses__() if kind.code not in OURS_ALONE]
    return sorted(kinds, key=lambda kind: (order.get(kind.code, len(order)), kind.code))


def lobby() -> Iterator[str]:
    """The lobby's tools with their arguments; those that may be left out stand in brackets."""
    rows: list[tuple[str, ...]] = []
    for name, kind in LOBBY_TOOLS.items():
        arguments = [
            f"`{argument}`" if field.is_required() else f"[`{argument}`]"
            for argument, field in kind.model_fields.items()
        ]
        rows.append((f"`{name}`", " ".join(arguments), str(kind.definition()["description"])))
    yield from table(("tool", "arguments", "what it does"), rows)


def client() -> Iterator[str]:
    """What `decathlon_client` exports, but for its errors, a section each."""
    for found in _exported():
        if found.name not in _client_errors():
            yield from section(found)


def error_classes() -> Iterator[str]:
    """The classes of the client's errors, with the server's codes that become them."""
    codes = _codes()
    rows: list[tuple[str, ...]] = []
    for name, found in _client_errors().items():
        assert isinstance(found.node, ast.ClassDef)
        managed = [f"`{method.name}`" for method in methods(found.node)]
        rows.append(
            (
                f"`{name}`",
                ", ".join(f"`{code}`" for code in codes.get(name, ())),
                found.told,
                ", ".join(managed),
            )
        )
    yield from table(("class", "`code`", "what it says", "holds, too"), rows)


def verdict() -> Iterator[str]:
    """What a verdict is, and its members."""
    yield from paragraphs(inspect.getdoc(Verdict) or "")
    yield from table(
        ("member", "type", "it is there"),
        [
            (f"`{name}`", f"`{json_type(field.annotation)}`", PRESENT.get(name, "always"))
            for name, field in Verdict.model_fields.items()
        ],
    )


def json_type(annotation: Any) -> str:
    """What a value is in JSON."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(json.dumps(part) for part in parts)
    if origin is Annotated:
        return json_type(parts[0])
    if origin in (Union, types.UnionType):
        return " or ".join(json_type(part) for part in parts)
    if origin is dict:
        return f"object of {json_type(parts[1])}s"
    if origin is tuple:
        return f"array of {json_type(parts[0])}s"
    return JSON_TYPES.get(annotation, "object")


def _exported() -> list[Definition]:
    names = exported(CLIENT)
    others = sorted(file.stem for file in CLIENT.glob("*.py") if file.stem not in CLIENT_MODULES)
    found: dict[str, Definition] = {}
    for module in (*CLIENT_MODULES, *others):
        for name, each in definitions(CLIENT / f"{module}.py").items():
            if name in names:
                found.setdefault(name, each)
    return list(found.values())


def _client_errors() -> dict[str, Definition]:
    names = exported(CLIENT)
    return {name: each for name, each in definitions(CLIENT / "errors.py").items() if name in names}


def _codes() -> dict[str, list[str]]:
    """The server's codes by the client's classes."""
    found: dict[str, list[str]] = {"NoVerdictError": ["no_verdict"]}
    for kind in _kinds():
        name = type(error_from_code(kind.code, "", {})).__name__
        found.setdefault(name, []).append(kind.code)
    return found


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in row)} |"


TABLES: Mapping[str, Callable[[], Iterable[str]]] = {
    "settings": settings,
    "errors": errors,
    "error-classes": error_classes,
    "lobby": lobby,
    "client": client,
    "verdict": verdict,
}


def rewritten(page: str) -> str:
    """A page's text with its tables as they are to be. Raises KeyError for a table that nobody writes."""

    def fresh(match: re.Match[str]) -> str:
        return match[1] + "\n".join(TABLES[match["name"]]()).rstrip() + "\n" + match[3]

    return MARKED.sub(fresh, page)


def main() -> None:
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text("utf-8")
        if (new := rewritten(text)) != text:
            page.write_text(new, "utf-8")


if __name__ == "__main__":
    main()
