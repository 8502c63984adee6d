"""Settings: flags override variables, variables override the file; errors name the source of a value."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from decathlon_mcp.cli.usage import failure_message
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.http.authentication import Tokens
from tests.cli.conftest import Shell
from tests.probe.serving import SUITE

pytestmark = pytest.mark.slow


def suites(shell: Shell, *arguments: str, **variables: str) -> set[str]:
    done = shell.run("tasks", "--json", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return {task["suite"] for task in json.loads(done.stdout)["tasks"]}


def write(shell: Shell, text: str, name: str = "decathlon.toml") -> Path:
    file = shell.folder / name
    file.write_text(text)
    return file


def test_flags_override_variables_and_variables_override_the_file(shell: Shell) -> None:
    assert suites(shell) == {"starter"}
    write(shell, f'suite = ["{SUITE}"]\nmax_sandboxes = 8\nport = 0')
    assert suites(shell) == {"probe"}
    assert suites(shell, DECATHLON_SUITE="starter") == {"starter"}
    assert suites(shell, "--suite", SUITE, DECATHLON_SUITE="starter") == {"probe"}
    both = {"probe", "starter"}
    assert suites(shell, "--suite", SUITE, "--suite", "starter") == both
    assert suites(shell, DECATHLON_SUITE=os.pathsep.join(["starter", SUITE])) == both
    write(shell, f'suite = ["starter", "{SUITE}"]', "other.toml")
    assert suites(shell, "--config", "other.toml") == both
    assert suites(shell, DECATHLON_CONFIG="other.toml") == both


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "80000"], "--port: a port from 0 to 65535 was expected, not '80000'"),
        (["--port", "http"], "--port: a whole number was expected, not 'http'"),
        (["--allowed-host", ""], "--allowed-host: a value was expected, not ''"),
        (["--public-url", "me"], "--public-url: an address was expected, such as https://tasks.example.org"),
        (["--max-sandboxes", "many"], "--max-sandboxes: must be an integer"),
        (["--idle-seconds", "inf"], "--idle-seconds: must be a finite number"),
        (["--isolation", "containers"], "--isolation: must be one of 'auto', 'namespaces' or 'none'"),
        (["--config", "no.toml"], "no.toml: No such file or directory"),
        ([], "DECATHLON_CPUS: must be greater than 0"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_before_anything_starts(
    shell: Shell, arguments: list[str], message: str
) -> None:
    variables = {} if arguments else {"DECATHLON_CPUS": "0"}
    assert shell.error("serve", *arguments, status=2, **variables).startswith(message)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (("runs", "--merge-page"), ""),  # works there, and its help does not list it
        (("runs", "--leaderbord"), "; did you mean --leaderboard?"),
        (("serve", "--merge-page"), "; did you mean --merge-pages?"),
        (("run", "--base-url", "http://user:secret@host", "--labl"), "; did you mean --label?"),
    ],
)
def test_an_unknown_option_is_compared_with_those_that_the_help_lists(
    shell: Shell, words: tuple[str, ...], hint: str
) -> None:
    assert shell.error(*words, status=2) == f"unknown option: {words[-1]}{hint}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_sandboxes = 0", "max_sandboxes: must be at least 1"),
        ("max_sandbox = 8", "there is no setting 'max_sandbox'; did you mean max_sandboxes?"),
        ("[serve]\nport = 1", "settings have no sections: remove the line [serve]"),
        ('state = "a\\u0000b"', "state: must not contain a zero byte"),
    ],
)
def test_a_value_in_the_file_that_does_not_fit_is_named(shell: Shell, text: str, message: str) -> None:
    (shell.folder / "decathlon.toml").write_text(text)
    assert shell.error("serve", status=2) == f"decathlon.toml: {message}"


def test_a_file_that_is_not_text_is_an_error(shell: Shell) -> None:
    (shell.folder / "other.toml").write_text("max_sandboxes: 8")
    assert shell.error("tasks", "--config", "other.toml", status=2).startswith("other.toml: not TOML: ")
    (shell.folder / "binary").write_bytes(b"\xff\xfe")
    assert shell.error("tasks", "--config", "binary", status=2) == "binary: not a text file (UTF-8)"
    with pytest.raises(SettingsError, match=r"--tokens: .*binary: not a text file"):
        Tokens.read(shell.folder / "binary")


def test_a_file_is_no_state_folder(shell: Shell) -> None:
    (shell.folder / "file").write_text("")
    message = "--state: file is not a folder; name the state folder of a server"
    assert shell.error("show", "--state", "file", status=1) == message
    (shell.folder / "script").write_text('{"tool": "x"}')
    message = shell.error("play", "tune-reactor", "--script", "script", "--state", "file", status=1)
    assert message == "--state: file cannot be used: File exists; choose another folder"


READING = (
    *(("runs",), ("show",), ("show", "ab"), ("replay", "ab"), ("regrade", "--all"), ("gc",)),
    *(("verify", "verdict"), ("episode", "verdict"), ("recordings", "list"), ("recordings", "show", "task")),
    ("export", "--all", "--to", "jsonl", "--output", "out"),
)
"""Commands that read a state folder."""


@pytest.mark.parametrize("command", [*READING, ("view",)], ids=" ".join)
def test_a_named_state_folder_that_does_not_exist_is_an_error(shell: Shell, command: tuple[str, ...]) -> None:
    option, words = ("STATE", ("nosuch",)) if command == ("view",) else ("--state", ("--state", "nosuch"))
    message = f"{option}: nosuch does not exist; name the state folder of a server"
    status = 2 if command[0] == "replay" else 1
    assert shell.error(*command, *words, status=status) == message
    assert shell.error(*command, status=status, DECATHLON_STATE="nosuch") == message
    assert list(shell.folder.iterdir()) == []


@pytest.mark.parametrize("command", READING, ids=" ".join)
def test_the_default_state_folder_need_not_exist(shell: Shell, command: tuple[str, ...]) -> None:
    done = shell.run(*command)
    assert "does not exist" not in done.stderr
    is_list = command in (("runs",), ("show",), ("gc",), ("recordings", "list"))
    assert done.returncode == 0 or not is_list


def test_a_full_disk_is_an_error_with_what_to_do() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/state/file")
    assert failure_message(ExceptionGroup("", [full])) == (
        "/state/file: No space left on device: free some space, or choose a folder on another disk "
        "(--state, and TMPDIR for temporary files)"
    )
    assert (
        failure_message(PermissionError(errno.EACCES, "Permission denied", "/x")) == "/x: Permission denied"
    )
    assert failure_message(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")) is None
    assert failure_message(ExceptionGroup("", [full, ValueError()])) is None
