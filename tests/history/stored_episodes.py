"""State folders as servers leave them: rows of the store, and trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decathlon_mcp.storage.store import EpisodeRow, Store
from decathlon_mcp.types import JsonObject, as_json_with_raw, public_id

NOW = 1_790_000_000.0
LAUNCH_TIME = "2026-01-01T00:00:00+00:00"
LOST, LIVE = None, "live"
"""Instead of a reward."""


@dataclass
class Call:
    """One call. `reply`: the result, or its text; None if there is none yet. `after`: the call before."""

    name: str = "files__read_file"
    arguments: Any = field(default_factory=lambda: {"path": "/workspace/report.csv"})
    reply: Any = "name,amount\nAda,12\n"
    failed: bool = False
    seconds: float = 0.04
    after: float = 1.5
    replayed: bool = False


@dataclass
class Note:
    text: str
    role: str = "assistant"
    usage: Mapping[str, float] | None = None


ONE_CALL = (Call(),)


def episode_row(name: str = "one", **fields: Any) -> EpisodeRow:
    """The row of an episode that waits; `fields` are what differs."""
    values: dict[str, Any] = {
        "id": name,
        "agent_id": f"{name}-agent",
        "server": "",
        "suite": "s",
        "task": "t",
        "phase": "queued",
        "started_at": 1.0,
        "spec": {"launch_time": LAUNCH_TIME},
        "progress": {},
    }
    return EpisodeRow(**{**values, **fields})


class Folder:
    """A state folder that is written episode by episode."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self._stack = ExitStack()
        self._store = self._stack.enter_context(Store.open(state, "server"))

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def add(
        self,
        handle: str,
        *,
        task: str = "tune-reactor",
        suite: str = "starter",
        labels: Mapping[str, str] | None = None,
        token: str | None = None,
        reward: float | str | None = 1.0,
        success: bool | None = None,
        ending: str | None = None,
        started_at: float = NOW,
        entries: Sequence[Call | Note] | None = ONE_CALL,
        calls: int | None = None,
        verdict: Mapping[str, Any] | None = None,
        prompt: str = "Tune the reactor in reactor.toml so that its output is stable.",
        branch: JsonObject | None = None,
        answer: str | None = None,
    ) -> str:
        """Write an episode as a server does; its public id. `reward`: or LOST, or LIVE.

        `entries`: of its trajectory; None for no trajectory. `branch`: of what, and where. `answer`: the
        text of the agent's claim; None without a claim.
        """
        name, live, lost = public_id(handle), reward == LIVE, reward is LOST
        if calls is None:
            calls = sum(isinstance(entry, Call) for entry in entries or ())
        where = {"suite": suite, "task": task}
        origin = {"branch": branch} if branch else {}
        facts: JsonObject = {"branch": (verdict or {}).get("branch") or {}}
        row = episode_row(
            handle,
            **where,
            labels=labels or {},
            token=token,
            phase="ready" if live else "queued",
            started_at=started_at,
            spec={"launch_time": LAUNCH_TIME, **origin},
            progress={"ready_at": "2026-01-01T00:00:09Z", "facts": facts},
        )
        self._store.insert_episode(row)
        if not live:
            scored = {"reward": reward, "success": reward == 1 if success is None else success}
            written: dict[str, Any] = {
                "version": 1,
                "episode": name,
                **where,
                "status": "evaluator_error" if lost else "scored",
                "metrics": {"calls": calls, "failed_calls": 0, "turns": 3.0},
                **({} if lost else scored),
                **(verdict or {}),
            }
            self._store.update_episode(handle, verdict=written)
            ending = ending or ("its evaluation gave no verdict" if lost else "scored")
            self._store.end_episode(handle, ending, calls=calls)
            # The store takes the time of the clock.
            self._store.write(("UPDATE episodes SET ended_at = ? WHERE id = ?", (started_at + 42, handle)))
        if entries is None:
            return name
        lines: list[JsonObject] = [
            {
                "event": "start",
                "time": started_at,
                "version": 1,
                **where,
                "labels": dict(labels or {}),
                **origin,
                "launch_time": LAUNCH_TIME,
                "provider": "host",
                "isolation": "namespaces",
            },
            {
                "event": "ready",
                "time": started_at,
                "prompt": {"system": None, "task": prompt},
                "tools": "0" * 64,
            },
            *lines_of(entries, started_at),
        ]
        if answer is not None:
            claim = {"event": "claim", "time": started_at + 40, "by_agent": True, "answer": answer}
            lines.append({**claim, "truncated": False, "turns": None})
        folder = self.state / "episodes" / handle
        folder.mkdir(parents=True)
        with (folder / "trajectory.jsonl").open("wb") as file:
            file.writelines(as_json_with_raw(line) + b"\n" for line in lines)
        return name


def add_episode(state: Path, name: str, **values: Any) -> str:
    """Write an episode without a trajectory; see `Folder.add`."""
    values = {"task": "task", "suite": "s", "started_at": 1.0, "entries": None, "calls": 2, **values}
    with Folder(state) as folder:
        return folder.add(name, **values)


def add_run(state: Path, run: str, rewards: Mapping[str, list[float | str | None]]) -> None:
    for task, results in rewards.items():
        for number, reward in enumerate(results):
            add_episode(state, f"{run}-{task}-{number}", reward=reward, task=task, labels={"run": run})


def append(state: Path, handle: str, entries: Iterable[Call | Note], *, before: int) -> None:
    """Write what follows so many calls of an episode that plays."""
    with (state / "episodes" / handle / "trajectory.jsonl").open("ab") as file:
        file.writelines(as_json_with_raw(line) + b"\n" for line in lines_of(entries, NOW, before))


def lines_of(entries: Iterable[Call | Note], started_at: float, seq: int = 0) -> Iterable[JsonObject]:
    """The lines of a trajectory, after so many calls."""
    time = started_at + 4
    for entry in entries:
        if isinstance(entry, Note):
            line = {"event": "note", "time": time, "calls": seq, "role": entry.role, "text": entry.text}
            yield {**line, **({"usage": dict(entry.usage)} if entry.usage else {})}
            continue
        seq, time = seq + 1, time + entry.after
        server, _, tool = entry.name.partition("__")
        yield {
            "event": "call",
            "time": time,
            "server": server,
            "tool": tool,
            "request": seq,
            "seq": seq,
            **({"replayed": True} if entry.replayed else {}),
            "name": entry.name,
            "arguments": entry.arguments,
            "digest": "",
            "started_at": time,
        }
        if entry.reply is not None:
            result = entry.reply
            if isinstance(result, str):
                result = {"content": [{"type": "text", "text": result}], "isError": entry.failed}
            reply = {"event": "reply", "time": time + entry.seconds, "seq": seq, "failed": entry.failed}
            yield {**reply, "seconds": entry.seconds, "result": result}
