"""Trains one seed through a server, and ends with a plot: `python -m examples.learn`."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields
from datetime import datetime
from pathlib import Path

import torch
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tool_decathlon import ToolDecathlonEnv

from examples.learn.grpo import Options, train
from examples.learn.plot import Line, plot, smoothed
from examples.learn.record import Record
from examples.learn.warm_up import SUITE

OUT = Path("build/learn")


def arguments() -> argparse.Namespace:
    """The options of a training, and where it takes place."""
    parser = argparse.ArgumentParser(prog="python -m examples.learn", description=__doc__)
    for option in fields(Options):
        default = f"learn-{datetime.now():%m%d-%H%M%S}" if option.name == "run" else option.default
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--url", help="a server that runs with this suite; without it, one is started")
    parser.add_argument("--state", type=Path, help="state folder of the server that is started")
    parser.add_argument("--out", type=Path, default=OUT, help=f"folder for the results [{OUT}]")
    return parser.parse_args()


def environment(url: str | None, state: Path | None) -> ToolDecathlonEnv:
    """A running server, or one that is started as a child and ends with this program."""
    if url is not None:
        return ToolDecathlonEnv(url=url)
    program = Path(sys.executable).with_name("decathlon-mcp")
    settings = {} if state is None else {"state": state}
    return ToolDecathlonEnv(SUITE, server=program, **settings)


@contextmanager
def progress() -> Iterator[Callable[[str, int, int, str], None]]:
    """A function that shows how much of a part is done: a bar for each part."""
    bars: dict[str, TaskID] = {}
    columns = (TextColumn("{task.description:8}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    figures = (TextColumn("{task.fields[figure]}"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *figures) as display:

        def shown(part: str, done: int, total: int, figure: str) -> None:
            if part not in bars:
                bars[part] = display.add_task(part, total=total, figure=figure)
            display.update(bars[part], completed=done, figure=figure)

        yield shown


def report(record: Record, out: Path) -> None:
    """Write the record and the plot, and print where they are and what was learned."""
    out.mkdir(parents=True, exist_ok=True)
    run = record.options["run"]
    file, picture = out / f"{run}.json", out / f"{run}.svg"
    file.write_text(json.dumps(record.as_json(), indent=1) + "\n")
    (out / f"{run}.verdicts.jsonl").write_text(
        "".join(f"{json.dumps(verdict)}\n" for verdict in record.verdicts)
    )
    if len(record.steps) > 1:
        means = smoothed([step["reward"] for step in record.steps])
        spreads = smoothed([step["deviation"] for step in record.steps])
        picture.write_text(plot(f"Mean reward by step of {run}", [Line(run, means, spreads)]))
    for when, tasks in record.held_out.items():
        figures = ", ".join(f"{task} {value['reward']:.2f}" for task, value in tasks.items())
        print(f"held out, {when}: {figures}")
    lost = dict(record.faults) or 0
    print(f"{record.episodes} episodes, {record.per_minute:.0f} a minute; without a reward: {lost}")
    print(f"{file}, {picture}")
    print(f"`decathlon-mcp view` shows the run: /runs/{run}")


async def main() -> None:
    given = vars(arguments())
    url, state, out = (given.pop(name) for name in ("url", "state", "out"))
    options = Options(**given)
    # The sandboxes need the other cores.
    torch.set_num_threads(1)
    record = Record(asdict(options))
    try:
        with progress() as shown:
            async with environment(url, state) as env:
                await train(env.client, options, record, shown)
    finally:
        # After Ctrl-C too.
        report(record, out)


if __name__ == "__main__":
    asyncio.run(main())
