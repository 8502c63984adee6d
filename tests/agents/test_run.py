"""`run` with a scripted program and a scripted model: limits, verdicts, tables, and what is played again."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from decathlon_client.client_values import CLAIM
from decathlon_client.script import Step
from decathlon_client.testing import scripted_model

from decathlon_mcp.cli.command_line import run
from decathlon_mcp.plugins.agents.agent_programs import PRESETS
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.starter import TEMPLATE_TASK, copy_template
from tests.agents.models import Answer, posting
from tests.probe.leftovers import processes_marked
from tests.probe.serving import SUITE

PROGRAM = Path(__file__).with_name("scripted_agent.py")
NO_MODEL = ("--model-url", "http://127.0.0.1:9")
"""For programs that need none."""
TASK = ("find-answer", "--suite", SUITE)
"""Its server takes a tenth of the time of those of bundled tasks."""
SOLUTION = (Step("probe__write", {"path": "answer.txt", "text": "42"}), Step(CLAIM, {"answer": "42"}))
ODD = (Step("probe__odd"),)
KEY = "sk-secret-of-a-test"
PASSWORD = "kept-password"


def play(*options: str, words: tuple[str, ...]) -> int:
    """Run the command in this process, with a script's words; returns its exit status."""
    return run(_line((*options, "--json"), words))


def _line(
    options: tuple[str, ...], words: tuple[str, ...], tasks: tuple[str, ...] = ("find-answer",)
) -> list[str]:
    program = [sys.executable, str(PROGRAM), *words]
    return ["run", *tasks, "--suite", SUITE, *options, "--show", str(PROGRAM.parent), "--", *program]


def results(output: str) -> list[dict[str, Any]]:
    """The lines of `--json`, in the order of tasks and attempts."""
    lines = map(json.loads, output.splitlines())
    return sorted(lines, key=lambda line: (line["task"], line["attempt"]))


def verdict_of(output: str) -> dict[str, Any]:
    """The verdict of the only attempt."""
    (result,) = results(output)
    return result["verdict"]


def notes(state: Path) -> str:
    """All notes of the only episode."""
    (trajectory,) = state.glob("episodes/*/trajectory.jsonl")
    lines = [json.loads(line) for line in trajectory.read_text("utf-8").splitlines()]
    return "".join(line["text"] for line in lines if line.get("event") == "note" or "text" in line)


def saying(text: str) -> AbstractContextManager[str]:
    """A web server that answers every POST with a text. Yields its URL."""
    return posting(lambda path, headers, body: (200, {}, text.encode()))


def refusing(url: str, refuses: Callable[[int], tuple[int, str] | None]) -> AbstractContextManager[str]:
    """An endpoint in front of the one at `url`; `refuses`: what it answers instead to the n-th request."""
    count = itertools.count()

    def answer(path: str, headers: Mapping[str, str], body: bytes) -> Answer:
        if refusal := refuses(next(count)):
            return refusal[0], {}, refusal[1].encode()
        with urllib.request.urlopen(urllib.request.Request(f"{url}/chat/completions", body)) as response:
            return 200, {}, response.read()

    return posting(answer)


@pytest.mark.usefixtures("namespaces")
def test_program_plays_and_reaches_nothing_but_its_episode_and_its_model(
    state: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECATHLON_TOKEN", "secret")
    with saying("the model") as model, saying("another program") as other:
        status = play(
            *("--model-url", model.replace("127.0.0.1", "localhost"), "--label", "kind=test"),
            words=(
                *("environment", "say", "{prompt}|{address}|{mcp_config}", "solve"),
                *("post", f"{model}/", "post", f"{other}/"),
                *("post", "http://127.0.0.1:8765/", "post", "http://127.0.0.1:8765/tasks/find-answer/mcp"),
                *("list", "/", "/agent/home", str(state), SUITE, str(Path(SUITE).parent)),
            ),
        )
    assert status == 0
    output, errors = capfd.readouterr()
    verdict = verdict_of(output)
    assert verdict["reward"] == 1.0
    assert verdict["claimed"]
    assert verdict["labels"]["agent"] == Path(sys.executable).name
    assert verdict["labels"]["agent_isolation"] == "namespaces"
    assert verdict["labels"]["kind"] == "test"
    environment = json.loads(next(line for line in errors.splitlines() if line.startswith("{")))
    assert environment["HOME"] == "/agent/home"
    assert "DECATHLON_TOKEN" not in environment
    assert "DECATHLON_STATE" not in environment
    handle = next(state.glob("episodes/*")).name
    assert handle not in errors
    assert f"{environment['DECATHLON_PROMPT']}|http://127.0.0.1:8765/mcp|/agent/" in errors
    lines = errors.splitlines()
    (tools,) = [line for line in lines if line.startswith("tools ")]
    assert "claim_done" in tools
    assert "evaluate" not in tools
    assert tools.endswith("prompt True")
    answers = lines[lines.index("The attempt is closed. It is graded as it is.") + 1 :]
    assert answers[:4] == ["200 the model", "unreachable URLError", "404", "404"]
    files = json.loads(answers[4])
    programs = {Path(folder).parts[1] for folder in (sys.prefix, sys.base_prefix)}
    assert not ({"opt", "srv", "sys", "boot"} - programs) & set(files["/"])
    assert not files.get(str(state))
    assert not files.get(SUITE)
    assert not files.get(str(Path(SUITE).parent))
    assert "the model" in notes(state)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("options", "words", "calls", "program_status"),
    [
        (NO_MODEL, ("tools", "steal", "say", "wrong key", "fail"), 0, "3"),
        (("--model-url", "none"), ("call", "probe__odd"), 1, "0"),
        (NO_MODEL, ("call", "probe__odd", "post", "http://127.0.0.1:9/", "fail"), 1, "3"),
    ],
    ids=["tools listed and descriptors taken", "a call without a model", "a call, and the model is away"],
)
def test_whatever_a_program_has_done_is_graded_with_its_exit_status(
    state: Path,
    capfd: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    words: tuple[str, ...],
    calls: int,
    program_status: str,
) -> None:
    assert play(*options, words=words) == 0
    output, errors = capfd.readouterr()
    verdict = verdict_of(output)
    assert (verdict["reward"], verdict["labels"]["program_status"]) == (0.0, program_status)
    message = "the attempt ended before a call; the program's output ends with: "
    assert (message in errors) == (not calls)
    if not calls:
        assert errors.partition(message)[2].splitlines()[0].endswith("wrong key")
    if "steal" in words:
        assert "taken []" in errors


@pytest.mark.usefixtures("namespaces")
def test_program_whose_model_is_away_has_no_verdict(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play(*NO_MODEL, words=("tools", "post", "http://127.0.0.1:9/", "fail")) == 1
    output, errors = capfd.readouterr()
    assert verdict_of(output) is None
    assert "made no call, and its model could not be reached (127.0.0.1:9: " in errors


@pytest.mark.usefixtures("namespaces")
def test_program_that_is_not_started_has_no_verdict(
    state: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    program = tmp_path / "bin" / "agent"
    program.parent.mkdir()
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    command = ["run", *TASK, *NO_MODEL, "--json", "--", str(program)]
    assert run(command) == 1
    output, errors = capfd.readouterr()
    assert verdict_of(output) is None
    assert "agent was not started: " in errors
    program.write_text("#!/bin/sh\necho as if it had not been started\nexit 127\n")
    assert run(command) == 0
    verdict = verdict_of(capfd.readouterr().out)
    assert (verdict["reward"], verdict["labels"]["program_status"]) == (0.0, "127")


@pytest.mark.slow
def test_table_has_an_attempt_in_each_column_and_the_same_numbers_as_the_run(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    tasks = ("find-answer", "say-answer")
    options = ("--attempts", "2", "--jobs", "4", "--trust-command", "--run", "evening")
    assert run(_line(options, ("solve",), tasks)) == 0
    output, errors = capfd.readouterr()
    lines = output.splitlines()
    assert lines[:3] == [
        "find-answer\t1\t1\t1.000",
        "say-answer\t0\t0\t0.000",
        "pass@1 0.500 ± 0.500 (mean over 2 tasks with its standard error)",
    ]
    assert "run evening: 4 attempts at 2 tasks" in errors
    assert "find-answer, attempt 2: reward 1 (" in errors
    assert "say-answer, attempt 1: reward 0, failed (" in errors
    for line in lines[3:]:
        # What is shown to look at it works.
        if " view " not in line:
            words = shlex.split(line, comments=True)
            assert run([*words[1:], *(() if "--state" in words else ("--state", str(state)))]) == 0
    assert "success rate, mean over tasks: 0.500 ± 0.500" in capfd.readouterr().out


@pytest.mark.slow
def test_run_that_was_killed_plays_only_what_is_missing(
    state: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--attempts", "2", "--jobs", "1", "--trust-command")
    line = _line(options, ("solve",))
    command = [sys.executable, "-m", "decathlon_mcp.cli", *line]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        done = 0
        for text in process.stderr:
            done += ": reward " in text
            if done == 1:
                break
        # Another process that plays the same run would make its attempts twice.
        assert run(line) == 2
        assert "is being played by another process" in capfd.readouterr().err
        process.kill()
        process.communicate(timeout=30)
    before = {folder.name for folder in state.glob("episodes/*") if (folder / "verdict.json").exists()}
    assert len(before) == 1
    assert run([*line[: line.index("--")], "--json", *line[line.index("--") :]]) == 0
    output, errors = capfd.readouterr()
    played = results(output)
    assert [(one["attempt"], one["resumed"]) for one in played] == [(0, True), (1, False)]
    assert "2 attempts at 1 task, 1 of them with a verdict already" in errors
    # All of a task got the same prompt.
    history = EpisodeHistory([state])
    of_task = [history.episode(one["episode"]) for one in played]
    assert len({details.launch_time for details in of_task if details is not None}) == 1
    # Nothing is missing now; the same command shows the table.
    assert run(line) == 0
    output, errors = capfd.readouterr()
    assert "pass@1 1.000" in output
    assert "--run NAME begins another run" in errors


@pytest.mark.slow
def test_attempts_without_calls_are_played_again_only_when_asked_for(
    state: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--attempts", "2", "--jobs", "1", "--trust-command")
    words = ("once", str(tmp_path / "was here"), "solve")
    for more, rewards in (
        ((), [0.0, 1.0]),
        ((), [0.0, 1.0]),
        (("--again-without-calls",), [1.0, 1.0]),
    ):
        assert play(*options, *more, words=words) == 0
        output, errors = capfd.readouterr()
        played = results(output)
        assert [one["verdict"]["reward"] for one in played] == rewards
        assert "every attempt ended" not in errors
    assert [one["verdict"]["labels"].get("again") for one in played] == ["without_calls", None]
    assert [one["verdict"]["labels"]["program_status"] for one in played] == ["running"] * 2
    assert len(list(state.glob("episodes/*"))) == 3


@pytest.mark.slow
@pytest.mark.parametrize("words", [("fail",), ("call", "claim_done")])
def test_terminal_does_not_obey_what_a_program_writes(
    state: Path, capfd: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    # The first would set the clipboard, the second the window's title.
    text = "\x1b]52;c;cm0gLXJm\x07 and \x9b2J\x1b]0;title\x07"
    play("--trust-command", words=("say", text, *words))
    errors = capfd.readouterr().err
    assert "title" in errors
    assert not [letter for letter in errors if letter != "\n" and not letter.isprintable()]


def wrong_key_once(number: int) -> tuple[int, str] | None:
    return (401, f"wrong key {KEY}") if number == 0 else None


def too_long(number: int) -> tuple[int, str] | None:
    return (400, "maximum context length exceeded") if number == 2 else None


@pytest.mark.slow
def test_lost_attempt_is_named_and_counts_as_no_zero(
    state: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with scripted_model(SOLUTION) as url, refusing(url, wrong_key_once) as refused:
        unsteady = f"{refused}/v1".replace("://", f"://user:{PASSWORD}@")
        line = ["run", *TASK, "--model", "scripted", "--base-url", unsteady, "--attempts", "2"]
        line += ["--jobs", "1", "--run", "unsteady"]
        assert run(line) == 1
        output, errors = capfd.readouterr()
        assert output.splitlines()[:2] == [
            "find-answer\tlost\t1\t1.000",
            "pass@1 1.000 (mean over 1 task)",
        ]
        assert "no verdict: the model at http://***@127.0.0.1:" in errors
        assert "answered 401: wrong key [key]" in errors
        assert "lost, and not counted as 0: find-answer, attempt 1" in errors
        assert KEY not in errors
        assert PASSWORD not in errors + output
        assert run([*line[:6], "--base-url", f"ftp://user:{PASSWORD}@host"]) == 2
        assert PASSWORD not in capfd.readouterr().err
        assert run(line) == 0
        assert capfd.readouterr().out.splitlines()[0] == "find-answer\t1\t1\t1.000"
    kept = [*state.glob("**/*.log"), *state.glob("**/*.jsonl")]
    files = [file.read_text("utf-8", "replace") for file in kept]
    assert not [text for text in files if KEY in text or PASSWORD in text]


@pytest.mark.slow
def test_model_plays_on_a_server_that_runs_already(
    state: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    ready = tmp_path / "url"
    command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--port", "0", "--ready-file", str(ready)]
    command += ["--suite", SUITE]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 60
            while not ready.exists() or not ready.read_text():
                assert time.monotonic() < deadline
                time.sleep(0.05)
            line = ["run", "find-answer", "--url", ready.read_text().strip(), "--model", "scripted"]
            with scripted_model(SOLUTION, "Let me look.") as url:
                for _ in range(2):
                    assert run([*line, "--base-url", url, "--json"]) == 0
            first, second = map(json.loads, capfd.readouterr().out.splitlines())
            assert first["verdict"]["labels"]["model"] == "scripted"
            assert (first["resumed"], second["resumed"]) == (False, True)
            assert first["episode"] == second["episode"]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=60)
    assert "Let me look." in notes(state)


@pytest.mark.slow
@pytest.mark.parametrize("reason", ["turns", "context"])
def test_model_that_does_not_end_or_fills_its_context_is_truncated(
    state: Path, capfd: pytest.CaptureFixture[str], reason: str
) -> None:
    with scripted_model(ODD * 9) as url, refusing(url, too_long) as short:
        line = ["run", *TASK, "--model", "scripted", "--base-url"]
        line += [url, "--max-turns", "3"] if reason == "turns" else [f"{short}/v1"]
        assert run([*line, "--json"]) == 0
    verdict = verdict_of(capfd.readouterr().out)
    assert (verdict["truncated"], verdict["reward"]) == (True, 0.0)
    assert verdict["metrics"]["calls"] == (3.0 if reason == "turns" else 2.0)


def known_program(folder: Path, version: str) -> Path:
    """A program named as Claude Code's is, that plays the script. Returns its folder, for the PATH."""
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / "claude"
    program.write_text(
        f'#!/bin/sh\nif [ "$1" = --version ]; then echo "{version} (Claude Code)"; exit; fi\n'
        f'exec {sys.executable} {PROGRAM} say "$*" solve\n'
    )
    program.chmod(0o755)
    return program.parent


@pytest.mark.slow
def test_known_program_is_started_with_its_own_options(
    state: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = known_program(tmp_path, PRESETS["claude"].version)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    line = ["run", *TASK, "--agent", "claude", "--model", "opus", "--trust-command", "--json"]
    assert run(line) == 0
    output, errors = capfd.readouterr()
    verdict = verdict_of(output)
    assert (verdict["reward"], verdict["labels"]["agent_version"]) == (1.0, PRESETS["claude"].version)
    assert "warning" not in errors
    assert "--model opus -p " in errors
    assert "/mcp.json --strict-mcp-config --tools" in errors


@pytest.mark.slow
def test_other_version_of_a_known_program_is_refused_where_its_tools_would_act_on_this_machine(
    state: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", f"{known_program(tmp_path, '2.9.0')}:{os.environ['PATH']}")
    assert run(["run", *TASK, "--agent", "claude", "--trust-command"]) == 2
    errors = capfd.readouterr().err
    assert "claude 2.9.0 may have tools of its own that act on this machine" in errors
    assert f"npm install -g @anthropic-ai/claude-code@{PRESETS['claude'].version}" in errors
    assert list(state.glob("episodes/*")) == []


@pytest.mark.parametrize(
    ("trusted", "lists"), [(False, True), (True, False)], ids=["namespaces, listed", "trusted, counted"]
)
def test_program_gets_no_variable_that_it_is_not_given(
    state: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    trusted: bool,
    lists: bool,
) -> None:
    if not trusted:
        request.getfixturevalue("namespaces")
    for name in ("GITHUB_TOKEN", "OPENAI_API_KEY", "DECATHLON_TOKEN", "KEPT_SECRET"):
        monkeypatch.setenv(name, f"value of {name}")
    options = ["--trust-command"] if trusted else NO_MODEL
    given = ("--env", "OPENAI_API_KEY", "--env", "MODE=fast=1", *options)
    if lists:
        given += ("--list-withheld",)
        for number in range(100):
            monkeypatch.setenv(f"ANOTHER_{number}", "x")
    assert play(*given, words=("environment",)) == 0
    errors = capfd.readouterr().err
    environment = json.loads(next(line for line in errors.splitlines() if line.startswith("{")))
    assert environment["OPENAI_API_KEY"] == "value of OPENAI_API_KEY"
    assert environment["MODE"] == "fast=1"
    assert "value of GITHUB_TOKEN" not in environment.values()
    assert "value of KEPT_SECRET" not in environment.values()
    assert "value of DECATHLON_TOKEN" not in errors
    withheld = [line for line in errors.splitlines() if "withheld from the program" in line]
    assert len(withheld) == 1  # and not again after the attempt, which made no call
    count = re.match(r"decathlon-mcp: (\d+) variables withheld", withheld[0])
    assert count is not None
    assert int(count[1]) >= 2
    assert ("--list-withheld names them" in withheld[0]) is not lists
    # A name is shown where it was asked for.
    for name in ("GITHUB_TOKEN", "KEPT_SECRET"):
        assert errors.count(name) == (1 if lists else 0)
    assert "value of KEPT" not in errors


@pytest.mark.usefixtures("namespaces")
def test_folders_in_which_a_suite_or_its_repository_lies_are_not_shown(
    state: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    repository = tmp_path / "repository"
    copy_template(repository / "suites" / "mine")
    git = ["git", "-C", str(repository), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    agent = repository / "agent"
    agent.write_text("#!/bin/sh\n")
    agent.chmod(0o755)
    suite = ("--suite", str(repository / "suites" / "mine"))
    command = ["run", TEMPLATE_TASK, *suite, *NO_MODEL]
    shown = ("", "suites/mine/tasks", ".git/objects")
    for folder in shown:
        assert run([*command, "--show", str(repository / folder), "--", "true"]) == 2
        assert f"--show {repository / folder}" in capfd.readouterr().err
    assert run([*command, "--", str(agent)]) == 2
    assert f"the program's folder {repository} has" in capfd.readouterr().err


def _sleeping(mark: str) -> bool:
    """Whether a process sleeps for that time."""
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if process.read_bytes().split(b"\0")[1:2] == [mark.encode()]:
                return True
        except OSError:
            continue
    return False


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "trusted"),
    [(signal.SIGINT, False), (signal.SIGKILL, False), (signal.SIGKILL, True), (None, False), (None, True)],
    ids=["interrupted", "killed", "killed and trusted", "out of time", "out of time and trusted"],
)
@pytest.mark.long
def test_nothing_is_left_of_a_program(
    state: Path, request: pytest.FixtureRequest, number: signal.Signals | None, trusted: bool
) -> None:
    if not trusted:
        request.getfixturevalue("namespaces")
    mark = f"4712.{os.getpid()}"
    options = ("--trust-command",) if trusted else NO_MODEL
    options += ("--json", *(("--player-seconds", "8") if number is None else ()))
    words = ("call", "probe__odd", "daemon", mark, "environment", "wait")
    command = [sys.executable, "-m", "decathlon_mcp.cli", *_line(options, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        home = ""
        for line in process.stderr:
            if line.startswith('{"'):
                home = json.loads(line)["HOME"]
            if line == "waiting\n":
                break
        assert _sleeping(mark)
        if number is not None:
            process.send_signal(number)
        output, _ = process.communicate(timeout=60)
    if number is None:
        assert process.returncode == 0
        verdict = verdict_of(output)
        assert (verdict["truncated"], verdict["labels"]["program_status"]) == (True, "killed")
    else:
        assert process.returncode == (130 if number == signal.SIGINT else -number)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and (
        _sleeping(mark) or processes_marked(state) or _remains(home, trusted)
    ):
        time.sleep(0.05)
    assert not _sleeping(mark)
    assert not processes_marked(state)
    assert not _remains(home, trusted)


def _remains(home: str, trusted: bool) -> bool:
    return trusted and Path(home).parent.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["tune-reactor"], "name who plays: --agent NAME, --model NAME, or a command after `--`"),
        (["--url", "http://a.test", "--", "true"], "--url is for --model: a program plays on a server in"),
        (["--max-turns", "3", "--", "true"], "--base-url and --max-turns are for --model alone"),
        (["tune-reactor", "--split", "train", "--", "true"], "name tasks, or filters to play all that fit"),
        (["tune-reactor", *NO_MODEL, "--", "no-such-program"], "there is no program no-such-program"),
        (["tune-reactor", "--", "true"], "the program can reach no model: name its address with"),
        (["tune-reactor", "--model-url", "ftp://a", "--", "true"], "--model-url ftp://a: expected http"),
        (["tune-reactor", "--model-url", "http://[::1]:8", "--", "true"], "expected http or https"),
        (["tune-reactor", *NO_MODEL, "--", "cat", "script"], "name script as /"),
        (["tune-reactor", *NO_MODEL, "--show", "/", "--", "true"], "all of / would have to be shown"),
        (["tune-reactor", "--env", "HOME=/secret", "--", "true"], "--env 'HOME': this variable"),
        (["tune-reactor", "--model", "gpt-5"], "OPENAI_API_KEY is not set: give the key there, or name"),
    ],
)
@pytest.mark.usefixtures("namespaces", "state")
def test_mistakes_are_explained(
    line: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    (tmp_path / "script").touch()
    assert run(["run", *(word.replace("{here}", str(tmp_path)) for word in line)]) == 2
    assert message in capfd.readouterr().err


@pytest.mark.usefixtures("state")
def test_without_namespaces_the_command_must_be_trusted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "decathlon_mcp.plugins.agents.run_agents.why_unavailable", lambda: "there is no bwrap"
    )
    assert run(["run", "tune-reactor", "--", "no-such-program"]) == 2
    assert "there is no program no-such-program on the PATH" in capfd.readouterr().err
    assert run(["run", "tune-reactor", "--", "true"]) == 1
    assert "there is no bwrap. With --trust-command it runs as an ordinary process" in capfd.readouterr().err


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("mode", ["none", "namespaces"])
def test_terminal_says_before_the_first_attempt_that_sandboxes_isolate_nothing(
    capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest, mode: str
) -> None:
    if mode == "namespaces":
        request.getfixturevalue("namespaces")
    with scripted_model(SOLUTION) as url:
        line = ["run", *TASK, "--model", "scripted", "--base-url", url, "--isolation", mode]
        assert run(line) == 0
    errors = capfd.readouterr().err
    warning = "the sandboxes of the suite probe isolate nothing: what an agent runs there can do"
    assert errors.count(warning) == (1 if mode == "none" else 0)
    assert errors.find(warning) < errors.index("find-answer, attempt 1: reward 1")
