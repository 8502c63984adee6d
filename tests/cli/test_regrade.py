"""`regrade`: selection, output, exit status, written verdicts, and an interrupt in the middle."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from decathlon_mcp.types import public_id
from tests.cli.conftest import COMMAND, Shell
from tests.probe.clients import connected, playing
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE, serving

pytestmark = pytest.mark.slow


FIND_ANSWER = "tasks/probe/find-answer/evaluation/main.py"
WAIT_SECONDS = 60
ISOLATION = "none"
"""Evaluators of these tests write to this machine."""


@dataclass
class Kept:
    """A state folder with kept attempts, the suite that they were played in, and a shell in its folder."""

    shell: Shell
    suite: Path
    state: Path
    handles: list[str]

    @property
    def options(self) -> list[str]:
        options = ["--suite", str(self.suite), "--provider", "host", "--state", str(self.state)]
        return [*options, "--isolation", ISOLATION]

    @property
    def sandboxes(self) -> list[str]:
        """The sandboxes of graders of the first attempt."""
        folder = self.state / "sandboxes"
        names = [path.name for path in folder.iterdir()] if folder.is_dir() else []
        return [name for name in names if self.id(0) in name]

    def regrade(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return self.shell.run("regrade", *arguments, *self.options, "--log-level", "error")

    def lines(self, *arguments: str, status: int = 0) -> list[dict[str, Any]]:
        done = self.regrade(*arguments, "--json")
        assert done.returncode == status, done
        return [json.loads(line) for line in done.stdout.splitlines()]

    def folder(self, number: int) -> Path:
        return self.state / "episodes" / self.handles[number]

    def id(self, number: int) -> str:
        """The public id."""
        return public_id(self.handles[number])

    def pass_everything(self) -> None:
        (self.suite / FIND_ANSWER).write_text("")


async def play(suite: Path, state: Path, tasks: tuple[str, ...]) -> list[str]:
    handles: list[str] = []
    settings: dict[str, Any] = {"provider": "host", "isolation": ISOLATION, "keep": "workspace"}
    async with serving(state, suite=(str(suite),), **settings) as served:
        for task in tasks:
            async with playing(served, task, "task") as player:
                await player.call("probe__write", path="a.txt", text="x")
                await player.call("claim_done")
                await player.call("evaluate")
                handles.append(player.episode_id)
    return handles


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A folder with the suite and a state folder, and the handles of the attempts in it."""
    folder = tmp_path_factory.mktemp("played")
    suite = Path(shutil.copytree(SUITE, folder / "suite"))
    return folder, anyio.run(play, suite, folder / "state", ("find-answer", "dense"))


@pytest.fixture
def kept(shell: Shell, played: tuple[Path, list[str]]) -> Kept:
    """A copy of the attempts in `played`."""
    folder, handles = played
    shutil.copytree(folder, shell.folder, dirs_exist_ok=True)
    return Kept(shell, shell.folder / "suite", shell.folder / "state", handles)


def test_a_line_per_episode_shows_what_changed(kept: Kept) -> None:
    (kept.suite / "tasks/probe/dense/evaluation/rubric.yaml").write_text(
        "function: evaluation/evaluator.py:evaluate\nweights: {first: 2, second: 1}\n"
    )
    kept.pass_everything()
    done = kept.regrade("--all")
    assert done.returncode == 0, done
    assert done.stderr == "2 graded again, 2 of them with another result\n"
    rows = {cells[1]: cells for cells in (line.split("\t") for line in done.stdout.splitlines())}
    assert rows["find-answer"][0] == kept.id(0)
    assert rows["find-answer"][2:5] == ["failed → passed", "0 → 1", "success 0 → 1"]
    assert rows["dense"][2:5] == ["failed", "0.75 → 2", "calls < 3 1 → none"]
    assert all("→" in cell for row in rows.values() for cell in row[5:])


def test_every_command_finds_the_same_problems_of_this_machine(kept: Kept) -> None:
    options = [*kept.options, "--max-sandboxes", "1000000"]
    doctor = kept.shell.run("doctor", "--port", "0", "--json", *options)
    (problem,) = [found for found in json.loads(doctor.stdout)["findings"] if not found["ok"]]
    assert problem["what"] == "kernel limits"
    check = kept.shell.run("tasks", "--check", "--json", *options)
    assert json.loads(check.stdout)["findings"] == [problem]
    for command in (("stdio",), ("regrade", "--all")):
        started = kept.shell.run(*command, *options, "--log-format", "json")
        logged = [json.loads(line) for line in started.stderr.splitlines() if line.startswith("{")]
        (warning,) = [line for line in logged if "cure" in line]
        named = {"what": warning["what"], "detail": warning["why"], "cure": warning["cure"]}
        assert problem == {"ok": False, **named}


def test_json_has_both_results_and_the_signed_verdict(kept: Kept) -> None:
    kept.pass_everything()
    (line,) = kept.lines(kept.id(0)[:6])
    assert (line["episode"], line["task"], line["suite"]) == (kept.id(0), "find-answer", "probe")
    assert line["changed"] == ["success", "reward", "metrics", "evaluator_digest", "suite_revision"]
    assert (line["before"]["reward"], line["after"]["reward"], line["file"]) == (0.0, 1.0, None)
    verdict = kept.shell.folder / "again.json"
    verdict.write_text(json.dumps(line["verdict"]))
    verified = kept.shell.run("verify", str(verdict), "--state", str(kept.state))
    assert (verified.returncode, verified.stderr) == (0, "")
    assert "find-answer scored reward 1.0, graded again, episode" in verified.stdout
    assert not (kept.folder(0) / "verdict-2.json").exists()


def test_written_verdicts_are_next_to_the_first_and_verify(kept: Kept) -> None:
    first = (kept.folder(0) / "verdict.json").read_bytes()
    kept.pass_everything()
    assert [line["file"] for line in kept.lines(kept.id(0), "--write")] == ["verdict-2.json"]
    assert [line["file"] for line in kept.lines(kept.id(0), "--write")] == ["verdict-3.json"]
    assert (kept.folder(0) / "verdict.json").read_bytes() == first
    files = [str(kept.folder(0) / name) for name in ("verdict.json", "verdict-2.json", "verdict-3.json")]
    done = kept.shell.run("verify", *files, "--state", str(kept.state))
    assert done.returncode == 0, done
    assert len(done.stdout.splitlines()) == 3
    twice = kept.shell.run("verify", files[1], files[1], "--state", str(kept.state))
    assert "the verdict of this episode was already counted" in twice.stdout


def test_attempts_are_selected_by_task(kept: Kept) -> None:
    assert [line["task"] for line in kept.lines("--task", "dense")] == ["dense"]
    assert [line["task"] for line in kept.lines("--task", "probe:dense")] == ["dense"]
    assert kept.regrade("--task", "nope").returncode == 1


def test_an_episode_that_cannot_be_graded_does_not_stop_the_others(kept: Kept) -> None:
    (kept.folder(1) / "attempt.json").unlink()
    lines = kept.lines("feed", kept.id(1), kept.id(0), status=2)
    errors = {line["episode"]: line["error"] for line in lines if "error" in line}
    assert errors["feed"] == {
        "code": "unknown_episode",
        "message": "the state folder has no episode 'feed'",
    }
    assert errors[kept.id(1)]["message"].startswith("nothing of it was kept")
    assert [line["after"]["status"] for line in lines if "after" in line] == ["scored"]
    done = kept.regrade(kept.id(1))
    assert done.returncode == 1
    assert f"decathlon-mcp: {kept.id(1)}: nothing of it was kept" in done.stderr


def test_an_evaluation_without_a_score_is_no_grade_and_writes_no_verdict(kept: Kept) -> None:
    (kept.suite / "tasks/probe/dense/evaluation/rubric.yaml").write_text("weights: nothing")
    (line,) = kept.lines(kept.id(1), "--write", status=1)
    assert (line["after"]["status"], line["file"]) == ("evaluator_error", None)
    assert f"{kept.id(1)}: evaluator_error: " in kept.regrade(kept.id(1)).stderr
    assert not (kept.folder(1) / "verdict-2.json").exists()


def test_exactly_one_way_to_select_is_required(shell: Shell) -> None:
    message = shell.error("regrade", "abc", "--all", status=1)
    assert message == "name the episodes, or select them with either --all or --task"
    assert shell.error("regrade", "--all", status=1).startswith("no attempt is kept in ")


@pytest.mark.anyio
async def test_a_running_episode_is_refused_by_name_and_skipped_by_all(shell: Shell) -> None:
    suite, state = shell.folder / "suite", shell.folder / "state"
    shutil.copytree(SUITE, suite)
    (suite / FIND_ANSWER).write_text("import time; time.sleep(1000)")
    kept = Kept(shell, suite, state, await play(suite, state, ("dense",)))

    async def lines(*arguments: str, status: int) -> list[dict[str, Any]]:
        return await anyio.to_thread.run_sync(partial(kept.lines, *arguments, status=status))

    async with serving(
        state,
        suite=(str(suite),),
        provider="host",
        isolation=ISOLATION,
        keep="workspace",
        drain_seconds=0.1,
    ) as served:
        episode = await start_and_claim(served.url)
        await anyio.to_thread.run_sync(wait_for, (state / "episodes" / episode / "attempt.json").exists)
        (line,) = await lines(public_id(episode), status=1)
        assert line["error"]["message"].startswith("it is still running")
        assert [line["task"] for line in await lines("--all", status=0)] == ["dense"]


async def start_and_claim(url: str) -> str:
    """Start an episode on the server at this URL, claim it, and return its handle."""
    async with connected(f"{url}/mcp") as lobby:
        started = (await lobby.call_tool("start_episode", {"task": "find-answer"})).structured_content
        assert started is not None
        episode: str = started["episode"]
        async with connected(f"{url}/episodes/{episode}/mcp") as client:
            await client.call_tool("claim_done", {"answer": "x"})
        return episode


def test_no_more_sandboxes_are_open_than_allowed(kept: Kept) -> None:
    log = kept.shell.folder / "log"
    for task in ("find-answer", "dense"):
        (kept.suite / f"tasks/probe/{task}/evaluation/main.py").write_text(
            f"import time\nlog = open({str(log)!r}, 'a')\n"
            "print('+', file=log, flush=True)\ntime.sleep(0.3)\nprint('-', file=log, flush=True)\n"
        )
    assert len(kept.lines("--all", "--max-sandboxes", "1")) == 2
    assert log.read_text().split() == ["+", "-"] * 2


def test_an_interrupt_in_the_middle_leaves_no_sandbox(kept: Kept) -> None:
    (kept.suite / FIND_ANSWER).write_text("import time; time.sleep(1000)")
    before = {path.name for path in kept.folder(0).iterdir()}
    with subprocess.Popen(
        [*COMMAND, "regrade", "--all", "--json", "--write", *kept.options],
        cwd=kept.shell.folder,
        env=kept.shell.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        done = json.loads(process.stdout.readline())
        wait_for(lambda: kept.sandboxes)
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode in (128 + signal.SIGINT, -signal.SIGINT), errors
    assert (done["task"], done["file"], rest) == ("dense", "verdict-2.json", "")
    assert "Traceback" not in errors
    assert kept.sandboxes == []
    assert processes_marked(kept.state) == []
    assert {path.name for path in kept.folder(0).iterdir()} == before
    assert list((kept.state / "scratch").iterdir()) == []
    assert list((kept.state / "servers").iterdir()) == []


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
