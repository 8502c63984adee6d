"""`install`: add this server to a desktop program, by the means that the program itself offers.

Claude Code and VS Code have a command, Cursor has a link; this module edits no settings file. For Claude
Desktop, and for everything else, it prints the entry to paste and the file's path.

Decided 2026-11-22: a token is never part of an entry. Entries refer to the program's environment, so that the
token is neither in a process listing nor in a settings file.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from cyclopts import Group, Parameter
from decathlon_client.bridge import address

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.cli.options import Flag
from decathlon_mcp.cli.usage import check_url, report
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.suites.loading import load_suite

ProgramName = Literal["claude-desktop", "claude-code", "cursor", "vscode"]
TITLES: dict[ProgramName, str] = {
    "claude-desktop": "Claude Desktop",
    "claude-code": "Claude Code",
    "cursor": "Cursor",
    "vscode": "VS Code",
}
PROJECT_FILES: dict[ProgramName, str] = {
    "claude-code": ".mcp.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".vscode/mcp.json",
}
TOKEN = "DECATHLON_TOKEN"
# https://code.claude.com/docs/en/mcp (environment variable expansion), https://cursor.com/docs/context/mcp
# (config interpolation), https://code.visualstudio.com/docs/reference/variables-reference.
# Claude Desktop expands nothing.
TOKEN_REFERENCES: dict[ProgramName, str] = {
    "claude-desktop": f"<the value of {TOKEN}>",
    "claude-code": f"${{{TOKEN}}}",
    "cursor": f"${{env:{TOKEN}}}",
    "vscode": f"${{env:{TOKEN}}}",
}
# Not `start` on Windows: cmd.exe would split the link at its `&`.
LINK_OPENERS = {"darwin": ["open"], "win32": ["rundll32", "url.dll,FileProtocolHandler"]}
ENTRY_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
ENTRY = Group("Entry", sort_key=3)
EntryFlag = Annotated[Flag, Parameter(group=ENTRY)]


@dataclass(frozen=True, slots=True)
class Target:
    """Where an entry goes: a program's user settings, or with `project` the settings of that folder."""

    program: ProgramName
    name: str
    project: Path | None

    @property
    def title(self) -> str:
        return TITLES[self.program]

    def add_command(self, server: dict[str, Any]) -> list[str] | None:
        """Return the command that adds the entry, or None if the program has none."""
        match self.program:
            case "claude-code":
                # `claude mcp add-json [options] <name> <json>`: https://code.claude.com/docs/en/mcp
                return ["claude", "mcp", "add-json", "--scope", self._scope, self.name, json.dumps(server)]
            case "vscode" if self.project is None:
                # User profile only: https://code.visualstudio.com/docs/copilot/customization/mcp-servers
                return ["code", "--add-mcp", json.dumps({"name": self.name, **server})]
            case "cursor" if self.project is None:
                # Cursor shows the entry and asks: https://cursor.com/docs/context/mcp/install-links
                config = base64.b64encode(json.dumps(server).encode()).decode()
                query = urlencode({"name": self.name, "config": config})
                return [
                    *LINK_OPENERS.get(sys.platform, ["xdg-open"]),
                    f"cursor://anysphere.cursor-deeplink/mcp/install?{query}",
                ]
            case _:
                return None

    def remove_command(self) -> list[str] | None:
        """Return the command that removes the entry, or None if the program has none."""
        if self.program != "claude-code":
            return None
        return ["claude", "mcp", "remove", "--scope", self._scope, self.name]

    def snippet(self, server: dict[str, Any]) -> str:
        """Return the entry as it stands in the settings file."""
        key = "servers" if self.program == "vscode" else "mcpServers"
        return json.dumps({key: {self.name: server}}, indent=2, ensure_ascii=False) + "\n"

    @property
    def settings_file(self) -> Path:
        if self.project is not None:
            return self.project / PROJECT_FILES[self.program]
        match self.program:
            case "claude-desktop":
                return _application_settings() / "Claude" / "claude_desktop_config.json"
            case "claude-code":
                return Path(os.environ.get("CLAUDE_CONFIG_DIR") or Path.home()) / ".claude.json"
            case "cursor":
                return Path.home() / ".cursor" / "mcp.json"
            case "vscode":
                return _application_settings() / "Code" / "User" / "mcp.json"

    @property
    def _scope(self) -> str:
        return "user" if self.project is None else "project"


def _validate_entry_name(kind: object, name: str) -> None:
    if not ENTRY_NAME.fullmatch(name):
        raise ValueError("An entry's name has 1 to 64 characters: letters, digits, _ and -")


def install(
    program: ProgramName,
    /,
    *,
    task: Annotated[str | None, Parameter(metavar="ID")] = None,
    suite: Annotated[tuple[str, ...], Parameter(metavar="PATH", negative=(), show_default=False)] = (),
    provider: str | None = None,
    config: Annotated[Path | None, Parameter(metavar="FILE")] = None,
    url: Annotated[str | None, Parameter(metavar="URL", validator=check_url)] = None,
    with_token: Flag = False,
    project: Annotated[Path | None, Parameter(group=ENTRY, metavar="DIR")] = None,
    name: Annotated[str, Parameter(group=ENTRY, validator=_validate_entry_name)] = "toolathlon",
    print: EntryFlag = False,  # noqa: A002
    undo: EntryFlag = False,
    yes: EntryFlag = False,
) -> int:
    """Add this server to a desktop program that people play from.

    Parameters
    ----------
    program
        The program.
    task
        Start one episode of this task. [the lobby]
    suite
        A checkout in Toolathlon's layout, or `starter`. Can be repeated. [starter]
    provider
        Sandbox backend. [the suite's default]
    config
        Settings file.
    url
        Start a bridge to the server at this URL.
    with_token
        Pass `DECATHLON_TOKEN` on from the program's environment; the token itself is not stored.
    project
        Add the entry for the project in this folder only. [for the user]
    name
        The entry's name.
    print
        Print the entry and do nothing else.
    undo
        Remove the entry.
    yes
        Do not ask for confirmation.
    """
    if project is not None and program not in PROJECT_FILES:
        raise BadRequestError(f"{TITLES[program]} has no settings per project: omit --project")
    if project is not None and not project.is_dir():
        raise BadRequestError(f"--project: {project} is not a folder")
    target = Target(program, name, project)
    if undo:
        instructions = f"Delete the entry {name!r} from {target.settings_file}.\n"
        return _run(target, target.remove_command(), instructions, yes=yes)
    command = _server_command(task, suite, provider, config, url)
    server: dict[str, Any] = {"command": command[0], "args": command[1:]}
    if program in ("claude-code", "vscode"):
        server = {"type": "stdio", **server}
    if with_token:
        server["env"] = {TOKEN: TOKEN_REFERENCES[program]}
    if print:
        sys.stdout.write(target.snippet(server))
        return 0
    if not url and not sys.platform.startswith("linux"):
        report("sandboxes require Linux; use --url to connect to a server there")
    instructions = (
        f"Add this to {target.settings_file} and restart {target.title}:\n\n{target.snippet(server)}"
    )
    if program == "claude-desktop":
        instructions = (
            f"Open the bundle with Claude Desktop (`make bundle` builds it in dist/), or:\n{instructions}"
        )
    status = _run(target, target.add_command(server), instructions, yes=yes)
    if with_token and status == 0 and program != "claude-desktop":
        sys.stdout.write(f"Start {target.title} with {TOKEN} in its environment.\n")
    return status


def _run(target: Target, command: Sequence[str] | None, instructions: str, *, yes: bool) -> int:
    """Show the command and run it if the user agrees; without a command, print the instructions.

    Returns 1 if the command was not run or failed, else 0.
    """
    if command is None:
        sys.stdout.write(instructions)
        return 0
    # By its path: on Windows `claude` and `code` are scripts, which are not found by their bare names.
    executable = shutil.which(command[0])
    if executable is None:
        report(f"{target.title} cannot be reached: no {command[0]!r} on the PATH")
        sys.stdout.write(instructions)
        return 1
    sys.stdout.write(f"{shlex.join(command)}\n")
    sys.stdout.flush()
    if not yes and not _confirm():
        return 1
    # Claude Code writes a project's entries to the working directory.
    status = subprocess.run([executable, *command[1:]], cwd=target.project, check=False).returncode
    if status == 0:
        return 0
    report(f"{command[0]} failed with exit status {status}")
    sys.stdout.write(instructions)
    return 1


def _confirm() -> bool:
    if not sys.stdin.isatty():
        raise BadRequestError("stdin is not a terminal, so nobody can confirm: use --yes to run the command")
    sys.stdout.write("Run this? [y/N] ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    sys.stdout.write("Nothing was changed.\n")
    return False


def _application_settings() -> Path:
    match sys.platform:
        case "darwin":
            return Path.home() / "Library" / "Application Support"
        case "win32":
            return Path(os.environ.get("APPDATA") or Path.home() / "AppData" / "Roaming")
        case _:
            return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")


def _server_command(
    task: str | None, suites: Sequence[str], provider: str | None, config: Path | None, url: str | None
) -> list[str]:
    """Return the command that the program starts.

    Raises UnknownTaskError or SuiteError if it would fail; the tasks of a suite that only `config` names are
    not looked up.
    """
    # An absolute path: desktop programs do not inherit the shell's PATH.
    script = Path(sys.executable).parent / ("decathlon-mcp.exe" if os.name == "nt" else "decathlon-mcp")
    command = [str(script)] if script.exists() else [sys.executable, "-m", "decathlon_mcp.cli"]
    command.append("stdio")
    if url:
        return [*command, "--url", address(url, task)]
    paths = [suite if suite == "starter" else str(Path(suite).resolve()) for suite in suites]
    if not paths and config is None:
        # Explicit: an entry shows where a checkout goes, and does not depend on the program's variables.
        paths = ["starter"]
    if task and paths:
        Catalogue([load_suite(path) for path in paths]).find(task)
    for path in paths:
        command += ["--suite", path]
    if provider:
        command += ["--provider", provider]
    if config:
        command += ["--config", str(config.resolve())]
    return [*command, "--task", task] if task else command
