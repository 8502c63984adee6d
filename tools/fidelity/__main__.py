"""Plays Toolathlon's tasks and compares every verdict with upstream's own command.

    python -m tools.fidelity CHECKOUT [TASK ...] [--image decathlon-fidelity:latest] [--write]
    python -m tools.fidelity TOOLATHLON_GYM [TASK ...] [--draw 60] [--seed 1] [--write]

Requires a Docker engine, the image of this folder, and for tasks with mail that of images/mail; for tasks
with a recording, mitmdump. Each attempt has an episode of its own: one that calls no tool ("nothing"), one
with a mistake ("wrong") and a correct one ("right"), with only the tools of the task. Before each claim,
upstream's own command (`uv run -m tasks.finalpool.TASK.evaluation.main`) runs in a container with the whole
checkout, after upstream's preprocess, on a copy of the agent's workspace; for tasks with mail it has the
network of the episode's mail server, so that it reads the same mailboxes. Tasks with a recording are
recorded against stand-ins for their sites, which are switched off before the attempts.

Of toolathlon_gym it plays tasks without a database (`gym.py`), by default 60 that the seed chooses, or all if
there are not so many. Their "right" attempt is the ground truth, which need not be a correct one.

Prints a table of rewards and exit codes. `--write` puts it into `benchmarks/results/fidelity.json`, in
place of what is there for these tasks and this release, from which `docs/tables.py` writes
docs/results/toolathlon.md. The exit status is 0 if all verdicts agree and only correct attempts are rewarded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import anyio
from anyio import to_thread

from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite
from tests.probe.serving import Served, serving
from tools.fidelity import gym
from tools.fidelity.calls import ATTEMPTS, Solution, playing
from tools.fidelity.checkout import prepare_checkout
from tools.fidelity.recorded import RECORDED, stand_ins
from tools.fidelity.results import Attempt, Result, store
from tools.fidelity.solutions import SOLUTIONS
from tools.fidelity.upstream import EVALUATION_SECONDS, evaluate

IMAGE, GYM_IMAGE = "decathlon-fidelity:latest", "decathlon-fidelity-gym:latest"
SERVERS_SECONDS = 900
"""A server's deadline: with several attempts on a busy machine, `fetch` and `playwright` take minutes."""


async def play(served: Served, suite: Suite, image: str, solution: Solution, task: str, kind: str) -> Result:
    """Play an attempt and grade it here and by upstream's command."""
    async with playing(served, task) as player:
        sys.stderr.write(f"{task}, {kind}: playing\n")
        if kind != "nothing":
            await solution(player, suite.path / suite.tasks[task].folder, kind)
        # Without a call, the episode may still be in preprocess, which fills the mailboxes.
        episode = served.find(player.episode_id)
        await episode.state.reach(Phase.READY, Phase.ENDED)
        if episode.state.phase is Phase.ENDED:
            raise RuntimeError(f"{task}, {kind}: {episode.state.cause}")
        upstream = await to_thread.run_sync(evaluate, episode, suite, image)
        await player.call("claim_done")
        verdict = (await player.call("evaluate")).structured_content
    graded = Attempt(reward=verdict["reward"], status=verdict["status"], exit_code=upstream.exit_code)
    result = Result(task, kind, graded, compared_only=is_gym(suite))
    if not result.as_expected:
        sys.stderr.write(f"--- {task}, {kind}: {verdict}\n--- upstream:\n{upstream.output}\n")
    return result


def is_gym(suite: Suite) -> bool:
    return suite.profile.name == "gym"


async def record(settings: Mapping[str, Any], suite: Suite, folder: Path, tasks: Iterable[str]) -> None:
    """Record each task while its correct attempt is played against stand-ins for its sites."""
    with stand_ins(folder, suite.path) as addressed:
        async with serving(folder / "state", **settings, **addressed, web="record") as served:
            for task in tasks:
                sys.stderr.write(f"{task}: recording\n")
                try:
                    async with playing(served, task) as player:
                        await SOLUTIONS[task](player, suite.path / suite.tasks[task].folder, "right")
                        await player.call("claim_done")
                        await player.call("evaluate")
                except Exception as error:  # noqa: BLE001
                    # Its attempts fail, as it has no recording; the others are played all the same.
                    sys.stderr.write(f"--- {task}, recording: {error!r}\n")


async def run(
    checkout: Path,
    image: str,
    attempts: list[tuple[str, str]],
    solutions: Mapping[str, Solution],
    at_once: int,
    keep: Callable[[Result], None],
) -> list[Result]:
    """Play the attempts, `at_once` tasks at a time; `keep` gets each result at once, in the event loop."""
    results: dict[tuple[str, str], Result] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy = folder / "suite"
        await to_thread.run_sync(prepare_checkout, checkout, copy)
        suite = await to_thread.run_sync(load_suite, str(copy))
        settings: dict[str, Any] = {
            "suite": (str(copy),),
            "provider": "docker",
            "image": image,
            "servers": "lazy",
            "servers_seconds": SERVERS_SECONDS,
            # An attempt that calls nothing is evaluated by upstream's command before its first use.
            "first_use_seconds": SERVERS_SECONDS + EVALUATION_SECONDS,
            "set_up_seconds": SERVERS_SECONDS + EVALUATION_SECONDS,
        }
        recorded = list(dict.fromkeys(task for task, _ in attempts if task in RECORDED))
        if recorded:
            await record(settings, suite, folder, recorded)
            settings["web"] = "replay"
        limiter = anyio.CapacityLimiter(at_once)
        async with serving(folder / "state", **settings) as served:

            async def play_task(task: str) -> None:
                # One attempt after the other: the second knows the task's tools without starting its servers.
                async with limiter:
                    for kind in (kind for name, kind in attempts if name == task):
                        try:
                            results[task, kind] = await play(
                                served, suite, image, solutions[task], task, kind
                            )
                        except Exception as error:  # noqa: BLE001
                            # The others are played all the same; this one is missing from the results.
                            sys.stderr.write(f"--- {task}, {kind}: {error!r}\n")
                        else:
                            keep(results[task, kind])

            async with anyio.create_task_group() as group:
                for task in dict.fromkeys(task for task, _ in attempts):
                    group.start_soon(play_task, task)
    return [results[key] for key in attempts if key in results]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.fidelity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkout", type=Path)
    parser.add_argument("tasks", nargs="*", metavar="TASK")
    parser.add_argument("--image", help=f"[{IMAGE}, {GYM_IMAGE}]")
    parser.add_argument("--draw", type=int, default=60, help="number of tasks of toolathlon_gym [60]")
    parser.add_argument("--seed", type=int, default=1, help="chooses these tasks [1]")
    parser.add_argument("--at-once", type=int, default=3, help="tasks that are played at the same time [3]")
    parser.add_argument("--attempts", nargs="*", choices=ATTEMPTS, default=ATTEMPTS)
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/fidelity.json")
    arguments = parser.parse_args()
    suite = load_suite(str(arguments.checkout))
    if is_gym(suite):
        solutions: Mapping[str, Solution] = dict.fromkeys(gym.playable(suite.path), gym.write_truth)
        tasks = arguments.tasks or gym.draw(suite.path, arguments.draw, arguments.seed)
    else:
        solutions, tasks = SOLUTIONS, arguments.tasks or list(SOLUTIONS)
    if unknown := [task for task in tasks if task not in solutions]:
        parser.error(f"no attempt at {unknown[0]!r}; there are {', '.join(solutions)}")
    image = arguments.image or (GYM_IMAGE if is_gym(suite) else IMAGE)
    attempts = [(task, kind) for task in tasks for kind in arguments.attempts]

    def keep(result: Result) -> None:
        if arguments.write:
            store(suite, [result])

    results = anyio.run(run, arguments.checkout, image, attempts, solutions, arguments.at_once, keep)
    for result in results:
        sys.stdout.write(f"{result}\n")
    return 0 if len(results) == len(attempts) and all(result.as_expected for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
