"""The programs that an entry can be written for: where each keeps its own, and what one looks like there."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from decathlon_mcp.errors import BadRequestError

ProgramName = Literal["claude-desktop", "claude-code", "cursor", "vscode"]


@dataclass(frozen=True, slots=True)
class Machine:
    """Whose files these are: `platform` as `sys.platform` has it."""

    platform: str = sys.platform
    home: Path = field(default_factory=Path.home)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @property
    def settings(self) -> Path:
        """Where programs keep their settings, each in a folder of its name."""
        match self.platform:
            case "darwin":
                return self.home / "Library" / "Application Support"
            case "win32":
                return Path(self.environ.get("APPDATA") or self.home / "AppData" / "Roaming")
            case _:
                return Path(self.environ.get("XDG_CONFIG_HOME") or self.home / ".config")


@dataclass(frozen=True, slots=True)
class Program:
    """`key` is the object that holds the entries; `project` where a folder's own are, if it has some."""

    title: str
    key: str
    project: str | None
    comments: bool
    typed: bool
    what_next: str

    def entry(self, command: list[str], environment: Mapping[str, str]) -> dict[str, Any]:
        """A server to start, in this program's words."""
        return {
            **({"type": "stdio"} if self.typed else {}),
            "command": command[0],
            "args": command[1:],
            **({"env": dict(environment)} if environment else {}),
        }


PROGRAMS: dict[ProgramName, Program] = {
    "claude-desktop": Program(
        "Claude Desktop",
        "mcpServers",
        None,
        comments=False,
        typed=False,
        what_next="Quit Claude Desktop, closing its window is not enough, and start it again.",
    ),
    "claude-code": Program(
        "Claude Code",
        "mcpServers",
        ".mcp.json",
        comments=False,
        typed=True,
        what_next="Start Claude Code anew; /mcp shows whether it is connected.",
    ),
    "cursor": Program(
        "Cursor",
        "mcpServers",
        ".cursor/mcp.json",
        comments=True,
        typed=False,
        what_next="Cursor reads it by itself; switch the server on in its settings, under MCP.",
    ),
    "vscode": Program(
        "VS Code",
        "servers",
        ".vscode/mcp.json",
        comments=True,
        typed=True,
        what_next="Start the server with the link above its entry, or with the command MCP: List Servers.",
    ),
}


def file_of(name: ProgramName, machine: Machine, project: Path | None = None) -> Path:
    """Where the program keeps its entries: a project's, or the user's. Raises BadRequestError."""
    program = PROGRAMS[name]
    if project is not None:
        if program.project is None:
            raise BadRequestError(f"{program.title} has no entries of a project: leave out --project")
        return project / program.project
    match name:
        case "claude-desktop":
            return machine.settings / "Claude" / "claude_desktop_config.json"
        case "claude-code":
            return Path(machine.environ.get("CLAUDE_CONFIG_DIR") or machine.home) / ".claude.json"
        case "cursor":
            return machine.home / ".cursor" / "mcp.json"
        case "vscode":
            return machine.settings / "Code" / "User" / "mcp.json"
