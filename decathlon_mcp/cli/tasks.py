"""`tasks`: what there is, for people, for pipes, for programs. Needs no engine."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decathlon_mcp.app import read_catalogue
from decathlon_mcp.catalogue.draws import Draw, TaskSampler, filter_tasks
from decathlon_mcp.catalogue.listing import list_tasks
from decathlon_mcp.settings import Settings
from decathlon_mcp.types import JsonObject


def show(settings: Settings, wanted: Draw, *, sample: int | None, as_json: bool) -> int:
    """Print the tasks on stdout: a table on a terminal, in a pipe a line each with tabs, or JSON.

    Raises SuiteError, SettingsError, BadRequestError.
    """
    catalogue = read_catalogue(settings)
    if sample is None:
        names = [name for name, _, _ in filter_tasks(catalogue, wanted)]
    else:
        names = TaskSampler(catalogue).take(wanted, count=sample)
    found = list_tasks(catalogue, names)
    if as_json:
        sys.stdout.write(json.dumps({"tasks": found}, indent=2, ensure_ascii=False) + "\n")
    elif sys.stdout.isatty():
        _table(found)
    else:
        for task in found:
            sys.stdout.write("\t".join(_cells(task)) + "\n")
    return 0


def _cells(task: JsonObject) -> list[str]:
    """Id, suite, splits, servers and tools, why it cannot run."""
    tools = [*task["servers"], *(f"local:{tool}" for tool in task["local_tools"])]
    needs = [*tools, *(["network"] if task["network"] else [])]
    status = "runs here" if task["runnable"] else "; ".join(task["missing"])
    return [task["id"], task["suite"], ",".join(task["splits"]), ",".join(needs), status]


def _table(found: list[JsonObject]) -> None:
    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("task", "suite", "splits", "needs", ""):
        table.add_column(heading, overflow="fold", no_wrap=heading == "task")
    for task in found:
        *cells, status = _cells(task)
        mark = "[green]runs here[/]" if task["runnable"] else f"[red]cannot run here[/]: {escape(status)}"
        table.add_row(*(escape(cell.replace(",", ", ")) for cell in cells), mark)
    console.print(table)
    runnable = sum(task["runnable"] for task in found)
    console.print(f"\n{len(found)} tasks, {runnable} can run here", highlight=False)
