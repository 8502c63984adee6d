"""MCP server `files`: the files and folders of one workspace. Run as `files_server.py WORKSPACE`."""

import fnmatch
import hashlib
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp_types import ToolAnnotations
from pydantic import Field

from workspace import Workspace

MAX_TEXT_BYTES = 1024 * 1024
MAX_ENTRIES = 500
MAX_MATCHES = 200

READ_ONLY = ToolAnnotations(read_only_hint=True, open_world_hint=False)
ADDITIVE = ToolAnnotations(read_only_hint=False, destructive_hint=False, open_world_hint=False)
DESTRUCTIVE = ToolAnnotations(read_only_hint=False, destructive_hint=True, open_world_hint=False)

AnyPath = Annotated[str, Field(description="Relative to the workspace, or absolute and inside it.")]

workspace = Workspace(sys.argv[1])
server = MCPServer("files", log_level="WARNING")


@server.tool(annotations=READ_ONLY, structured_output=False)
def list_directory(
    path: AnyPath = ".",
    depth: Annotated[int, Field(ge=1, le=10, description="Number of levels to show.")] = 3,
) -> str:
    """Show a folder as a tree, with the size of each file in bytes. Hidden folders are not expanded."""
    folder = workspace.resolve(path)
    if not folder.is_dir():
        raise ToolError(f"There is no folder {path!r}")
    lines = list(_tree(folder, depth, ""))
    if len(lines) > MAX_ENTRIES:
        lines[MAX_ENTRIES:] = [f"... and {len(lines) - MAX_ENTRIES} more; list a subfolder"]
    return "\n".join(lines) or "(empty)"


def _tree(folder: Path, depth: int, indent: str) -> Iterator[str]:
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink():
            yield f"{indent}{entry.name} -> {entry.readlink()}"
        elif entry.is_dir():
            yield f"{indent}{entry.name}/"
            if depth > 1 and not entry.name.startswith("."):
                yield from _tree(entry, depth - 1, indent + "  ")
        else:
            yield f"{indent}{entry.name}  {entry.stat().st_size}"


@server.tool(annotations=READ_ONLY, structured_output=False)
def read_file(
    path: AnyPath,
    first_line: Annotated[int, Field(ge=1, description="First line to return.")] = 1,
    lines: Annotated[int, Field(ge=1, description="Maximum number of lines.")] = 2000,
) -> str:
    """Read a text file (UTF-8, at most 1 MiB), or a range of its lines."""
    all_lines = _text(path).splitlines(keepends=True)
    if first_line > max(1, len(all_lines)):
        raise ToolError(f"{path!r} has only {len(all_lines)} lines")
    part = all_lines[first_line - 1 : first_line - 1 + lines]
    remaining = len(all_lines) - (first_line - 1) - len(part)
    return "".join(part) + (
        f"\n[{remaining} more lines; continue with first_line={first_line + len(part)}]" if remaining else ""
    )


@server.tool(annotations=DESTRUCTIVE, structured_output=False)
def write_file(path: AnyPath, text: str) -> str:
    """Write a text file (UTF-8), replacing an existing one; missing folders are created."""
    target = workspace.resolve(path)
    if target.is_dir():
        raise ToolError(f"{path!r} is a folder")
    _make_folder(target.parent)
    return f"Wrote {_write(target, text)} bytes to {workspace.name(target)}"


@server.tool(annotations=DESTRUCTIVE, structured_output=False)
def edit_file(
    path: AnyPath,
    old: Annotated[
        str, Field(min_length=1, description="The exact text to replace, including whitespace and line ends.")
    ],
    new: Annotated[str, Field(description="The replacement.")],
    every: Annotated[
        bool, Field(description="Replace all occurrences; otherwise there must be exactly one.")
    ] = False,
) -> str:
    """Replace text in a text file."""
    text = _text(path)
    count = text.count(old)
    if count == 0:
        raise ToolError(f"The text to replace does not occur in {path!r}")
    if count > 1 and not every:
        raise ToolError(
            f"The text to replace occurs {count} times in {path!r}: give a longer text, or every=true"
        )
    target = workspace.file(path)
    _write(target, text.replace(old, new))
    return f"Replaced {count} occurrence{'s' if count > 1 else ''} in {workspace.name(target)}"


@server.tool(annotations=DESTRUCTIVE, structured_output=False)
def move_file(
    source: AnyPath,
    destination: Annotated[str, Field(description="The new path, including the name; it must not exist.")],
) -> str:
    """Move or rename a file or folder; missing folders are created. Never overwrites."""
    old, new = workspace.resolve(source), workspace.resolve(destination)
    if old == workspace.root or not old.exists():
        raise ToolError(f"There is nothing to move at {source!r}")
    if new.exists():
        raise ToolError(f"{destination!r} exists already")
    if new.is_relative_to(old):
        raise ToolError("A folder cannot be moved into itself")
    _make_folder(new.parent)
    old.rename(new)
    return f"Moved {workspace.name(old)} to {workspace.name(new)}"


@server.tool(annotations=ADDITIVE, structured_output=False)
def make_directory(path: AnyPath) -> str:
    """Create a folder and its missing parents. It may exist already."""
    folder = workspace.resolve(path)
    _make_folder(folder)
    return f"{workspace.name(folder)}/ is there"


@server.tool(annotations=DESTRUCTIVE, structured_output=False)
def delete_file(path: AnyPath) -> str:
    """Delete a file or an empty folder."""
    target = workspace.resolve(path)
    if target == workspace.root or not target.exists():
        raise ToolError(f"There is nothing to delete at {path!r}")
    try:
        target.rmdir() if target.is_dir() else target.unlink()
    except OSError as error:
        raise ToolError(f"{path!r} was not deleted: {error.strerror}") from None
    return f"Deleted {workspace.name(target)}"


@server.tool(annotations=READ_ONLY, structured_output=False)
def search_files(
    text: Annotated[
        str, Field(min_length=1, description="The exact text to search for, within single lines.")
    ],
    path: AnyPath = ".",
    name: Annotated[str, Field(description="Only files whose names match this pattern, e.g. '*.csv'.")] = "*",
    ignore_case: bool = False,
) -> str:
    """Find the lines that contain a text, in all text files below a folder; hidden folders are skipped."""
    folder = workspace.resolve(path)
    needle = text.casefold() if ignore_case else text
    matches: list[str] = []
    for file in _files(folder):
        if not fnmatch.fnmatchcase(file.name, name) or file.stat().st_size > MAX_TEXT_BYTES:
            continue
        for number, line in enumerate(file.read_text("utf-8", errors="replace").splitlines(), 1):
            if needle in (line.casefold() if ignore_case else line):
                matches.append(f"{workspace.name(file)}:{number}: {line[:300]}")
                if len(matches) == MAX_MATCHES:
                    return "\n".join([*matches, "[more; search for something rarer]"])
    return "\n".join(matches) or "(no line contains it)"


def _files(folder: Path) -> Iterator[Path]:
    for entry in sorted(folder.iterdir()) if folder.is_dir() else [folder]:
        if entry.is_symlink():
            continue
        if entry.is_dir():
            if not entry.name.startswith("."):
                yield from _files(entry)
        elif entry.is_file():
            yield entry


@server.tool(annotations=READ_ONLY, structured_output=False)
def file_info(path: AnyPath) -> str:
    """Show what a path is: kind, size in bytes, time of the last change (UTC), SHA-256 of a file."""
    target = workspace.resolve(path)
    if not target.exists():
        raise ToolError(f"There is nothing at {path!r}")
    status = target.stat()
    changed = datetime.fromtimestamp(status.st_mtime, UTC).isoformat(timespec="seconds")
    if target.is_dir():
        return f"folder, {sum(1 for _ in target.iterdir())} entries, changed {changed}"
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return f"file, {status.st_size} bytes, changed {changed}, sha256 {digest}"


def _text(path: str) -> str:
    file = workspace.file(path)
    if file.stat().st_size > MAX_TEXT_BYTES:
        raise ToolError(f"{path!r} is larger than {MAX_TEXT_BYTES} bytes")
    try:
        return file.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        raise ToolError(f"{path!r} is not a UTF-8 text file") from None


def _write(target: Path, text: str) -> int:
    if len(data := text.encode("utf-8")) > MAX_TEXT_BYTES:
        raise ToolError(f"The text is larger than {MAX_TEXT_BYTES} bytes")
    return target.write_bytes(data)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise ToolError(f"{workspace.name(folder)!r} cannot be a folder: a file is in the way") from None


if __name__ == "__main__":
    server.run()
