"""All trainings of the curve: `python -m examples.learn.measure`.

Three seeds, from the same warm-up; the first one's policy without training, and trained with rewards that are
shuffled in each group.
The last seed's server is killed twice by SIGKILL and started again, while episodes play. The figures go to
`results.json`, the plot to `docs/images/learning.svg`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from examples.learn.grpo import GROUP, Options
from examples.learn.plot import Line, plot, smoothed
from examples.learn.warm_up import SUITE

HERE = Path(__file__).parent
RESULTS, PICTURE = HERE / "results.json", HERE.parents[1] / "docs" / "images" / "learning.svg"
SEEDS = (0, 1, 2)
CONTROLS = ("shuffled", "untrained")
KILLED = f"seed-{SEEDS[-1]}"
RUNS = (*(f"seed-{seed}" for seed in SEEDS), *CONTROLS)
KILLS = (1 / 3, 2 / 3)
"""Parts of the training after which the last seed's server is killed."""
AWAY_SECONDS = 3.0
PORT = 8791
FORWARDED = ("steps", "groups", "held_out", "learning_rate", "epochs")


class KilledServer:
    """A server of its own for one training, which is killed as long as episodes play."""

    def __init__(self, state: Path) -> None:
        program = Path(sys.executable).with_name("decathlon-mcp")
        self._command = [str(program), "serve", "--no-supervisor", "--suite", str(SUITE), "--port", str(PORT)]
        self._command += ["--state", str(state), "--log-level", "warning"]
        self._episodes = state / "episodes"
        self.url = f"http://127.0.0.1:{PORT}"
        self.kills: list[int] = []
        """How many verdicts there were at each."""

    async def start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(*self._command, stdout=asyncio.subprocess.DEVNULL)
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", PORT)
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return process

    def _verdicts(self) -> int:
        return sum(1 for _ in self._episodes.glob("*/verdict.json"))

    async def run(self, process: asyncio.subprocess.Process, verdicts: Sequence[int]) -> None:
        """Run until cancelled; die and come back as soon as there are so many verdicts."""
        try:
            for wanted in verdicts:
                while (count := self._verdicts()) < wanted:  # noqa: ASYNC110  (of another process)
                    await asyncio.sleep(0.2)
                os.kill(process.pid, signal.SIGKILL)
                await process.wait()
                self.kills.append(count)
                await asyncio.sleep(AWAY_SECONDS)
                process = await self.start()
            await asyncio.Event().wait()
        finally:
            process.terminate()
            await process.wait()


class Measurement:
    """The trainings, whose results are written as they come."""

    def __init__(self, out: Path, options: Options, runs: Sequence[str], at_once: int) -> None:
        self._out, self._options, self._runs = out, options, runs
        self._warmed_up = out / "warmed-up.pt"
        self._places = asyncio.Semaphore(at_once)
        self._results: dict[str, Any] = {
            "date": f"{date.today()}",
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            "runs": {},
        }
        if RESULTS.exists() and {*runs} != {*RUNS}:
            self._results = json.loads(RESULTS.read_text())

    async def run(self) -> None:
        """Warm up once, for all of them, then train. A training that fails leaves the others alone."""
        if not self._warmed_up.exists():
            record = await self._example("warm-up", "--steps", "0", "--held-out", "0")
            self._results["warm_up_seconds"] = record["seconds"]["warm-up"]
        ended = await asyncio.gather(*map(self._train, self._runs), return_exceptions=True)
        failures = [f"{failure}" for failure in ended if failure is not None]
        if failures:
            raise SystemExit("\n".join(failures))

    async def _train(self, name: str) -> None:
        async with self._places:
            started, words = time.monotonic(), ["--seed", name.removeprefix("seed-")]
            if name in CONTROLS:
                words = ["--seed", f"{SEEDS[0]}", "--control", name]
            if name == KILLED:
                record = await self._train_on_killed_server(name, words)
            else:
                record = await self._example(name, *words)
            record["minutes"] = round((time.monotonic() - started) / 60, 1)
            record["load_average"] = round(os.getloadavg()[2], 1)
            self._results["runs"][name] = record
            runs: dict[str, Any] = self._results["runs"]
            self._results["runs"] = {run: runs[run] for run in RUNS if run in runs}
            RESULTS.write_text(json.dumps(self._results, indent=1) + "\n")
            draw(self._results)

    async def _train_on_killed_server(self, name: str, words: Sequence[str]) -> dict[str, Any]:
        before = 2 * self._options.held_out * GROUP
        training = self._options.steps * self._options.groups * GROUP
        server = KilledServer(self._out / f"state-{name}")
        process = await server.start()
        killing = asyncio.create_task(server.run(process, [before + int(training * part) for part in KILLS]))
        try:
            record = await self._example(name, *words, "--url", server.url)
        finally:
            killing.cancel()
            await asyncio.gather(killing, return_exceptions=True)
        return {**record, "kills": server.kills}

    async def _example(self, name: str, *words: str) -> dict[str, Any]:
        """Run the example in a process of its own; returns its record."""
        command = [sys.executable, "-m", "examples.learn", "--run", name, "--out", str(self._out)]
        command += ["--warmed-up", str(self._warmed_up)]
        if "--url" not in words:
            command += ["--state", str(self._out / f"state-{name}")]
        for option in FORWARDED:
            command += [f"--{option.replace('_', '-')}", f"{getattr(self._options, option)}"]
        with (self._out / f"{name}.log").open("wb") as log:
            process = await asyncio.create_subprocess_exec(*command, *words, stdout=log, stderr=log)
            if await process.wait():
                raise RuntimeError(f"{name} failed: {self._out / name}.log")
        record = json.loads((self._out / f"{name}.json").read_text())
        record["options"]["warmed_up"] = self._warmed_up.name
        return record


def draw(results: dict[str, Any]) -> None:
    """Draw the plot: the mean of the seeds with their range, each seed, and the controls."""
    curves = {
        name: smoothed([step["reward"] for step in run["steps"]]) for name, run in results["runs"].items()
    }
    seeds = [curve for name, curve in curves.items() if name.startswith("seed-")]
    lines: list[Line] = []
    if seeds:
        means = [statistics.mean(at) for at in zip(*seeds, strict=True)]
        spreads = [statistics.pstdev(at) for at in zip(*seeds, strict=True)]
        lines.append(Line(f"{len(seeds)} seeds, trained", means, spreads))
    lines += [Line(name, curves[name], dashes="5 4") for name in CONTROLS if name in curves]
    PICTURE.write_text(plot("Mean reward by step, of three seeds and of two controls", lines))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.learn.measure", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("build/learn"))
    parser.add_argument("--at-once", type=int, default=2, help="trainings at the same time [2]")
    parser.add_argument("--draw", action="store_true", help="only draw the plot again")
    parser.add_argument("runs", nargs="*", help=f"some of {', '.join(RUNS)} [all]")
    for option in FORWARDED:
        default = getattr(Options(""), option)
        parser.add_argument(f"--{option.replace('_', '-')}", type=type(default), default=default)
    given = vars(parser.parse_args())
    out, only_draws, at_once = (given.pop(name) for name in ("out", "draw", "at_once"))
    runs = given.pop("runs") or RUNS
    if only_draws:
        draw(json.loads(RESULTS.read_text()))
        return
    out.mkdir(parents=True, exist_ok=True)
    asyncio.run(Measurement(out, Options("", **given), runs, at_once).run())


if __name__ == "__main__":
    main()
