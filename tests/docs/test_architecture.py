"""docs/architecture.md against the tree: its tables of packages and plug-ins, the modules and names it has.

A path on the page is relative to `decathlon_mcp/`, or starts with a folder of `FROM_ROOT`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from tests.docs.pages import DOCS, REPOSITORY, inline_code, tables

PAGE = DOCS / "architecture.md"
SERVER = REPOSITORY / "decathlon_mcp"
DRIVER = REPOSITORY / "sandbox" / "decathlon_sandbox"
CLIENT = REPOSITORY / "clients" / "decathlon_client"
REFERENCE = re.compile(r"(?P<path>[\w./-]+\.py)(?::(?P<name>[\w.]+))?")
FROM_ROOT = ("sandbox", "clients", "tests", "docs", "benchmarks")
CONVENTIONAL = frozenset({"__init__", "__main__", "commands", "inside", "provider", "sandbox", "settings"})
"""Names that a plug-in's modules have by what they are."""
FIRST_HEAD = ("package", "plug-in")
"""What the first columns of the tables of packages are called."""


def resolved(path: str) -> Path:
    first = path.partition("/")[0]
    return (REPOSITORY if first in FROM_ROOT else SERVER) / path


def listed() -> set[Path]:
    """The paths in the first columns of the tables."""
    rows = [row for table in tables(PAGE) if table.head[0].lower() in FIRST_HEAD for row in table.rows]
    return {resolved(path.rstrip("/")) for row in rows for path in re.findall(r"`([^`]+)`", row[0])}


def required() -> set[Path]:
    """The packages, top-level modules and plug-ins that the tables must list."""
    server = {file.parent for file in SERVER.glob("*/__init__.py")}
    plugins = {file for file in (SERVER / "plugins").iterdir() if not file.name.startswith("__")}
    modules = {file for file in SERVER.glob("*.py") if not file.stem.startswith("__")}
    client = {file.parent for file in (CLIENT / "__init__.py", *CLIENT.glob("*/__init__.py"))}
    return {*server, *modules, *plugins, *client, DRIVER}


def problem(reference: re.Match[str]) -> str:
    """What is wrong with a reference, or nothing."""
    file, name = resolved(reference["path"]), reference["name"]
    if not file.is_file():
        return f"{reference[0]}: there is no {file.relative_to(REPOSITORY)}"
    defined = rf"^ *(?:(?:async )?def |class )?{name and name.rpartition('.')[2]}\b *[=:(]"
    if name and not re.search(defined, file.read_text("utf-8"), re.MULTILINE):
        return f"{reference[0]}: {file.relative_to(REPOSITORY)} does not define {name}"
    return ""


def relative(paths: set[Path]) -> list[str]:
    return sorted(str(path.relative_to(REPOSITORY)) for path in paths)


def test_the_tables_of_packages_list_what_exists() -> None:
    missing = relative(required() - listed())
    unknown = relative({path for path in listed() if not path.exists()})
    assert (missing, unknown) == ([], []), (
        f"not in the table: {missing}; in the table, not in the tree: {unknown}"
    )


def test_every_module_and_name_referred_to_exists() -> None:
    references = [match for code in inline_code(PAGE) if (match := REFERENCE.fullmatch(code))]
    assert references, "the page refers to no module"
    wrong = sorted({text for reference in references if (text := problem(reference))})
    assert wrong == [], "wrong references:\n" + "\n".join(wrong)


def test_no_two_modules_have_one_name() -> None:
    modules = [file for folder in (SERVER, DRIVER, CLIENT) for file in folder.rglob("*.py")]
    names = Counter(file.stem for file in modules if SERVER / "starter" not in file.parents)
    assert {name for name, count in names.items() if count > 1} <= CONVENTIONAL
