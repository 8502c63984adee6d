"""Prints lists on stdout: a table on a terminal, tab-separated lines in a pipe, or JSON."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table


def print_table(headings: Sequence[str], lines: Iterable[Sequence[str]]) -> None:
    """Print lines of cells, of which the first is a name; without the headings in a pipe.

    Control characters are escaped: clients and sandboxes may have written the texts.
    """
    printable = [[printed(cell) for cell in line] for line in lines]
    if not sys.stdout.isatty():
        for line in printable:
            sys.stdout.write("\t".join(line) + "\n")
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=column == 0)
    for line in printable:
        table.add_row(*map(escape, line))
    Console().print(table)


def print_json(document: Any) -> None:
    """Print a JSON value on several lines."""
    # UTF-8 has no lone surrogates; Python's escape for them is also JSON's.
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))


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
