"""`serve-episode` with a scripted program: what it reaches, its limits, its verdict, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.cli.app import run
from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.plugins.agents.verdict_socket import SOCKET
from decathlon_mcp.sandboxes.host import isolation as host_isolation
from decathlon_mcp.starter import TEMPLATE_TASK, copy_template, suite_path
from tests.agents.scripted_agent import HEADERS, RECIPE, Client, answer_of
from tests.probe.leftovers import processes_marked

PROGRAM = Path(__file__).with_name("scripted_agent.py")
NO_MODEL = ("--model-url", "http://127.0.0.1:9")
"""For programs that need none."""
Play = Callable[..., int]


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder of the command, whose other settings are the default ones."""
    for name in os.environ:
        if name.startswith(PREFIX) or name.endswith("_BASE_URL"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "state"
    monkeypatch.setenv("DECATHLON_STATE", str(folder))
    return folder


@pytest.fixture
def namespaces() -> None:
    if reason := host_isolation.why_unavailable():
        pytest.skip(f"no namespaces here: {reason}")


def play(*options: str, words: tuple[str, ...], task: str = "tune-reactor") -> int:
    """Run the command in this process, with a script's words; returns its exit status."""
    return run(_line(options, words, task))


def _line(options: tuple[str, ...], words: tuple[str, ...], task: str = "tune-reactor") -> list[str]:
    chosen = [task] if task else []
    program = [sys.executable, str(PROGRAM), *words]
    return ["serve-episode", *chosen, "--run", *options, "--show", str(PROGRAM.parent), "--", *program]


def notes(state: Path) -> str:
    """All notes of the only episode."""
    (trajectory,) = state.glob("episodes/*/trajectory.jsonl")
    lines = [json.loads(line) for line in trajectory.read_text("utf-8").splitlines()]
    return "".join(line["text"] for line in lines if line.get("event") == "note" or "text" in line)


@contextmanager
def answering(text: str) -> Generator[int]:
    """A web server that answers every POST with a text. Yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.mark.usefixtures("namespaces")
def test_program_plays_and_reaches_nothing_but_its_episode_and_its_model(
    state: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECATHLON_TOKEN", "secret")
    with answering("the model") as model, answering("another program") as other:
        status = play(
            *("--model-url", f"http://localhost:{model}", "--label", "kind=test"),
            words=(
                *("environment", "say", "{prompt}|{address}|{mcp_config}", "solve"),
                *("post", f"http://127.0.0.1:{model}/", "post", f"http://127.0.0.1:{other}/"),
                *("post", "http://127.0.0.1:8765/", "post", "http://127.0.0.1:8765/tasks/tune-reactor/mcp"),
                *("list", "/", "/agent/home", str(state), str(suite_path()), str(suite_path().parent)),
            ),
        )
    assert status == 0
    output, errors = capfd.readouterr()
    verdict = json.loads(output)
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
    assert not {"opt", "srv", "sys", "boot"} & set(files["/"])
    assert not files.get(str(state))
    assert not files.get(str(suite_path()))
    assert not files.get(str(suite_path().parent))
    assert "the model" in notes(state)


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(
    ("words", "expected", "program_status"),
    [
        (("tools", "say", "wrong key", "fail"), 5, "3"),
        (("say", "wrong key"), 5, "0"),
        (("steal", "say", "wrong key", "fail"), 5, "3"),
        (("call", "lab__describe_reactor", "fail"), 4, "3"),
        (("call", "lab__describe_reactor", "post", "http://127.0.0.1:9/", "fail"), 4, "3"),
    ],
    ids=["tools listed", "no call", "descriptors taken", "a call", "a call, and the model is away"],
)
def test_whatever_a_program_has_done_is_graded_with_its_exit_status(
    state: Path,
    capfd: pytest.CaptureFixture[str],
    words: tuple[str, ...],
    expected: int,
    program_status: str,
) -> None:
    assert play(*NO_MODEL, words=words) == expected
    output, errors = capfd.readouterr()
    verdict = json.loads(output)
    assert (verdict["reward"], verdict["labels"]["program_status"]) == (0.0, program_status)
    message = "the attempt ended before a call; the program's output ends with: "
    assert (message in errors) == (expected == 5)
    if expected == 5:
        assert errors.rstrip().partition(message)[2].endswith("wrong key")
    if "steal" in words:
        assert "taken []" in errors


@pytest.mark.usefixtures("namespaces")
def test_program_whose_model_is_away_has_no_verdict(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert play(*NO_MODEL, words=("tools", "post", "http://127.0.0.1:9/", "fail")) == 5
    output, errors = capfd.readouterr()
    assert not output
    assert "made no call, and its model could not be reached (127.0.0.1:9: " in errors


@pytest.mark.usefixtures("namespaces")
def test_program_whose_model_is_away_until_its_time_is_over_has_no_verdict(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("post", "http://127.0.0.1:9/", "wait")
    assert play(*NO_MODEL, "--player-seconds", "4", words=words) == 5
    output, errors = capfd.readouterr()
    assert not output
    assert "its model could not be reached" in errors


@pytest.mark.parametrize("trusted", [False, True], ids=["namespaces", "trusted"])
def test_program_that_is_not_started_has_no_verdict(
    state: Path,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    tmp_path: Path,
    trusted: bool,
) -> None:
    if not trusted:
        request.getfixturevalue("namespaces")
    tmp_path.chmod(0o755)
    program = tmp_path / "bin" / "agent"
    program.parent.mkdir()
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    options = ["--trust-command"] if trusted else NO_MODEL
    assert run(["serve-episode", "tune-reactor", "--run", *options, "--", str(program)]) == 5
    output, errors = capfd.readouterr()
    assert not output
    assert "agent was not started: " in errors
    program.write_text("#!/bin/sh\necho as if it had not been started\nexit 127\n")
    assert run(["serve-episode", "tune-reactor", "--run", *options, "--", str(program)]) == 5
    verdict = json.loads(capfd.readouterr().out)
    assert (verdict["reward"], verdict["labels"]["program_status"]) == (0.0, "127")


@pytest.mark.slow
@pytest.mark.parametrize("trusted", [False, True], ids=["namespaces", "trusted"])
@pytest.mark.long
def test_program_that_never_ends_is_killed_with_all_that_it_started(
    state: Path, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest, trusted: bool
) -> None:
    if not trusted:
        request.getfixturevalue("namespaces")
    mark = f"4711.{os.getpid()}"
    options = ["--trust-command"] if trusted else NO_MODEL
    words = ("call", "lab__describe_reactor", "daemon", mark, "environment", "wait")
    assert play("--player-seconds", "8", *options, words=words) == 4
    output, errors = capfd.readouterr()
    assert "waiting" in errors
    verdict = json.loads(output)
    assert verdict["truncated"]
    assert verdict["labels"]["program_status"] == "killed"
    assert verdict["labels"]["agent_isolation"] == ("none" if trusted else "namespaces")
    assert not _sleeping(mark)
    if trusted:
        (line,) = [line for line in errors.splitlines() if line.startswith('{"')]
        home = Path(json.loads(line)["HOME"])
        assert home != Path.home()
        assert not home.parent.exists()


@pytest.mark.slow
@pytest.mark.long
def test_claimed_attempt_of_a_program_that_never_ends_is_not_truncated(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert play("--player-seconds", "8", "--trust-command", words=("solve", "wait")) == 0
    verdict = json.loads(capfd.readouterr().out)
    assert not verdict["truncated"]
    assert verdict["reward"] == 1.0


@pytest.mark.slow
@pytest.mark.long
def test_calls_are_limited(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("call", "lab__describe_reactor") * 3
    assert play("--trust-command", "--max-calls", "1", words=words) == 4
    output, errors = capfd.readouterr()
    assert json.loads(output)["metrics"]["calls"] == 1.0
    assert "limit" in errors


@pytest.mark.slow
def test_table_is_resumed(state: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--tasks", "tune-reactor", "--attempts", "2", "--concurrency", "2", "--trust-command")
    options = (*options, "--resume", str(tmp_path / "verdicts.jsonl"))
    assert play(*options, words=("solve",), task="") == 0
    summary = capfd.readouterr().out.splitlines()
    assert summary[0].split() == ["task", "episodes", "lost", "mean", "spread", "pass@1", "pass@2"]
    assert summary[1].split()[:4] == ["tune-reactor", "2", "0", "1.000"]
    assert play(*options, "--json", words=("solve",), task="") == 0
    results = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [(result["attempt"], result["verdict"]["reward"]) for result in results] == [(0, 1.0), (1, 1.0)]
    assert len(list(state.glob("episodes/*"))) == 2


@pytest.mark.slow
def test_attempts_without_calls_are_played_again_only_when_asked_for(
    state: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    verdicts = tmp_path / "verdicts.jsonl"
    options = ("--tasks", "tune-reactor", "--attempts", "2", "--trust-command", "--json")
    options = (*options, "--resume", str(verdicts))
    words = ("once", str(tmp_path / "was here"), "solve")
    for more, expected, rewards in (
        ((), 4, [0.0, 1.0]),
        ((), 4, [0.0, 1.0]),
        (("--again-without-calls",), 0, [1.0, 1.0]),
        (("--again-without-calls",), 0, [1.0, 1.0]),
    ):
        assert play(*options, *more, words=words, task="") == expected
        output, errors = capfd.readouterr()
        results = sorted(map(json.loads, output.splitlines()), key=lambda result: result["attempt"])
        assert [result["verdict"]["reward"] for result in results] == rewards
        assert "every attempt ended" not in errors
    assert [result["verdict"]["labels"].get("again") for result in results] == ["without_calls", None]
    assert [result["verdict"]["labels"]["program_status"] for result in results] == ["running"] * 2
    assert len(verdicts.read_bytes().splitlines()) == 2
    assert len(list(state.glob("episodes/*"))) == 3
    assert list(tmp_path.glob(".verdicts*")) == []


@pytest.mark.slow
def test_run_whose_attempts_all_end_before_a_call_says_so(
    state: Path, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ("--tasks", "tune-reactor", "--attempts", "2", "--concurrency", "2", "--trust-command")
    options = (*options, "--resume", str(tmp_path / "verdicts.jsonl"))
    assert play(*options, words=("say", "wrong key", "fail"), task="") == 5
    errors = capfd.readouterr().err
    assert "every attempt ended before a call; the program's output ends with: wrong key" in errors
    # Those that have a verdict are others, which do not change why this one says it.
    assert play(*options, words=("solve",), task="") == 5


@pytest.mark.parametrize("trusted", [False, True], ids=["namespaces", "trusted"])
def test_program_gets_no_variable_that_it_is_not_given(
    state: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    trusted: bool,
) -> None:
    if not trusted:
        request.getfixturevalue("namespaces")
    for name in ("GITHUB_TOKEN", "OPENAI_API_KEY", "DECATHLON_TOKEN", "KEPT_SECRET"):
        monkeypatch.setenv(name, f"value of {name}")
    options = ["--trust-command"] if trusted else NO_MODEL
    given = ("--env", "OPENAI_API_KEY", "--env", "MODE=fast=1", *options)
    assert play(*given, words=("environment",)) == 5
    errors = capfd.readouterr().err
    environment = json.loads(next(line for line in errors.splitlines() if line.startswith("{")))
    assert environment["OPENAI_API_KEY"] == "value of OPENAI_API_KEY"
    assert environment["MODE"] == "fast=1"
    assert "value of GITHUB_TOKEN" not in environment.values()
    assert "value of KEPT_SECRET" not in environment.values()
    assert "value of DECATHLON_TOKEN" not in errors
    withheld = [line for line in errors.splitlines() if "that the program does not get" in line]
    assert len(withheld) == 2  # at the start, and because the program has made no call
    assert all("GITHUB_TOKEN" in line and "KEPT_SECRET" in line for line in withheld)
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
    command = ["serve-episode", TEMPLATE_TASK, "--run", *suite, *NO_MODEL]
    shown = ("", "suites", "suites/mine", "suites/mine/tasks", ".git", ".git/objects")
    for folder in shown:
        assert run([*command, "--show", str(repository / folder), "--", "true"]) == 1
        assert f"--show {repository / folder}" in capfd.readouterr().err
    assert run([*command, "--", str(agent)]) == 1
    assert f"the program's folder {repository} has" in capfd.readouterr().err


@contextmanager
def served(state: Path, *options: str) -> Generator[dict[str, str]]:
    """Serve one episode of tune-reactor in another process; yields what it prints."""
    command = [sys.executable, "-m", "decathlon_mcp.cli", "serve-episode", "tune-reactor", "--port", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        try:
            yield json.loads(line)
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert not (state / SOCKET).exists()


def failed(reply: dict[str, Any]) -> bool:
    return "error" in reply or bool(reply["isError"])


@pytest.mark.slow
def test_served_episode_is_played_at_its_address_and_graded_by_a_command_alone(
    state: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    state.mkdir()
    with socket.socket(socket.AF_UNIX) as left_by_a_killed_server:
        left_by_a_killed_server.bind(str(state / SOCKET))
    assert run(["episode", "verdict"]) == 1
    assert f"no episode is served with the state folder {state}" in capfd.readouterr().err
    launch_time = "2026-03-04T05:06:07+00:00"
    with served(state, "--launch-time", launch_time, "--label", "kind=test") as episode:
        assert episode["task"] == "tune-reactor"
        assert "2026-03-04 05:06:07" in episode["prompt"]
        address = episode["address"]
        assert address.endswith("/mcp")
        agent = Client(address)
        assert agent.instructions == episode["prompt"]
        tools = {tool["name"] for tool in agent.request("tools/list", {})["tools"]}
        assert {"files__write_file", "claim_done"} <= tools
        assert "evaluate" not in tools
        assert "there is no tool 'evaluate'" in agent.call("evaluate")["error"]["message"]
        root = address.removesuffix("mcp")
        handle = next(state.glob("episodes/*")).name
        for path in ("", "tasks/tune-reactor/mcp", f"episodes/{handle}/mcp", "mcp/", "healthz"):
            assert answer_of(root + path) == "404"
        # By another name than its own, as a page with a name of its own would ask.
        foreign = urllib.request.Request(address, b"{}", {**HEADERS, "Host": "decathlon"})
        with pytest.raises(urllib.error.HTTPError, match="421"):
            urllib.request.urlopen(foreign)
        assert run(["serve-episode", "tune-reactor", "--port", "0"]) == 1
        assert "another episode is served with the state folder" in capfd.readouterr().err
        written = agent.call("files__write_file", path="recipe.json", text=RECIPE)
        assert not failed(written), written
        verdicts: list[str] = []
        for _ in range(2):
            assert run(["episode", "verdict"]) == 0
            verdicts.append(capfd.readouterr().out)
        assert verdicts[0] == verdicts[1]
        verdict = json.loads(verdicts[0])
        assert (verdict["reward"], verdict["claimed"], verdict["labels"]) == (1.0, False, {"kind": "test"})
        assert failed(agent.call("files__read_file", path="recipe.json"))
        (state / "verdict.json").write_text(verdicts[0])
        assert run(["verify", str(state / "verdict.json")]) == 0


@pytest.mark.slow
@pytest.mark.long
def test_served_attempt_is_truncated_after_its_time(state: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with served(state, "--player-seconds", "0.5", "--allowed-host", "decathlon") as episode:
        request = urllib.request.Request(episode["address"], b"{}", {**HEADERS, "Host": "decathlon"})
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request)
        agent = Client(episode["address"])
        deadline = time.monotonic() + 30
        while not failed(agent.call("files__list_directory", path=".")):
            assert time.monotonic() < deadline
        assert run(["episode", "verdict"]) == 4
        verdict = json.loads(capfd.readouterr().out)
        assert (verdict["reward"], verdict["truncated"]) == (0.0, True)
        agent.call("files__write_file", path="recipe.json", text=RECIPE)
        assert run(["episode", "verdict"]) == 4


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
    [(signal.SIGINT, False), (signal.SIGKILL, False), (signal.SIGKILL, True)],
    ids=["interrupted", "killed", "killed and trusted"],
)
@pytest.mark.long
def test_nothing_is_left_of_a_program(
    state: Path, request: pytest.FixtureRequest, number: signal.Signals, trusted: bool
) -> None:
    if not trusted:
        request.getfixturevalue("namespaces")
    mark = f"4712.{os.getpid()}"
    options = ("--trust-command",) if trusted else NO_MODEL
    command = [
        sys.executable,
        "-m",
        "decathlon_mcp.cli",
        *_line(options, ("daemon", mark, "environment", "wait")),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        home = ""
        for line in process.stderr:
            if line.startswith('{"'):
                home = json.loads(line)["HOME"]
            if line == "waiting\n":
                break
        assert _sleeping(mark)
        process.send_signal(number)
        process.communicate(timeout=30)
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
        (["tune-reactor", "--run"], "give the command: decathlon-mcp serve-episode TASK --run -- COMMAND"),
        (["tune-reactor", "--", "true"], "give the command: "),
        (["tune-reactor", "--attempts", "2"], "give the task alone, without options for a command"),
        (["--run", "--", "true"], "give the command: "),
        (["nope", "--run", "--trust-command", "--", "true"], "there is no task 'nope'"),
        (
            ["tune-reactor", "--run", *NO_MODEL, "--", "no-such-program"],
            "there is no program no-such-program",
        ),
        (["tune-reactor", "--run", "--", "true"], "the program can reach no model: name its address with"),
        (
            ["tune-reactor", "--run", "--model-url", "ftp://a", "--", "true"],
            "--model-url ftp://a: expected http",
        ),
        (["tune-reactor", "--run", *NO_MODEL, "--", "cat", "script"], "name script as /"),
        (["tune-reactor", "--run", *NO_MODEL, "--", "cat", "{here}/script"], "add --show "),
        (
            ["tune-reactor", "--run", *NO_MODEL, "--show", "/", "--", "true"],
            "all of / would have to be shown",
        ),
        (["tune-reactor", "--run", "--env", "NO_SUCH", "--", "true"], "--env 'NO_SUCH': there is no such"),
        (["tune-reactor", "--run", "--env", "HOME=/secret", "--", "true"], "--env 'HOME': this variable"),
        (
            ["tune-reactor", "--run", "--again-without-calls", "--", "true"],
            "--again-without-calls is about the verdicts in the file of --resume",
        ),
        (["--split", "starter", "--seed", "1", "--run", "--", "true"], "--seed is for"),
    ],
)
@pytest.mark.usefixtures("namespaces", "state")
def test_mistakes_are_explained(
    line: list[str], message: str, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "script").touch()
    assert run(["serve-episode", *(word.replace("{here}", str(tmp_path)) for word in line)]) == 1
    assert message in capfd.readouterr().err


@pytest.mark.usefixtures("state")
def test_without_namespaces_the_command_must_be_trusted(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "decathlon_mcp.plugins.agents.serve_episode.why_unavailable", lambda: "there is no bwrap"
    )
    assert run(["serve-episode", "tune-reactor", "--run", "--", "true"]) == 1
    assert "there is no bwrap. With --trust-command it runs as an ordinary process" in capfd.readouterr().err
