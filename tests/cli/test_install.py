"""`install`: what it runs for each program, and what it prints where there is nothing to run.

The programs are stand-ins on the PATH that record how they were called.
"""

from __future__ import annotations

import base64
import json
import os
import pty
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from decathlon_mcp.plugins.install import ProgramName, Target, install
from tests.cli.conftest import COMMAND, Shell
from tests.docs.pages import below

pytestmark = pytest.mark.slow


SECRET = "s3cret-s3cret"
STAND_IN = """#!{python}
import json, os, sys
with open({record!r}, "a") as file:
    file.write(json.dumps({{"arguments": sys.argv[1:], "folder": os.getcwd()}}) + "\\n")
sys.exit({status})
"""
SETTINGS_FILES = {
    "claude-desktop": ".config/Claude/claude_desktop_config.json",
    "claude-code": ".claude.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".config/Code/User/mcp.json",
}


@dataclass(frozen=True, slots=True)
class Desktop:
    """A home folder and a PATH that holds only stand-in programs."""

    shell: Shell
    home: Path
    programs: Path

    def add_program(self, name: str, *, status: int = 0) -> None:
        text = STAND_IN.format(python=sys.executable, record=str(self._record(name)), status=status)
        (self.programs / name).write_text(text)
        (self.programs / name).chmod(0o755)

    def calls(self, name: str) -> list[dict[str, Any]]:
        """Arguments and working directory of each call of a stand-in."""
        record = self._record(name)
        return [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []

    @property
    def environment(self) -> dict[str, str]:
        return {"HOME": str(self.home), "PATH": str(self.programs)}

    def install(self, *arguments: str, status: int = 0, **variables: str) -> str:
        """Run the command and return its stdout."""
        done = self.shell.run("install", *arguments, **self.environment, **variables)
        assert done.returncode == status, done
        assert "Traceback" not in done.stderr
        return done.stdout

    def install_and_answer(self, answer: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command on a terminal where the user types this answer."""
        terminal, stdin = pty.openpty()
        try:
            os.write(terminal, f"{answer}\n".encode())
            return subprocess.run(
                [*COMMAND, "install", *arguments],
                cwd=self.shell.folder,
                env={**self.shell.environment, **self.environment},
                stdin=stdin,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
        finally:
            os.close(terminal)
            os.close(stdin)

    def _record(self, name: str) -> Path:
        return self.programs / f"{name}.calls"


@pytest.fixture
def desktop(shell: Shell, tmp_path: Path) -> Desktop:
    for name in ("XDG_CONFIG_HOME", "CLAUDE_CONFIG_DIR"):
        shell.environment.pop(name, None)
    for name in ("home", "programs"):
        (tmp_path / name).mkdir()
    return Desktop(shell, tmp_path / "home", tmp_path / "programs")


def test_claude_code_gets_the_entry_by_its_own_command(desktop: Desktop) -> None:
    desktop.add_program("claude")
    output = desktop.install("claude-code", "--yes")
    assert output.startswith("claude mcp add-json --scope user toolathlon '{")
    (call,) = desktop.calls("claude")
    *command, entry = call["arguments"]
    assert command == ["mcp", "add-json", "--scope", "user", "toolathlon"]
    server = json.loads(entry)
    assert server["type"] == "stdio"
    assert Path(server["command"]).is_absolute()
    assert server["args"][-3:] == ["stdio", "--suite", "starter"]


def test_claude_code_gets_a_projects_entry_in_that_folder(desktop: Desktop, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    desktop.add_program("claude")
    desktop.install("claude-code", "--project", str(project), "--name", "games", "--yes")
    desktop.install("claude-code", "--project", str(project), "--name", "games", "--undo", "--yes")
    added, removed = desktop.calls("claude")
    assert added["arguments"][:5] == ["mcp", "add-json", "--scope", "project", "games"]
    assert removed["arguments"] == ["mcp", "remove", "--scope", "project", "games"]
    assert added["folder"] == removed["folder"] == str(project)


def test_vscode_gets_the_entry_by_its_own_command(desktop: Desktop) -> None:
    desktop.add_program("code")
    desktop.install("vscode", "--url", "http://127.0.0.1:8765", "--yes")
    (call,) = desktop.calls("code")
    option, entry = call["arguments"]
    server = json.loads(entry)
    assert option == "--add-mcp"
    assert (server["name"], server["type"]) == ("toolathlon", "stdio")
    assert server["args"][-3:] == ["stdio", "--url", "http://127.0.0.1:8765/mcp"]


def test_cursor_gets_an_install_link(desktop: Desktop) -> None:
    desktop.add_program("xdg-open")
    desktop.install("cursor", "--task", "tune-reactor", "--provider", "host", "--yes")
    (call,) = desktop.calls("xdg-open")
    (link,) = call["arguments"]
    assert link.startswith("cursor://anysphere.cursor-deeplink/mcp/install?name=toolathlon&config=")
    assert server_of_link(link)["args"][-7:] == [
        *("stdio", "--suite", "starter", "--provider", "host", "--task", "tune-reactor")
    ]


def test_claude_desktop_gets_instructions_with_the_bundle_and_the_settings_file(desktop: Desktop) -> None:
    output = desktop.install("claude-desktop")
    assert "make bundle" in output
    assert f"{desktop.home / SETTINGS_FILES['claude-desktop']} and restart Claude Desktop" in output
    assert entry_in(output)["toolathlon"]["args"][-3:] == ["stdio", "--suite", "starter"]


@pytest.mark.parametrize(
    ("program", "page", "heading"),
    [
        ("claude-desktop", "README.md", "Play"),
        ("vscode", "docs/desktop-programs.md", "VS Code"),
    ],
)
def test_pages_show_the_entry_that_is_installed(
    program: ProgramName, page: str, heading: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert install(program, print=True) == 0
    ((installed,),) = (entries.values() for entries in json.loads(capsys.readouterr().out).values())
    (documented, *_) = entry_in("\n" + below(page, heading, "json")[0].text).values()
    assert Path(documented["command"]).name == "decathlon-mcp"
    command = [documented["command"], *documented["args"]]
    assert command[1:] == [installed["command"], *installed["args"]][-len(command) + 1 :]
    assert documented.get("type") == installed.get("type")


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("claude-desktop --project .", 1, "Claude Desktop has no settings per project: omit --project"),
        ("claude-code --project nowhere --yes", 1, "--project: nowhere is not a folder"),
        (
            "claude-code --task tune-reactr --yes",
            2,
            "there is no task 'tune-reactr'; did you mean tune-reactor",
        ),
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_runs(
    words: str, status: int, message: str, desktop: Desktop
) -> None:
    desktop.add_program("claude")
    error = desktop.shell.error("install", *words.split(), status=status, **desktop.environment)
    assert error.startswith(message)
    assert desktop.calls("claude") == []


def test_a_program_that_is_missing_or_fails_is_named_with_the_entry_to_paste(desktop: Desktop) -> None:
    done = desktop.shell.run("install", "claude-code", "--yes", **desktop.environment)
    assert done.returncode == 1
    assert "no 'claude' on the PATH" in done.stderr
    assert str(desktop.home / SETTINGS_FILES["claude-code"]) in done.stdout
    assert "toolathlon" in entry_in(done.stdout)
    desktop.add_program("claude", status=7)
    done = desktop.shell.run("install", "claude-code", "--yes", **desktop.environment)
    assert done.returncode == 1
    assert done.stderr == "decathlon-mcp: claude failed with exit status 7\n"
    assert "toolathlon" in entry_in(done.stdout.partition("\n")[2])


def test_undo_runs_the_remove_command_or_says_what_to_delete(desktop: Desktop) -> None:
    def delete(program: str) -> str:
        return f"Delete the entry 'toolathlon' from {desktop.home / SETTINGS_FILES[program]}.\n"

    assert desktop.install("claude-code", "--undo", "--yes", status=1) == delete("claude-code")
    for executable in ("claude", "code"):
        desktop.add_program(executable)
    assert desktop.install("vscode", "--undo", "--yes") == delete("vscode")
    desktop.install("claude-code", "--undo", "--yes")
    (call,) = desktop.calls("claude")
    assert call["arguments"] == ["mcp", "remove", "--scope", "user", "toolathlon"]
    assert desktop.calls("code") == []


def test_nothing_runs_unless_the_user_agrees(desktop: Desktop) -> None:
    desktop.add_program("code")
    declined = desktop.install_and_answer("", "vscode")
    assert declined.returncode == 1
    assert declined.stdout.endswith("Run this? [y/N] Nothing was changed.\n")
    message = desktop.shell.run("install", "vscode", **desktop.environment)
    assert message.returncode == 1
    assert "use --yes" in message.stderr
    assert desktop.calls("code") == []
    agreed = desktop.install_and_answer("y", "vscode")
    assert agreed.returncode == 0
    (call,) = desktop.calls("code")
    assert call["arguments"][1] in agreed.stdout


def test_print_prints_the_entry_and_runs_nothing(desktop: Desktop) -> None:
    desktop.add_program("claude")
    output = desktop.install("claude-code", "--print", "--url", "https://host", "--task", "a")
    server = json.loads(output)["mcpServers"]["toolathlon"]
    assert server["args"][-3:] == ["stdio", "--url", "https://host/tasks/a/mcp"]
    assert set(json.loads(desktop.install("vscode", "--print"))) == {"servers"}
    assert desktop.calls("claude") == []
    assert list(desktop.home.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "executable", "reference"),
    [
        ("claude-code", "claude", "${DECATHLON_TOKEN}"),
        ("cursor", "xdg-open", "${env:DECATHLON_TOKEN}"),
        ("vscode", "code", "${env:DECATHLON_TOKEN}"),
        ("claude-desktop", "", "<the value of DECATHLON_TOKEN>"),
    ],
)
def test_a_token_is_referred_to_and_its_value_is_neither_printed_nor_passed(
    program: str, executable: str, reference: str, desktop: Desktop
) -> None:
    if executable:
        desktop.add_program(executable)
    arguments = (program, "--url", "http://host", "--with-token")
    printed = desktop.install(*arguments, "--print", DECATHLON_TOKEN=SECRET)
    ((server,),) = [list(entries.values()) for entries in json.loads(printed).values()]
    assert server["env"] == {"DECATHLON_TOKEN": reference}
    done = desktop.shell.run("install", *arguments, "--yes", **desktop.environment, DECATHLON_TOKEN=SECRET)
    assert done.returncode == 0
    assert "DECATHLON_TOKEN" in done.stdout
    arguments_passed = [argument for call in desktop.calls(executable) for argument in call["arguments"]]
    if program == "cursor":
        arguments_passed = [json.dumps(server_of_link(link)) for link in arguments_passed]
    assert all(reference in argument for argument in arguments_passed[-1:])
    assert SECRET not in f"{printed}{done.stdout}{done.stderr}{arguments_passed}"


def entry_in(output: str) -> dict[str, Any]:
    """The entries of the settings that the output shows."""
    (entries,) = json.loads(output[output.index("{\n") :]).values()
    return entries


def server_of_link(link: str) -> dict[str, Any]:
    """The server that an install link of Cursor's adds."""
    query = parse_qs(urlsplit(link).query, strict_parsing=True)
    return json.loads(base64.b64decode(query["config"][0], validate=True))


@pytest.mark.parametrize(
    ("platform", "file", "opener"),
    [
        ("darwin", "home/Library/Application Support/Claude/claude_desktop_config.json", "open"),
        ("win32", "roaming/Claude/claude_desktop_config.json", "rundll32"),
    ],
)
def test_files_and_link_openers_are_those_of_the_system(
    platform: str, file: str, opener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("HOME", "home")
    monkeypatch.setenv("APPDATA", "roaming")
    monkeypatch.setattr(sys, "platform", platform)
    assert Target("claude-desktop", "toolathlon", None).settings_file == Path(file)
    command = Target("cursor", "toolathlon", None).add_command({"command": "x"})
    assert command is not None
    assert command[0] == opener
