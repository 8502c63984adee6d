"""`show`: list the episodes of a state folder, or show an episode. It works without a running server.

An episode is named by its public id. Handles are capabilities: they are printed only if they are asked for.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, cast

from cyclopts import Parameter

from decathlon_mcp.cli.options import Flag, Handles, LabelFilter, StateFolder
from decathlon_mcp.cli.output import age, print_json, print_table, printed
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, UnknownEpisodeError
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import CallEntry, EpisodeQuery, EpisodeSummary, NoteEntry
from decathlon_mcp.settings import default_state
from decathlon_mcp.storage.lock import check_state_folder, running_servers
from decathlon_mcp.storage.store import ENDED, EpisodeRow, SandboxRow, Store
from decathlon_mcp.types import HANDLE, JsonObject, public_id


def show(
    name: Annotated[str | None, Parameter(name="EPISODE")] = None,
    /,
    *,
    run: Annotated[str | None, Parameter(metavar="RUN")] = None,
    label: LabelFilter = (),
    task: Annotated[str | None, Parameter(metavar="ID")] = None,
    failed: Flag = False,
    all: Flag = False,  # noqa: A002
    json: Flag = False,
    handles: Handles = False,
    state: StateFolder = None,
) -> int:
    """List episodes, or show everything that is kept of one.

    Without a filter, the list has the live episodes and the last that finished.

    Parameters
    ----------
    name
        The episode's public id, the beginning of its public id, or its handle.
    run
        List every episode of this run.
    task
        List every episode of this task.
    failed
        List every episode that finished without success or is lost.
    all
        List every episode that is kept, also finished replays and branches.
    json
        Print one JSON object; of a list `{"episodes": [...]}`.
    """
    folder = state or default_state()
    query = EpisodeQuery(run=run, labels=parse_labels(label), task=task, failed=failed or None)
    if name is None:
        return list_episodes(folder, query, every=all, as_json=json, handles=handles)
    if all or query != EpisodeQuery():
        raise BadRequestError("EPISODE shows one episode, filters list several: give one of the two")
    return show_episode(folder, name, as_json=json, handles=handles)


HANDLE_CHARACTERS = 12
RECENTLY_FINISHED = 20
"""Finished episodes that are listed without `--all` and without a filter."""
LAST_CALLS = 5
MAX_TEXT_CHARACTERS = 2_000
"""Longest text of a value that `show` prints on a terminal."""
_SECRET = re.compile(r"token|secret|password|credential|session|key", re.IGNORECASE)
"""Names of members whose values are not shown: the id of a session gives access to it."""
_HEADINGS = ("episode", "task", "run", "phase", "token", "age", "calls", "result", "server pid")


def list_episodes(state: Path, query: EpisodeQuery, *, every: bool, as_json: bool, handles: bool) -> int:
    """Print episodes on stdout, live episodes first: a table, tab-separated lines in a pipe, or JSON.

    Only the last RECENTLY_FINISHED finished episodes, unless `every` is set or the query has a filter;
    replays and branches only with `every`. Raises SettingsError.
    """
    check_state_folder(state)
    history = EpisodeHistory([state])
    is_whole = every or query != EpisodeQuery()
    with Store.open_read_only(state) as store:
        if store is None:
            report(f"no server has kept episodes in {state}")
        known = store.query("SELECT public_id, id FROM episodes") if store is not None and handles else ()
    of = dict[str, str](known)
    processes = running_servers(state)
    finished = replace(query, live=False, with_branches=every)
    summaries = [
        *history.all_episodes(replace(query, live=True, with_branches=True)),
        *(
            history.all_episodes(finished)
            if is_whole
            else history.episodes(finished, limit=RECENTLY_FINISHED).items
        ),
    ]
    if not summaries and store is not None:
        report(f"no episode in {state} fits" if is_whole else f"no episode is kept in {state}")
    if as_json:
        print_json({"episodes": [_summary(one, processes, of) for one in summaries]})
    else:
        print_table(_HEADINGS, (_cells(one, processes, of) for one in summaries))
    return 0


def show_episode(state: Path, name: str, *, as_json: bool, handles: bool) -> int:
    """Print everything about one episode. `name`: the beginning of its public id, or its handle.

    Raises SettingsError; UnknownEpisodeError if there is none, or more than one.
    """
    check_state_folder(state)
    with Store.open_read_only(state) as store:
        row = find_row(store, state, name)
        assert store is not None
        details = _details(row, store.find(SandboxRow, episode=row.id), state)
    if not handles:

        def shortened(_: str, text: str) -> str:
            for handle in (row.id, row.agent_id):
                text = text.replace(handle, f"{handle[:HANDLE_CHARACTERS]}…")
            return text if as_json or len(text) <= MAX_TEXT_CHARACTERS else f"{text[:MAX_TEXT_CHARACTERS]}…"

        details = cast("JsonObject", _mapped(details, shortened))
    if as_json:
        print_json(details)
        return 0
    for member, value in details.items():
        for line in _lines(member, value):
            sys.stdout.write(line + "\n")
    return 0


def find_row(store: Store | None, state: Path, name: str) -> EpisodeRow:
    """The episode with this handle, or whose public id begins so. Raises UnknownEpisodeError."""
    prefix = public_id(name) if HANDLE.fullmatch(name) else name
    rows = [] if store is None else store.find_episodes(prefix, 2)
    if len(rows) == 1:
        return rows[0]
    shown = printed(repr(prefix[:HANDLE_CHARACTERS]))
    if rows:
        raise UnknownEpisodeError(f"more than one episode begins with {shown} in {state}")
    raise UnknownEpisodeError(f"there is no episode that begins with {shown} in {state}")


def _summary(episode: EpisodeSummary, processes: Mapping[str, int], handles: Mapping[str, str]) -> JsonObject:
    handle = handles.get(episode.public_id)
    return {
        "id": episode.public_id,
        **({} if handle is None else {"handle": handle}),
        "suite": episode.suite,
        "task": episode.task,
        "labels": dict(episode.labels),
        "derived": episode.is_derived,
        "phase": episode.phase,
        "token": episode.owner,
        "started_at": episode.started_at,
        "age_seconds": round(time.time() - episode.started_at, 1),
        "calls": episode.calls,
        "turns": episode.turns,
        "status": episode.status,
        "success": episode.success,
        "reward": episode.reward,
        "ending": episode.ending,
        "lost": episode.reason,
        "cause": episode.cause,
        "server": {"name": episode.server, "pid": processes.get(episode.server)},
    }


def _cells(episode: EpisodeSummary, processes: Mapping[str, int], handles: Mapping[str, str]) -> list[str]:
    """The cells under _HEADINGS."""
    pid = processes.get(episode.server)
    server = "" if episode.phase == ENDED else "none" if pid is None else str(pid)
    reward = episode.reward
    return [
        handles.get(episode.public_id, episode.public_id),
        episode.task,
        episode.run or "",
        episode.phase,
        episode.owner or "",
        age(episode.started_at),
        "" if episode.calls is None else str(episode.calls),
        episode.reason or episode.ending or "" if reward is None else f"reward {reward:g}",
        server,
    ]


def _details(row: EpisodeRow, sandboxes: list[SandboxRow], state: Path) -> JsonObject:
    """Everything about one episode, without secrets other than its handles."""
    folder, history = state / "episodes" / row.id, EpisodeHistory([state])
    details = history.episode(row.public_id)
    assert details is not None, "its row was just read"
    summary = _summary(details.summary, running_servers(state), {row.public_id: row.id})
    summary["started"] = _time(row.started_at)
    if details.summary.ended_at is not None:
        summary["ended"] = _time(details.summary.ended_at)
    verdict = details.verdict or {}
    answer = details.answer
    entries = history.calls(row.public_id, details.calls - LAST_CALLS + 1, details.calls)
    return {
        **summary,
        "calls": details.calls if details.summary.has_files else details.summary.calls,
        # Why it has its reward, before all else.
        "claim": None if details.claim is None else {**details.claim, "answer": answer and answer.raw},
        "evaluator_output": verdict.get("evaluator_output"),
        "detail": verdict.get("detail"),
        # What the client has reported with notes.
        "usage": dict(history.usage(row.public_id).numbers),
        "agent_id": row.agent_id,
        "spec": _without_secrets(row.spec),
        "progress": _without_secrets(row.progress),
        "sandboxes": [_without_secrets(asdict(sandbox)) for sandbox in sandboxes],
        "last_calls": [_call(entry) for entry in entries if isinstance(entry, CallEntry)],
        # Among the last calls: tools that a task's server has changed.
        "server_notes": [
            f"after {entry.calls} calls: {entry.text.raw}"
            for entry in entries
            if isinstance(entry, NoteEntry) and entry.role == "server"
        ],
        "verdict": row.verdict,
        "folder": str(folder),
        "files": _files(folder),
    }


def _call(call: CallEntry) -> JsonObject:
    """A call's number and tool, and its time and outcome if it has a reply."""
    outcome = {} if call.seconds is None else {"seconds": call.seconds, "failed": call.failed}
    return {"seq": call.seq, "name": call.name, **outcome}


def _time(unix_seconds: float) -> str:
    return datetime.fromtimestamp(unix_seconds, UTC).isoformat(timespec="seconds")


def _mapped(value: object, change: Callable[[str, str], str], name: str = "") -> Any:
    """The value with all its texts changed. `change`: of the name of the text's member, and of the text."""
    if isinstance(value, str):
        return change(name, value)
    if isinstance(value, dict):
        members = cast("JsonObject", value).items()
        return {inner: _mapped(member, change, inner) for inner, member in members}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in cast("list[object]", value)]
    return value


def _without_secrets(value: object) -> Any:
    return _mapped(value, lambda name, text: "…" if _SECRET.search(name) else text)


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
    return printed(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))


def _files(folder: Path) -> list[str]:
    try:
        return [f"{file.name} ({file.stat().st_size} bytes)" for file in sorted(folder.iterdir())]
    except OSError:
        return []
