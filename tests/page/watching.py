"""What the tests in a browser look at: runs, a long episode, and live episodes that the test changes."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from decathlon_mcp.plugins.page.live import LiveEpisode, LiveFeed, Snapshot
from tests.page.samples import NOW, Call, Folder, Note
from tests.page.sites import KEY

TASKS = ("audit-expenses", "explain-outage", "recount-ballots", "tune-reactor")
LONG_CALLS = 3_000


@dataclass
class ChangingServer:
    """A live server whose episodes a test sets."""

    episodes: tuple[LiveEpisode, ...] = ()
    stopping: bool = False
    feed: LiveFeed = field(init=False)

    def __post_init__(self) -> None:
        self.feed = LiveFeed(self.snapshot, lambda: self.stopping)

    def snapshot(self) -> Snapshot:
        return Snapshot(
            episodes=self.episodes, state="ready", queued=1, sandboxes=len(self.episodes), places=64
        )


@dataclass(frozen=True)
class Watched:
    """A page. `long`: the id of an episode with LONG_CALLS calls."""

    url: str
    state: Path
    server: ChangingServer

    @property
    def entrance(self) -> str:
        return f"{self.url}/#key={KEY}"


def live_episode(
    number: int, calls: int = 0, phase: str = "ready", *, replies: int | None = None
) -> LiveEpisode:
    return LiveEpisode(
        public_id=f"{number:016x}",
        task=TASKS[number % len(TASKS)],
        suite="starter",
        run="sft-0042",
        model="qwen3-32b",
        owner=None,
        phase=phase,
        calls=calls,
        replies=calls if replies is None else replies,
        started_at=NOW + number,
        waiting_for="a free place" if phase == "queued" else None,
    )


LONG_HANDLE, SHORT_HANDLE, OTHER_HANDLE, LIVE_HANDLE = "a" * 48, "b" * 48, "c" * 48, "d" * 48


def fill(state: Path, server: ChangingServer) -> None:
    """Two runs, one with steps; two episodes to compare; a long one."""
    chance = random.Random(4)
    weights = {"found": 3, "exact": 2, "total": 1}
    verdict = {
        "metrics": {"found": 1.0, "exact": 1.0, "total": 0.0, "calls": 4, "turns": 3},
        "weights": weights,
        "evaluator_output": "totals.json is missing\nFAIL: total is 0.00 of 1.00\n",
    }
    number = 0
    with Folder(state) as folder:
        for run, steps in (("baseline", [None]), ("sft-0042", [0, 10, 20, 30])):
            for step in steps:
                for task in TASKS:
                    for attempt in range(3):
                        number += 1
                        reward = chance.choice([None, 0.0, 0.25, 0.625, 1.0, 1.0])
                        labels = {"run": run, "attempt": str(attempt + 1), "model": "qwen3-32b"}
                        if step is not None:
                            labels["step"] = str(step)
                        folder.add(
                            f"{number:048x}", task=task, labels=labels, reward=reward,
                            started_at=NOW - 90_000 + 60 * number, entries=[Call()] * 3,
                            ending="scored" if reward is not None else "its sandbox was lost",
                        )  # fmt: skip
        command = {
            "command": "python - <<'EOF'\nimport csv\nprint(len(list(csv.reader(open('trips.csv')))))\nEOF"
        }
        entries = [
            Note("I look at what is in the workspace first."),
            Call("files__list_directory", {"path": "."}, "expenses.csv 2082\npolicy.md 957\n"),
            Call("shell__run", command, "41\n", seconds=1.2),
            Call("files__read_file", {"path": "totals.json"}, "no such file", failed=True),
            Call("files__read_file", {"path": "expenses.csv"}, "Ada,12.50,approved\n" * 200),
        ]
        folder.add(
            SHORT_HANDLE, task="audit-expenses", labels={"run": "sft-0042", "attempt": "4"}, reward=0.625,
            success=False, entries=entries, started_at=NOW - 600, verdict=verdict,
        )  # fmt: skip
        folder.add(
            OTHER_HANDLE,
            task="audit-expenses",
            labels={"run": "baseline"},
            entries=entries[:2],
            started_at=NOW - 700,
        )
        folder.add(
            LIVE_HANDLE,
            live=True,
            labels={"run": "playing"},
            entries=[Call(reply="row\n" * 60), Note("Next."), Call(reply=None), Note("It takes long.")],
        )
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
                branch = {"episode": below, "at": 7}
                folder.add(f"e{number}{attempt}" * 16, branch=branch, labels={"run": "search"}, live=at == 0)
        folder.add(
            LONG_HANDLE, task="explain-outage", labels={"run": "long"}, entries=calls, started_at=NOW - 5_000
        )
    server.episodes = tuple(live_episode(each, phase="queued" if each == 2 else "ready") for each in range(3))
