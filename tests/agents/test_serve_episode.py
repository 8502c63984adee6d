"""`serve-episode`: one episode at an address that only plays, and `verdict`, which grades it."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.cli.command_line import run
from decathlon_mcp.plugins.agents.serving import SOCKET
from tests.agents.models import RECIPE
from tests.agents.scripted_agent import HEADERS, Client, answer_of


@contextmanager
def served(state: Path, *options: str) -> Generator[dict[str, str]]:
    """Serve one episode of tune-reactor in another process.

    Yields what it prints, as `grading` the command that it names on stderr, and as `warnings` what is there
    before.
    """
    command = [sys.executable, "-m", "decathlon_mcp.cli", "serve-episode", "tune-reactor", "--port", "0"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = process.stdout.readline()
        assert line, process.stderr.read().decode()
        try:
            warnings = ""
            while "grades it" not in (line_of_errors := process.stderr.readline().decode()):
                assert line_of_errors, warnings
                warnings += line_of_errors
            *_, grading, _ = line_of_errors.split("`")
            yield {**json.loads(line), "grading": grading, "warnings": warnings}
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
            assert run(shlex.split(episode["grading"])[1:]) == 0
            verdicts.append(capfd.readouterr().out)
        assert verdicts[0] == verdicts[1]
        verdict = json.loads(verdicts[0])
        assert (verdict["reward"], verdict["claimed"], verdict["labels"]) == (1.0, False, {"kind": "test"})
        assert failed(agent.call("files__read_file", path="recipe.json"))
        (state / "verdict.json").write_text(verdicts[0])
        assert run(["verify", str(state / "verdict.json")]) == 0


@pytest.mark.slow
def test_terminal_says_that_the_sandbox_of_a_served_episode_isolates_nothing(state: Path) -> None:
    with served(state, "--isolation", "none") as episode:
        assert "the sandboxes of the suite starter isolate nothing" in episode["warnings"]


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
