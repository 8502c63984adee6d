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
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.to_thread
import pytest
from decathlon_client.client_values import CLAIM
from decathlon_client.script import Step
from decathlon_client.testing import bundled_task, scripted_model

from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeQuery, EpisodeSummary
from decathlon_mcp.starter import oracle
from decathlon_mcp.types import JsonObject, public_id
from tests.docs import snippets
from tests.docs.pages import REPOSITORY, block
from tests.docs.snippets import run
from tests.probe.serving import Served, serving
from tests.trainers.trainers import PROGRAMS, install

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(3600)]

PAGE = "docs/evaluating.md"
LAUNCH_TIME = "2026-02-03T04:05:06+00:00"


@dataclass
class Model:
    """What the scripted model does besides the tasks' oracles. Called in threads of its endpoint.

    `wrong`: tasks that it claims at once with a wrong answer. `lose`: the task whose next episode is closed
    while it plays. `hang`: the task for which it does not answer until `go_on`; `hangs` is set then.
    """

    served: Served
    wrong: set[str] = field(default_factory=set[str])
    lose: str = ""
    hang: str = ""
    hangs: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    run_in_loop: Any = None

    def choose(self, request: JsonObject) -> list[Step]:
        task = bundled_task(request)
        if task is None:
            return []
        if task == self.hang:
            self.hangs.set()
            self.go_on.wait(120)
        if task == self.lose:
            self.lose = ""
            self.run_in_loop(self._close, task)
        return [Step(CLAIM, {"answer": "I do not know."})] if task in self.wrong else oracle(task)

    def _close(self, task: str) -> None:
        for episode in self.served.episodes.live:
            if episode.spec.task_name == task:
                episode.close(Ending.CLOSED)
                return


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
    async with serving(
        tmp_path / "state", suite=("starter",), provider="host", isolation="auto", max_opening=2
    ) as served:
        yield served


@pytest.fixture
async def model(served: Served) -> AsyncGenerator[Model]:
    model = Model(served)

    async with anyio.from_thread.BlockingPortal() as portal:
        model.run_in_loop = portal.call
        with scripted_model(model.choose) as model.url:
            yield model
            model.go_on.set()


@pytest.fixture(autouse=True)
def raised_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snippets, "TIMEOUT_SECONDS", 600)


def environment(model: Model, programs: Path) -> dict[str, str]:
    # The installed package, not the checkout.
    return {
        "OPENAI_BASE_URL": model.url,
        "OPENAI_API_KEY": "none",
        "PATH": f"{programs}:/usr/bin:/bin",
        "PYTHONPATH": "",
    }


async def run_page(heading: str, model: Model, programs: Path, folder: Path) -> str:
    return await run(
        block(PAGE, heading, "bash"),
        ["bash"],
        url=model.served.url,
        folder=folder,
        environment=environment(model, programs),
    )


async def evaluate(model: Model, programs: Path, folder: Path, *options: str) -> tuple[int, str]:
    """Run `inspect eval` with these options; its exit status and output."""
    process = await anyio.run_process(
        command(model, *options),
        cwd=folder,
        env={**os.environ, **environment(model, programs)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return process.returncode, " ".join(process.stdout.decode().split())


def command(model: Model, *options: str) -> list[str]:
    return [
        *("inspect", "eval", "decathlon_client/tool_decathlon", "-T", f"url={model.served.url}", *options),
        *("--model", "openai/gpt-5", "--log-dir", "logs", "--display", "plain"),
    ]


async def read_logs(programs: Path, folder: Path) -> list[Any]:
    result = await anyio.run_process(
        [str(programs / "python"), str(PROGRAMS / "inspect_log.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": ""},
    )
    return json.loads(result.stdout)


def metrics(log: Any) -> dict[tuple[str, str | None, str], float]:
    return {(name, reducer, metric): value for name, reducer, metric, value in log["results"]}


def episodes_of(served: Served, run: str) -> list[EpisodeSummary]:
    return list(EpisodeHistory([served.state]).episodes(EpisodeQuery(run=run), limit=1000).items)


async def assert_no_handle_in(folder: Path, served: Served, programs: Path) -> None:
    result = await anyio.run_process(
        [str(programs / "python"), str(PROGRAMS / "inspect_text.py"), str(folder)],
        env={**os.environ, "PYTHONPATH": ""},
    )
    handles = [path.name for path in (served.state / "episodes").iterdir()]
    assert handles
    assert b"tune-reactor" in result.stdout or b"explain-outage" in result.stdout
    assert not [handle for handle in handles if handle.encode() in result.stdout]


async def test_the_pages_commands_evaluate_a_model_and_retry_what_was_lost(
    served: Served, model: Model, programs: Path, tmp_path: Path
) -> None:
    model.wrong, model.lose = {"find-rate-regression"}, "explain-outage"
    await run_page("The command", model, programs, tmp_path)
    (log,) = await read_logs(programs, tmp_path / "logs")
    assert served.episodes.live == []

    # One of six is lost, which is more than a tenth.
    assert log["status"] == "error"
    values = metrics(log)
    assert values["lost", None, "count"] == 1
    assert values["success_of_all", None, "mean"] == pytest.approx(2 / 6)
    (lost,) = [sample for sample in log["samples"] if sample["error"]]
    assert lost["id"] == "explain-outage"
    value, reason, details = lost["scores"]["success"]
    assert math.isnan(value)
    assert reason
    assert details["episode"] == lost["metadata"]["episode"]
    assert lost["scores"]["lost"][0] == 1

    await run_retry(model, programs, tmp_path)
    log, retried = await read_logs(programs, tmp_path / "logs")
    assert retried["status"] == "success"
    assert retried["arguments"] == log["arguments"]
    values = metrics(retried)
    assert values["lost", None, "count"] == 0
    assert values["success", "pass_at_3", "mean"] == 0.5
    assert values["success", "pass_k_3", "mean"] == 0.5

    arguments = log["arguments"]
    episodes = episodes_of(served, arguments["run"])
    assert len(episodes) == 7
    assert sum(episode.is_lost for episode in episodes) == 1
    assert {episode.labels["model"] for episode in episodes} == {"openai/gpt-5"}
    assert {episode.labels["eval"] for episode in episodes} == {log["eval"], retried["eval"]}
    attempts = sorted([*"112233", str(lost["epoch"])])
    assert sorted(episode.labels["attempt"] for episode in episodes) == attempts
    history = EpisodeHistory([served.state])
    times = {details.launch_time for one in episodes if (details := history.episode(one.public_id))}
    assert times == {arguments["launch_time"]}
    await assert_no_handle_in(tmp_path / "logs", served, programs)

    shown = await decathlon(
        programs, "runs", arguments["run"], "--leaderboard", "--split", "test", state=served.state
    )
    # The lost epoch was played again.
    assert "2 tasks, attempts at each: 3" in shown
    assert "pass@1 0.500 ± 0.000" in shown
    assert "pass@3 0.500, pass^3 0.500" in shown
    assert "lost" not in shown

    out = tmp_path / "exported"
    await decathlon(
        programs, "export", arguments["run"], "--to", "inspect", "--output", str(out), state=served.state
    )
    await assert_no_handle_in(out, served, programs)
    frames = await anyio.run_process(
        [str(programs / "python"), str(PROGRAMS / "inspect_frames.py"), str(out)],
        env={**os.environ, "PYTHONPATH": ""},
    )
    frame = json.loads(frames.stdout)
    assert {row["uuid"] for row in frame["samples"]} == {episode.public_id for episode in episodes}
    assert [row["uuid"] for row in frame["samples"] if row["error"]] == [lost["metadata"]["episode"]]
    calls = sum(episode.calls or 0 for episode in episodes)
    assert (frame["tool events"], frame["tool calls"]) == (calls, calls)


async def run_retry(model: Model, programs: Path, folder: Path) -> None:
    text = block(PAGE, "Lost samples", "bash").text
    process = await anyio.run_process(
        ["bash", "-c", text],
        cwd=folder,
        env={**os.environ, **environment(model, programs)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        check=False,
    )
    assert process.returncode == 0, process.stdout.decode()


async def decathlon(programs: Path, *words: str, state: Path) -> str:
    process = await anyio.run_process(
        [str(programs / "decathlon-mcp"), *words, "--state", str(state)],
        env={**os.environ, "PYTHONPATH": ""},
        check=False,
    )
    assert process.returncode == 0, process.stderr.decode()
    return process.stdout.decode()


async def test_a_limit_of_messages_truncates_the_attempt_and_it_is_graded(
    served: Served, model: Model, programs: Path, tmp_path: Path
) -> None:
    await run_page("Limits", model, programs, tmp_path)
    (log,) = await read_logs(programs, tmp_path / "limited")
    (sample,) = log["samples"]
    assert (log["status"], sample["error"], sample["limit"]) == ("success", None, "message")
    assert sample["scores"]["reward"][2]["truncated"] is True
    assert served.episodes.live == []


async def test_a_cancelled_evaluation_closes_its_episode(
    served: Served, model: Model, programs: Path, tmp_path: Path
) -> None:
    model.hang = "tune-reactor"
    async with await anyio.open_process(
        command(model, "-T", "tasks=tune-reactor"),
        cwd=tmp_path,
        env={**os.environ, **environment(model, programs)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        with anyio.fail_after(300):
            while not await anyio.to_thread.run_sync(model.hangs.wait, 1, abandon_on_cancel=True):
                assert process.returncode is None
            (episode,) = served.episodes.live
            process.send_signal(signal.SIGINT)
            await process.wait()
    assert served.episodes.live == []
    details = EpisodeHistory([served.state]).episode(public_id(episode.id))
    assert details is not None
    assert details.summary.ending == str(Ending.CLOSED)


async def test_tasks_that_cannot_be_played_are_named_or_skipped(
    served: Served, model: Model, programs: Path, tmp_path: Path
) -> None:
    model.wrong = {"tune-reactor"}
    tasks = "tasks=tune-reactor,no-such-task"
    status, output = await evaluate(model, programs, tmp_path, "-T", tasks)
    assert status != 0
    assert "no-such-task (there is no such task)" in output
    assert list((served.state / "episodes").glob("*")) == []
    status, output = await evaluate(
        model, programs, tmp_path, "-T", tasks, "-T", "missing=skip", "-T", f"launch_time={LAUNCH_TIME}"
    )
    assert status == 0, output
    assert "1 of 2 tasks are skipped" in output
    (log,) = await read_logs(programs, tmp_path / "logs")
    assert log["metadata"]["skipped_tasks"] == ["no-such-task"]
    assert log["arguments"]["launch_time"] == LAUNCH_TIME
    (episode,) = episodes_of(served, log["arguments"]["run"])
    details = EpisodeHistory([served.state]).episode(episode.public_id)
    assert details is not None
    assert details.launch_time == LAUNCH_TIME
    assert [sample["id"] for sample in log["samples"]] == ["tune-reactor"]


async def test_an_agent_of_ones_own_plays_and_gets_a_verdict(
    served: Served, model: Model, programs: Path, tmp_path: Path
) -> None:
    (tmp_path / "careful.py").write_text(block(PAGE, "Agents of your own", "python").text)
    options = ("-T", "tasks=tune-reactor", "--solver", "careful.py@careful")
    status, output = await evaluate(model, programs, tmp_path, *options)
    assert status == 0, output
    (log,) = await read_logs(programs, tmp_path / "logs")
    assert metrics(log)["success_of_all", None, "mean"] == 1
    assert log["samples"][0]["scores"]["reward"][2]["status"] == "scored"
    assert served.episodes.live == []
