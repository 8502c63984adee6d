"""State folders as servers leave them: rows of the store, and trajectories."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from decathlon_mcp.storage.store import Store
from decathlon_mcp.types import JsonObject, as_json_with_raw, public_id
from tests.history.stored_episodes import episode_row

NOW = 1_790_000_000.0


@dataclass
class Call:
    """One call. `reply`: the result, or its text; None if there is none yet."""

    name: str = "files__read_file"
    arguments: Any = field(default_factory=lambda: {"path": "/workspace/report.csv"})
    reply: Any = "name,amount\nAda,12\n"
    failed: bool = False
    seconds: float = 0.04
    after: float = 1.5
    """Seconds since the call before."""
    replayed: bool = False


@dataclass
class Note:
    text: str
    role: str = "assistant"
    usage: Mapping[str, float] = field(default_factory=dict[str, float])


def result(text: str, *, is_error: bool = False) -> JsonObject:
    return {"content": [{"type": "text", "text": text}], "isError": is_error}


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
        reward: float | None = 1.0,
        success: bool | None = None,
        live: bool = False,
        ending: str = "scored",
        started_at: float = NOW,
        seconds: float = 42.0,
        entries: Sequence[Call | Note] | None = None,
        verdict: Mapping[str, Any] | None = None,
        prompt: str = "Tune the reactor in reactor.toml so that its output is stable.",
        branch: JsonObject | None = None,
        answer: str | None = None,
    ) -> str:
        """Write an episode; its public id. `reward`: None if it was lost. `branch`: of what, and where.

        `answer`: what the agent said with its claim; None: it claimed nothing.
        """
        entries = [Call()] if entries is None else entries
        calls = sum(isinstance(entry, Call) for entry in entries)
        name = public_id(handle)
        self._store.insert_episode(
            episode_row(
                handle,
                agent_id=f"agent-{handle}",
                suite=suite,
                task=task,
                token=token,
                phase="ready" if live else "queued",
                started_at=started_at,
                spec={"launch_time": "2026-01-01T00:00:00+00:00", **({"branch": branch} if branch else {})},
                progress={
                    "ready_at": "2026-01-01T00:00:09Z",
                    "facts": {"branch": (verdict or {}).get("branch") or {}},
                },
                labels=labels or {},
            )
        )
        if not live:
            written: dict[str, Any] = {
                "version": 1,
                "episode": name,
                "task": task,
                "suite": suite,
                "status": "evaluator_error" if reward is None else "scored",
                "metrics": {"calls": calls, "failed_calls": 0},
                **(
                    {}
                    if reward is None
                    else {"reward": reward, "success": success if success is not None else reward == 1}
                ),
                **(verdict or {}),
            }
            self._store.update_episode(handle, verdict=written)
            self._store.end_episode(handle, ending, calls=calls)
            # The store takes the time of the clock.
            self._store._connection.execute(  # pyright: ignore[reportPrivateUsage]
                "UPDATE episodes SET ended_at = ? WHERE id = ?", (started_at + seconds, handle)
            )
        folder = self.state / "episodes" / handle
        folder.mkdir(parents=True)
        head = {
            "event": "start",
            "version": 1,
            "suite": suite,
            "task": task,
            "labels": dict(labels or {}),
            **({"branch": branch} if branch else {}),
            "launch_time": "2026-01-01T00:00:00+00:00",
            "language": "en",
            "names": "decathlon",
            "policy": "visible",
            "provider": "host",
            "isolation": "namespaces",
            "release": "0.1.0",
            "limits": {"idle_seconds": 1800, "max_calls": 100},
        }
        ready = {
            "event": "ready",
            "prompt": {"system": None, "task": prompt},
            "tools": "0" * 64,
            "suite_revision": "a1b2c3d",
        }
        with (folder / "trajectory.jsonl").open("wb") as file:
            for line in (head, ready, *lines(entries, started_at)):
                event, time = line.pop("event"), line.pop("time", started_at)
                # As a server writes it.
                file.write(as_json_with_raw({"event": event, "time": time, **line}) + b"\n")
            if answer is not None:
                claim = {"event": "claim", "time": started_at + 40, "by_agent": True, "answer": answer}
                file.write(as_json_with_raw({**claim, "truncated": False, "turns": None}) + b"\n")
        return name


def append(state: Path, handle: str, entries: Iterable[Call | Note], *, before: int) -> None:
    """Write what follows so many calls of an episode that plays."""
    with (state / "episodes" / handle / "trajectory.jsonl").open("ab") as file:
        for line in lines(entries, NOW, before):
            file.write(as_json_with_raw(line) + b"\n")


def lines(entries: Iterable[Call | Note], started_at: float, before: int = 0) -> Iterable[JsonObject]:
    """The lines of a trajectory, after so many calls."""
    seq, time = before, started_at + 4
    for entry in entries:
        if isinstance(entry, Note):
            yield {
                "event": "note",
                "time": time,
                "calls": seq,
                "role": entry.role,
                "text": entry.text,
                **({"usage": dict(entry.usage)} if entry.usage else {}),
            }
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
        if entry.reply is None:
            continue
        reply = result(entry.reply, is_error=entry.failed) if isinstance(entry.reply, str) else entry.reply
        yield {
            "event": "reply",
            "time": time + entry.seconds,
            "seq": seq,
            "failed": entry.failed,
            "seconds": entry.seconds,
            "result": reply,
        }
