"""`episodes` and `show`: what a state folder knows about its episodes. Both work without a running server.

Handles are capabilities: only their first characters are printed, unless all of them are asked for.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from decathlon_mcp.errors import UnknownEpisodeError
from decathlon_mcp.storage.instance import check_state_folder, server_processes
from decathlon_mcp.storage.store import ENDED, EpisodeRow, SandboxRow, Store
from decathlon_mcp.types import JsonObject, as_object

HANDLE_CHARACTERS = 12
RECENTLY_ENDED = 20
"""Ended episodes that are listed without `--all`."""
MAX_ENDED = 100_000
"""Ended episodes that are listed with `--all`."""
LAST_CALLS = 5
TAIL_BYTES = 1 << 20
"""Part of a trajectory, at its end, in which the last calls are looked for."""
MAX_TEXT_CHARACTERS = 2_000
"""Longest text of a value that `show` prints on a terminal."""
_CALL = b'"event":"call"'
_SECRET = re.compile(r"token|secret|password|credential|session|key", re.IGNORECASE)
"""Names of members whose values are not shown: the id of a session gives access to it."""


def list_episodes(state: Path, *, every: bool, as_json: bool, handles: bool) -> int:
    """Print the episodes on stdout: a table on a terminal, tab-separated lines in a pipe, or JSON.

    The live ones, and `every` one or the last RECENTLY_ENDED that ended. Raises SettingsError.
    """
    check_state_folder(state)
    with Store.open_read_only(state) as store:
        if store is None:
            sys.stderr.write(f"decathlon-mcp: no server has kept episodes in {state}\n")
            rows = list[EpisodeRow]()
        else:
            ended = store.ended_episodes(MAX_ENDED if every else RECENTLY_ENDED)
            rows = [*store.unfinished_episodes(), *ended]
    processes = server_processes(state)
    if as_json:
        _print_json({"episodes": [_summary(row, state, processes) for row in rows]})
        return 0
    cells = [_cells(_summary(row, state, processes), handles) for row in rows]
    if sys.stdout.isatty():
        _print_table(cells)
    else:
        for line in cells:
            sys.stdout.write("\t".join(line) + "\n")
    return 0


def show_episode(state: Path, prefix: str, *, as_json: bool, handles: bool) -> int:
    """Print everything about the episode whose handle begins with `prefix`.

    Raises SettingsError; UnknownEpisodeError if there is none, or more than one.
    """
    check_state_folder(state)
    with Store.open_read_only(state) as store:
        rows = [] if store is None else store.find_episodes(prefix, 2)
        if len(rows) != 1:
            shown = repr(prefix[:HANDLE_CHARACTERS])
            if rows:
                raise UnknownEpisodeError(f"more than one episode begins with {shown} in {state}")
            raise UnknownEpisodeError(f"there is no episode that begins with {shown} in {state}")
        assert store is not None
        details = _details(rows[0], store.sandboxes(rows[0].id), state)
    if as_json:
        _print_json(details)
        return 0
    if not handles:
        details = cast("JsonObject", _shorten(details, (rows[0].id, rows[0].agent_id)))
    for name, value in details.items():
        for line in _lines(name, value):
            sys.stdout.write(line + "\n")
    return 0


def _summary(row: EpisodeRow, state: Path, processes: dict[str, int | None]) -> JsonObject:
    return {
        "id": row.id,
        "suite": row.suite,
        "task": row.task,
        "phase": row.phase,
        "token": row.token,
        "age_seconds": round(time.time() - row.started_at, 1),
        "calls": _count_calls(state / "episodes" / row.id),
        "reward": (row.verdict or {}).get("reward"),
        "ending": row.ending,
        "server": {"name": row.server, "pid": processes.get(row.server)},
    }


def _cells(summary: JsonObject, handles: bool) -> list[str]:
    """Return id, task, phase, token, age, calls, reward or ending, and the server's process."""
    pid = summary["server"]["pid"]
    server = "" if summary["phase"] == ENDED else "none" if pid is None else str(pid)
    reward = summary["reward"]
    return [
        str(summary["id"]) if handles else str(summary["id"])[:HANDLE_CHARACTERS],
        str(summary["task"]),
        str(summary["phase"]),
        str(summary["token"] or ""),
        _age(summary["age_seconds"]),
        "" if summary["calls"] is None else str(summary["calls"]),
        f"reward {reward:g}" if isinstance(reward, (int, float)) else str(summary["ending"] or ""),
        server,
    ]


def _print_table(lines: list[list[str]]) -> None:
    console = Console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("episode", "task", "phase", "token", "age", "calls", "result", "server pid"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "episode")
    for line in lines:
        table.add_row(*map(escape, line))
    console.print(table)


def _age(seconds: float) -> str:
    for unit, length in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _details(row: EpisodeRow, sandboxes: list[SandboxRow], state: Path) -> JsonObject:
    """Everything about one episode, without secrets other than its handles."""
    folder = state / "episodes" / row.id
    summary = _summary(row, state, server_processes(state))
    summary["started"] = _time(row.started_at)
    if row.ended_at is not None:
        summary["ended"] = _time(row.ended_at)
    return {
        **summary,
        "agent_id": row.agent_id,
        "spec": _without_secrets(row.spec),
        "progress": _without_secrets(row.progress),
        "sandboxes": [_without_secrets(asdict(sandbox)) for sandbox in sandboxes],
        "last_calls": _last_calls(folder),
        "verdict": row.verdict,
        "folder": str(folder),
        "files": _files(folder),
    }


def _time(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="seconds")


def _without_secrets(value: object) -> Any:
    if isinstance(value, dict):
        members = cast("JsonObject", value)
        return {
            name: "…" if _SECRET.search(name) and isinstance(member, str) else _without_secrets(member)
            for name, member in members.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_secrets(item) for item in cast("list[object]", value)]
    return value


def _shorten(value: object, handles: tuple[str, ...]) -> Any:
    """The value with the handles in its texts shortened, and long texts cut."""
    if isinstance(value, dict):
        return {name: _shorten(member, handles) for name, member in cast("JsonObject", value).items()}
    if isinstance(value, list):
        return [_shorten(item, handles) for item in cast("list[object]", value)]
    if not isinstance(value, str):
        return value
    for handle in handles:
        value = value.replace(handle, f"{handle[:HANDLE_CHARACTERS]}…")
    return value if len(value) <= MAX_TEXT_CHARACTERS else f"{value[:MAX_TEXT_CHARACTERS]}…"


def _lines(name: str, value: object, indent: str = "") -> Iterator[str]:
    """The lines of one member: nested members are indented, and a list has a line for each item."""
    if value in (None, {}, []):
        return
    if isinstance(value, dict):
        yield f"{indent}{name}:"
        for inner, member in cast("JsonObject", value).items():
            yield from _lines(inner, member, f"{indent}  ")
    elif isinstance(value, list):
        yield f"{indent}{name}:"
        for item in cast("list[object]", value):
            yield f"{indent}  {_line(item)}"
    else:
        yield f"{indent}{name}: {_line(value)}"


def _line(value: object) -> str:
    """The value as one line without control characters: a sandbox may have written it."""
    if isinstance(value, str) and value.isprintable():
        return value
    text = json.dumps(value, ensure_ascii=False)
    return text if text.isprintable() else json.dumps(value)


def _count_calls(folder: Path) -> int | None:
    """Number of calls in an episode's trajectory; None if there is no trajectory."""
    try:
        with (folder / "trajectory.jsonl").open("rb") as lines:
            # Only the first member is compared: a call's arguments may contain the same text.
            return sum(line[: len(_CALL) + 8].replace(b" ", b"").startswith(b"{" + _CALL) for line in lines)
    except OSError:
        return None


def _last_calls(folder: Path) -> list[JsonObject]:
    """The last calls, each with its number, its tool, and its time and outcome if it has a reply."""
    calls: dict[Any, JsonObject] = {}
    for line in _tail(folder / "trajectory.jsonl"):
        try:
            event = as_object(json.loads(line)) or {}
        except (ValueError, RecursionError):
            continue
        if event.get("event") == "call":
            calls[event.get("seq")] = {"seq": event.get("seq"), "name": event.get("name")}
        elif event.get("event") == "reply" and event.get("seq") in calls:
            calls[event.get("seq")] |= {key: event.get(key) for key in ("seconds", "failed")}
    return list(calls.values())[-LAST_CALLS:]


def _tail(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as stream:
            size_bytes = stream.seek(0, 2)
            stream.seek(max(0, size_bytes - TAIL_BYTES))
            return stream.read(TAIL_BYTES).splitlines()
    except OSError:
        return []


def _files(folder: Path) -> list[str]:
    try:
        return [f"{file.name} ({file.stat().st_size} bytes)" for file in sorted(folder.iterdir())]
    except OSError:
        return []


def _print_json(document: JsonObject) -> None:
    # UTF-8 has no lone surrogates; Python's escape for them is also JSON's.
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    sys.stdout.write(text.encode("utf-8", "backslashreplace").decode("utf-8"))
