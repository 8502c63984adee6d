"""Output of commands on stdout: a table on a terminal, tab-separated lines in a pipe, or JSON.

Also how a shell finds the programs of this environment, for what is to be typed next.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

PROGRAM = "decathlon-mcp"
_ESCAPED = re.compile("[\x7f-\x9f\ud800-\udfff]")
"""Control characters that JSON allows and a terminal obeys; lone surrogates, which UTF-8 does not have."""
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")
"""What a terminal obeys besides tabs and line feeds."""


def print_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print lines of cells, of which the first is a name.

    In a pipe without headings; on a terminal without columns that have no text, and nothing for no line.
    """
    if not sys.stdout.isatty() or not (lines := list(lines)):
        print_lines(lines)
        return
    # Imported late: most commands print no table.
    from rich.markup import escape
    from rich.table import Table

    from decathlon_mcp.cli.terminal import Terminal

    table = Table(box=None, header_style="bold", pad_edge=False)
    columns: list[list[str]] = []
    for heading, *cells in zip(headings, *lines, strict=True):
        if any(cells):
            table.add_column(heading, overflow="fold", no_wrap=not columns)
            columns.append([escape(printed(cell)) for cell in cells])
    for row in zip(*columns, strict=True):
        table.add_row(*row)
    Terminal().print(table)


def print_lines(lines: Iterable[Sequence[object]]) -> None:
    """Print lines of cells, with a tab between two.

    Control characters are escaped: clients and sandboxes may have written the texts.
    """
    for line in lines:
        sys.stdout.write("\t".join(printed(str(cell)) for cell in line) + "\n")


def print_json(document: object, *, indent: int | None = 2) -> None:
    """Print a JSON value on several lines, or on one without `indent`."""
    # JSON has no escapes such as \xe9, with which stdout writes what its encoding lacks.
    is_utf8 = (sys.stdout.encoding or "").lower() in ("utf-8", "utf8")
    text = json.dumps(document, indent=indent, ensure_ascii=not is_utf8)
    sys.stdout.write(_ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def printed(text: str) -> str:
    """The text as one line without control characters."""
    if text.isprintable():
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if quoted.isprintable() else json.dumps(text)


def without_controls(text: str) -> str:
    """The text on its lines, with a sign in the place of each other character that a terminal would obey."""
    return _OBEYED.sub("\ufffd", text)


def age(started_at: float) -> str:
    """How long ago a time in Unix seconds was, in the largest unit of which it has two."""
    seconds = time.time() - started_at
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def this_command(program: str = PROGRAM, *, anywhere: bool = False) -> str:
    """A program of this environment, by its name if it is on the PATH, or else by its path.

    For a shell in this folder, or `anywhere` on this machine.
    """
    path = Path(sys.executable).with_name(program)
    found = shutil.which(program)
    is_found = found is not None and Path(found).absolute() == path
    return program if is_found else shell_path(path, anywhere=anywhere)


def shell_path(path: Path, *, anywhere: bool = False) -> str:
    """A path for a shell in this folder, or `anywhere`, as short as it can be written."""
    if not anywhere and path.is_relative_to(Path.cwd()):
        return shlex.quote(str(path.relative_to(Path.cwd())))
    if path.is_relative_to(Path.home()):
        return f"~/{shlex.quote(str(path.relative_to(Path.home())))}"
    return shlex.quote(str(path))
