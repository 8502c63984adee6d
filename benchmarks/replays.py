"""Replays of recorded episodes: which replies differ, by task of the bundled suite and of the benchmark's.

    python -m benchmarks.replays             # plays them again; fails if the result is another one
    python -m benchmarks.replays --write     # writes benchmarks/results/replay.json and the page's table

Each task is played with its known solution and graded, and its episode replayed with `--claim`: with the
provider `host`, and on Docker.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, TypeAlias

import anyio
from decathlon_client import Decathlon
from decathlon_client.script import Step, play_script

from benchmarks.running import LONG, LONG_SECONDS, SUITE, Options
from decathlon_mcp.plugins.replay.replay import NOT_PLAYED, ReplayOptions, replay
from decathlon_mcp.settings import Settings
from decathlon_mcp.starter import oracle, oracle_ids

RESULTS = Path(__file__).parent / "results" / "replay.json"
PAGE = Path(__file__).parents[1] / "docs" / "results" / "replays.md"
BEGIN, END = "<!-- Written by benchmarks/replays.py -->", "<!-- end -->"
SUITES = ("starter", "bench")
PROVIDERS: Mapping[str, Mapping[str, Any]] = {
    "local": {"provider": "host", "isolation": "auto"},
    "docker": {"provider": "docker", "image": Options().image},
}
TIME_LIMITS = {f"{name}_seconds": LONG_SECONDS for name in LONG}
_ECHO, _NOTE = Step("echo__echo", {"text": "hello"}), Step("notes__note", {"text": "right"})
_EXCEL = [Step("excel__create_workbook", {"path": "{workspace}/book.xlsx", "sheets": ["Sheet1"]})]
_GIT = [Step("git__git_status", {"repo_path": "{workspace}"})]  # an error: there is no repository
_PLAIN = Step("plain__echo", {"text": "hello"})
BENCH: Mapping[str, Sequence[Step]] = {
    "bare": [],
    "echo": [_ECHO, _ECHO],
    "excel": _EXCEL,
    "four": [_ECHO, *_EXCEL, *_GIT, _PLAIN],
    "git": _GIT,
    "hostile": [
        Step("hostile__reply", {"pattern": "brackets", "size_bytes": 10_000}),
        Step("hostile__link", {"number": 3, "size_bytes": 100}),
    ],
    "note": [_NOTE],
    "pair": [_ECHO, _NOTE],
    "plain": [_PLAIN],
}
"""Solutions of the benchmark's tasks, without the claim."""
Row: TypeAlias = dict[str, Any]
"""One task on one provider: `suite`, `task`, `provider`, `calls`, `equal`, `differs` (texts)."""


class Silent:
    """Shows nothing of a script."""

    def call(self, tool: str, arguments: Mapping[str, Any]) -> None: ...

    def progress(self, progress: float, total: float | None, message: str | None) -> None: ...

    def reply(self, text: str, *, failed: bool = False) -> None: ...


async def measure(suite: str, provider: str) -> list[Row]:
    """Play and replay the tasks of a suite, `starter` or `bench`.

    Raises RuntimeError if a solution does not succeed, or an episode cannot be replayed.
    """
    folder = SUITE if suite == "bench" else "starter"
    solutions = {task: oracle(task) for task in oracle_ids()} if suite == "starter" else BENCH
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="decathlon-replays-", ignore_cleanup_errors=True) as state:
        values: dict[str, Any] = {**PROVIDERS[provider], **TIME_LIMITS, "state": Path(state)}
        settings = Settings.model_validate({**values, "suite": (str(folder),)})
        async with Decathlon.embedded(folder, **values) as d:
            for task, steps in solutions.items():
                async with d.episode(task) as e:
                    await play_script(e, steps, Silent())
                    verdict = await e.evaluate()
                    if not verdict.success:
                        raise RuntimeError(f"{task} on {provider}: its solution got {verdict}")
                rows.append({"suite": suite, "task": task, "provider": provider, "episode": e.public_id})
        for row in rows:
            report = await _replay(settings, row.pop("episode"))
            row |= {"calls": len(report["calls"]), "equal": report["equal"], "differs": _differences(report)}
    return rows


async def _replay(settings: Settings, episode: str) -> Row:
    with redirect_stdout(io.StringIO()) as output:
        options = ReplayOptions(claim=True, as_json=True)
        status = await replay(settings, episode, None, options, embedded=True)
    if status == NOT_PLAYED:
        raise RuntimeError(f"{episode} could not be replayed")
    return json.loads(output.getvalue())


def _differences(report: Row) -> list[str]:
    texts = [
        f"call {call['call']}, `{call['name']}`: {call['difference']['class']}"
        for call in report["calls"]
        if call["result"] == "differs"
    ]
    same = all(report["verdict"][name] == report["verdict_before"][name] for name in ("success", "reward"))
    return texts if same else [*texts, "the verdict"]


def read_rows() -> list[Row]:
    """The rows that were written."""
    return json.loads(RESULTS.read_text("utf-8"))


def page_with(rows: Sequence[Row], page: str) -> str:
    """The text of the page with the table of these rows."""
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    return f"{before}{BEGIN}\n{_table(rows)}\n{END}{after}"


def _table(rows: Sequence[Row]) -> str:
    lines = ["| task | provider | calls | equal | what differs |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (SUITES.index(row["suite"]), row["task"])):
        task = f"`{row['task']}`" if row["suite"] == "starter" else f"`{row['task']}` of the benchmark"
        lines.append(
            f"| {task} | {row['provider']} | {row['calls']} | {row['equal']} | {'; '.join(row['differs'])} |"
        )
    return "\n".join(line.replace("  |", " |") for line in lines)


async def _measure_all() -> list[Row]:
    return [row for suite in SUITES for provider in PROVIDERS for row in await measure(suite, provider)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replays", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the results and the page's table")
    is_writing = parser.parse_args().write
    rows = anyio.run(_measure_all)
    if is_writing:
        RESULTS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", "utf-8")
        PAGE.write_text(page_with(rows, PAGE.read_text("utf-8")), "utf-8")
    elif other := [row for row in rows if row not in read_rows()]:
        sys.exit("\n".join(map(str, ("these rows are not what was written:", *other))))


if __name__ == "__main__":
    main()
