"""What the tests in a browser look at: runs, a long episode, and live episodes that the test changes."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from decathlon_mcp.plugins.page.live import LiveEpisode, LiveFeed, Snapshot
from tests.history.stored_episodes import LIVE, LOST, NOW, Call, Folder, Note

TASKS = ("audit-expenses", "explain-outage", "recount-ballots", "tune-reactor")
LONG_CALLS = 3_000


class ChangingServer:
    """A live server whose episodes a test sets."""

    def __init__(self, *episodes: LiveEpisode) -> None:
        self.episodes = episodes
        self.stopping = False
        self.feed = LiveFeed(self.snapshot, lambda: self.stopping)

    def snapshot(self) -> Snapshot:
        count = len(self.episodes)
        return Snapshot(episodes=self.episodes, state="ready", queued=1, sandboxes=count, places=64)


@dataclass(frozen=True)
class Watched:
    """A page and the server that it shows."""

    url: str
    state: Path
    server: ChangingServer


def live_episode(number: int, calls: int = 0, phase: str = "ready", **fields: Any) -> LiveEpisode:
    values: dict[str, Any] = {
        "public_id": f"{number:016x}",
        "task": TASKS[number % len(TASKS)],
        "suite": "starter",
        "run": "sft-0042",
        "model": "qwen3-32b",
        "owner": None,
        "phase": phase,
        "calls": calls,
        "replies": calls,
        "started_at": NOW + number,
        "waiting_for": "a free place" if phase == "queued" else None,
    }
    return LiveEpisode(**{**values, **fields})


LONG_HANDLE, SHORT_HANDLE, OTHER_HANDLE, LIVE_HANDLE = "a" * 48, "b" * 48, "c" * 48, "d" * 48


def fill(state: Path, server: ChangingServer) -> None:
    """Two runs, one with steps; two episodes to compare; a long one."""
    chance = random.Random(4)
    verdict = {
        "metrics": {"found": 1.0, "exact": 1.0, "total": 0.0, "calls": 4, "turns": 3},
        "weights": {"found": 3, "exact": 2, "total": 1},
        "evaluator_output": "totals.json is missing\nFAIL: total is 0.00 of 1.00\n",
    }
    runs: list[dict[str, str]] = [{"run": "baseline"}]
    runs += [{"run": "sft-0042", "step": str(step)} for step in (0, 10, 20, 30)]
    with Folder(state) as folder:
        for number, (run, task, attempt) in enumerate(product(runs, TASKS, "123"), 1):
            folder.add(
                f"{number:048x}",
                task=task,
                labels={**run, "attempt": attempt, "model": "qwen3-32b"},
                reward=chance.choice([LOST, 0.0, 0.25, 0.625, 1.0, 1.0]),
                started_at=NOW - 90_000 + 60 * number,
                entries=[Call()] * 3,
            )
        command = "python - <<'EOF'\nimport csv\nprint(len(list(csv.reader(open('trips.csv')))))\nEOF"
        entries = [
            Note("I look at what is in the workspace first."),
            Call("files__list_directory", {"path": "."}, "expenses.csv 2082\npolicy.md 957\n"),
            Call("shell__run", {"command": command}, "41\n", seconds=1.2),
            Call("files__read_file", {"path": "totals.json"}, "no such file", failed=True),
            Call("files__read_file", {"path": "expenses.csv"}, "Ada,12.50,approved\n" * 200),
        ]
        labels = {"run": "sft-0042", "attempt": "4"}
        audited: dict[str, Any] = {"task": "audit-expenses", "started_at": NOW - 600}
        folder.add(SHORT_HANDLE, **audited, labels=labels, reward=0.625, entries=entries, verdict=verdict)
        folder.add(OTHER_HANDLE, **audited, labels={"run": "baseline"}, entries=entries[:2])
        plays = [Call(reply="row\n" * 60), Note("Next."), Call(reply=None), Note("It takes long.")]
        folder.add(LIVE_HANDLE, reward=LIVE, labels={"run": "playing"}, entries=plays)
        calls = [
            Call(arguments={"path": f"part-{each}.csv"}, reply=f"row {each}\n" * (1 + each % 7), after=0.5)
            for each in range(LONG_CALLS)
        ]
        origin = folder.add("e" * 48, labels={"run": "search"}, reward=0.0)
        for number, at in enumerate((3, 3, 5, 0), 1):
            branch = {"episode": origin, "at": at, "differences": number % 3, "exact": at == 3}
            labels = {"run": "search", "temperature": str(number)}
            below = folder.add(
                f"e{number}" * 24, branch=branch, verdict={"branch": branch}, reward=number / 4, labels=labels
            )
            for attempt in range(2):
                handle, branch = f"e{number}{attempt}" * 16, {"episode": below, "at": 7}
                folder.add(handle, branch=branch, labels={"run": "search"}, reward=1.0 if at else LIVE)
        folder.add(
            LONG_HANDLE, task="explain-outage", labels={"run": "long"}, entries=calls, started_at=NOW - 5_000
        )
    server.episodes = tuple(live_episode(each, phase="queued" if each == 2 else "ready") for each in range(3))
