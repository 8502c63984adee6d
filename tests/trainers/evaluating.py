"""`docs/evaluating.md`, the adapter for inspect-ai and the export to its logs, with the real library.

Not collected by default, because it installs inspect-ai. Run it by name:

    python -m pytest tests/trainers/evaluating.py

`DECATHLON_INSPECT_PROGRAMS` names the folder of programs of an environment that has it already. The model is
scripted, behind an endpoint of OpenAI's kind.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from decathlon_client.script import Step
from decathlon_client.testing import bundled_task, scripted_model

from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeDetails, EpisodeQuery, EpisodeSummary
from decathlon_mcp.starter import oracle
from decathlon_mcp.types import JsonObject, public_id
from tests.docs.pages import REPOSITORY, block
from tests.docs.snippets import install, output_of
from tests.probe.serving import Served, serving
from tests.trainers.conftest import WRONG, Trial

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(3600)]

PAGE = "docs/evaluating.md"
LAUNCH_TIME = "2026-02-03T04:05:06+00:00"


@dataclass
class Model:
    """What the scripted model does besides the tasks' oracles. Called in threads of its endpoint."""

    lose: Callable[[str], object]
    """Closes an episode of a task."""
    wrong: str = ""
    """The task that it claims at once with a wrong answer."""
    lost: str = ""
    """The task whose next episode is closed while it plays."""
    hang: str = ""
    """The task for which it sets `hangs` and does not answer until `go_on`."""
    hangs: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def choose(self, request: JsonObject) -> list[Step]:
        task = bundled_task(request)
        if task is None:
            return []
        if task == self.hang:
            self.hangs.set()
            self.go_on.wait(120)
        if task == self.lost:
            self.lost = ""
            self.lose(task)
        return WRONG if task == self.wrong else oracle(task)


@pytest.fixture(scope="module")
async def programs(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Path]:
    if own := os.environ.get("DECATHLON_INSPECT_PROGRAMS"):
        yield Path(own)
        return
    folder = tmp_path_factory.mktemp("inspect")
    yield await install(folder, f"{REPOSITORY}[server,starter,inspect]", "openai", "pandas", "pyarrow")
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
async def served(tmp_path: Path) -> AsyncGenerator[Served]:
    settings: dict[str, Any] = {"suite": ("starter",), "provider": "host", "isolation": "auto"}
    async with serving(tmp_path / "state", **settings, max_opening=2) as served:
        yield served


@pytest.fixture
async def model(served: Served) -> AsyncGenerator[Model]:
    def lose(task: str) -> None:
        episode = next(each for each in served.episodes.live if each.spec.task_name == task)
        episode.close(Ending.CLOSED)

    async with anyio.from_thread.BlockingPortal() as portal:
        model = Model(lambda task: portal.call(lose, task))
        yield model
        model.go_on.set()


@pytest.fixture
async def trial(served: Served, model: Model, programs: Path, tmp_path: Path) -> AsyncGenerator[Trial]:
    with scripted_model(model.choose) as url:
        trial = Trial(served, tmp_path, url)
        trial.use(programs)
        yield trial


def command(trial: Trial, *options: str) -> list[str | Path]:
    return [
        *(trial.programs / "inspect", "eval", "decathlon_client/tool_decathlon"),
        *("-T", f"url={trial.served.url}", *options),
        *("--model", "openai/gpt-5", "--log-dir", "logs", "--display", "plain"),
    ]


async def evaluate(trial: Trial, *options: str) -> tuple[int, str]:
    """Run `inspect eval` with these options; its exit status and output."""
    process = await anyio.run_process(
        [*map(str, command(trial, *options))],
        cwd=trial.folder,
        env={**os.environ, **trial.environment},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return process.returncode, " ".join(process.stdout.decode().split())


async def read_logs(trial: Trial, folder: str = "logs") -> list[Any]:
    """The logs, in which no episode's handle is."""
    (text,) = await trial.program("inspect_logs.py", folder)
    handles = [path.name for path in (trial.served.state / "episodes").iterdir()]
    assert handles
    assert not [handle for handle in handles if handle in text]
    return json.loads(text)


def metrics(log: Any) -> dict[tuple[str, str | None, str], float]:
    return {
        (score["name"], score["reducer"], name): metric["value"]
        for score in log["results"]["scores"]
        for name, metric in score["metrics"].items()
    }


def episodes_of(served: Served, run: str) -> list[EpisodeSummary]:
    return list(EpisodeHistory([served.state]).episodes(EpisodeQuery(run=run), limit=1000).items)


def details_of(served: Served, episode: str) -> EpisodeDetails:
    details = EpisodeHistory([served.state]).episode(episode)
    assert details is not None
    return details


async def test_the_pages_commands_evaluate_a_model_and_retry_what_was_lost(
    trial: Trial, model: Model
) -> None:
    model.wrong, model.lost = "find-rate-regression", "explain-outage"
    await trial.block(PAGE, "The command", "bash")
    (log,) = await read_logs(trial)

    # One of six is lost, which is more than a tenth.
    assert log["status"] == "error"
    values = metrics(log)
    assert values["lost", None, "count"] == 1
    assert values["success_of_all", None, "mean"] == pytest.approx(2 / 6)
    (lost,) = [sample for sample in log["samples"] if sample["error"]]
    assert lost["id"] == "explain-outage"
    score = lost["scores"]["success"]
    assert math.isnan(score["value"])
    assert score["explanation"]
    assert score["metadata"]["episode"] == lost["metadata"]["episode"]
    assert lost["scores"]["lost"]["value"] == 1

    await trial.block(PAGE, "Lost samples", "bash")
    log, retried = await read_logs(trial)
    assert retried["status"] == "success"
    assert retried["eval"]["task_args_passed"] == log["eval"]["task_args_passed"]
    values = metrics(retried)
    assert values["lost", None, "count"] == 0
    assert values["success", "pass_at_3", "mean"] == 0.5
    assert values["success", "pass_k_3", "mean"] == 0.5

    arguments = log["eval"]["task_args_passed"]
    episodes = episodes_of(trial.served, arguments["run"])
    assert len(episodes) == 7
    assert sum(episode.is_lost for episode in episodes) == 1
    assert {episode.labels["model"] for episode in episodes} == {"openai/gpt-5"}
    assert {episode.labels["eval"] for episode in episodes} == {
        log["eval"]["eval_id"],
        retried["eval"]["eval_id"],
    }
    attempts = sorted([*"112233", str(lost["epoch"])])
    assert sorted(episode.labels["attempt"] for episode in episodes) == attempts
    times = {details_of(trial.served, one.public_id).launch_time for one in episodes}
    assert times == {arguments["launch_time"]}

    run, state = arguments["run"], ("--state", trial.served.state)
    decathlon = trial.programs / "decathlon-mcp"
    words = [decathlon, "runs", run, "--leaderboard", "--split", "test", *state]
    shown = await output_of(words, trial.folder, trial.environment)
    # The lost epoch was played again.
    assert "2 tasks, attempts at each: 3" in shown
    assert "pass@1 0.500 ± 0.000" in shown
    assert "pass@3 0.500, pass^3 0.500" in shown
    assert "lost" not in shown

    words = [decathlon, "export", run, "--to", "inspect", "--output", trial.folder / "exported", *state]
    await output_of(words, trial.folder, trial.environment)
    await read_logs(trial, "exported")
    (text,) = await trial.program("inspect_frames.py", "exported")
    frame = json.loads(text)
    assert set(frame["errors"]) == {episode.public_id for episode in episodes}
    assert [name for name, error in frame["errors"].items() if error] == [lost["metadata"]["episode"]]
    calls = sum(episode.calls or 0 for episode in episodes)
    assert (frame["tool events"], frame["tool calls"]) == (calls, calls)


async def test_a_limit_of_messages_truncates_the_attempt_and_it_is_graded(trial: Trial) -> None:
    await trial.block(PAGE, "Limits", "bash")
    (log,) = await read_logs(trial, "limited")
    (sample,) = log["samples"]
    assert (log["status"], sample["error"], sample["limit"]["type"]) == ("success", None, "message")
    assert sample["scores"]["reward"]["metadata"]["truncated"] is True


async def test_a_cancelled_evaluation_closes_its_episode(trial: Trial, model: Model) -> None:
    model.hang = "tune-reactor"
    async with await anyio.open_process(
        [*map(str, command(trial, "-T", "tasks=tune-reactor"))],
        cwd=trial.folder,
        env={**os.environ, **trial.environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        with anyio.fail_after(300):
            while not await anyio.to_thread.run_sync(model.hangs.wait, 1, abandon_on_cancel=True):
                assert process.returncode is None
            (episode,) = trial.served.episodes.live
            process.send_signal(signal.SIGINT)
            await process.wait()
    assert trial.served.episodes.live == []
    assert details_of(trial.served, public_id(episode.id)).summary.ending == str(Ending.CLOSED)


async def test_tasks_that_cannot_be_played_are_named_or_skipped(trial: Trial, model: Model) -> None:
    model.wrong = "tune-reactor"
    tasks = "tasks=tune-reactor,no-such-task"
    status, output = await evaluate(trial, "-T", tasks)
    assert status != 0
    assert "no-such-task (there is no such task)" in output
    assert list((trial.served.state / "episodes").glob("*")) == []
    status, output = await evaluate(
        trial, "-T", tasks, "-T", "missing=skip", "-T", f"launch_time={LAUNCH_TIME}"
    )
    assert status == 0, output
    assert "1 of 2 tasks are skipped" in output
    (log,) = await read_logs(trial)
    assert log["eval"]["metadata"]["skipped_tasks"] == ["no-such-task"]
    arguments = log["eval"]["task_args_passed"]
    assert arguments["launch_time"] == LAUNCH_TIME
    (episode,) = episodes_of(trial.served, arguments["run"])
    assert details_of(trial.served, episode.public_id).launch_time == LAUNCH_TIME
    assert [sample["id"] for sample in log["samples"]] == ["tune-reactor"]


async def test_an_agent_of_ones_own_plays_and_gets_a_verdict(trial: Trial) -> None:
    (trial.folder / "careful.py").write_text(block(PAGE, "Agents of your own", "python").text)
    options = ("-T", "tasks=tune-reactor", "--solver", "careful.py@careful")
    status, output = await evaluate(trial, *options)
    assert status == 0, output
    (log,) = await read_logs(trial)
    assert metrics(log)["success_of_all", None, "mean"] == 1
    assert log["samples"][0]["scores"]["reward"]["metadata"]["status"] == "scored"
    assert trial.served.episodes.live == []
