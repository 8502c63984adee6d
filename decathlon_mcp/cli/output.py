"""What commands print on stdout: a table on a terminal, tab-separated lines in a pipe, or JSON."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterable, Sequence

_ESCAPED = re.compile("[\x7f-\x9f\ud800-\udfff]")
"""Control characters that JSON allows and a terminal obeys; lone surrogates, which UTF-8 does not have."""


def print_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print lines of cells, of which the first is a name; without the headings in a pipe."""
    if not sys.stdout.isatty():
        print_lines(lines)
        return
    # Imported late: most commands print no table.
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=column == 0)
    for line in lines:
        table.add_row(*(escape(printed(cell)) for cell in line))
    Console().print(table)


def print_lines(lines: Iterable[Sequence[object]]) -> None:
    """Print lines of cells, with a tab between two.

    Control characters are escaped: clients and sandboxes may have written the texts.
    """
    for line in lines:
        sys.stdout.write("\t".join(printed(str(cell)) for cell in line) + "\n")


def print_json(document: object, *, indent: int | None = 2) -> None:
    """Print a JSON value on several lines, or on one without `indent`."""
    text = json.dumps(document, indent=indent, ensure_ascii=False)
    sys.stdout.write(_ESCAPED.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def printed(text: str) -> str:
    """The text as one line without control characters."""
    if text.isprintable():
        return text
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted if quoted.isprintable() else json.dumps(text)


def age(started_at: float) -> str:
    """How long ago a time in Unix seconds was, in the largest unit of which it has two."""
    seconds = time.time() - started_at
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
