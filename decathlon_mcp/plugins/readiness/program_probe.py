"""Finds out, in a sandbox, which programs of a suite's MCP servers are missing there.

    python3 -c SOURCE '{"root": DIR, "own": [DIR/, ...], "servers": {NAME: SERVER}}'

SERVER is `{"command", "args", "paths"}`; `paths` are files outside of the suite that it needs.
Prints `{NAME: [DESCRIPTION, DOWNLOADABLE]}` for each server with a missing program; DOWNLOADABLE: npm or uv
downloads it if there is a network. Only what is certain counts as missing: a command that is not in PATH, one
of `paths`, a file below one of the folders `own`, a package in none of the places where `npx`, `uvx` and `uv
run` find it without a network. Starts nothing. Standard library only, any Python from 3.10.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

HOME = Path.home()
FLAGS = ("-y", "--yes", "-q", "--quiet")


def main() -> None:
    """Print the missing programs as one line of JSON."""
    order = json.loads(sys.argv[1])
    root, own = Path(order["root"]), tuple(order["own"])
    missing = {
        name: program
        for name, server in order["servers"].items()
        if (program := missing_program(root, own, **server)) is not None
    }
    sys.stdout.write(json.dumps(missing) + "\n")


def missing_program(
    root: Path, own: tuple[str, ...], command: str, args: list[str], paths: list[str]
) -> tuple[str, bool] | None:
    """The missing program of one server; None if none is certain to be missing."""
    for text in (command, *args):
        if text.startswith(own) and not Path(text).exists():
            return f"the file {text}", False
    for text in paths:
        if not Path(text).exists():
            return f"the {'program' if text == command else 'file'} {text}", False
    if "/" not in command and shutil.which(command) is None:
        return f"the program {command}", False
    arguments = [arg for arg in args if arg not in FLAGS]
    first, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    match Path(command).name, first:
        case "npx", "--prefix" if len(rest) > 1:
            return npm_package(Path(rest[0]), rest[1])
        case "npx", package if package and not package.startswith("-"):
            return npm_package(root, package)
        case "uvx", "--from" if rest:
            return uv_tool(rest[0])
        case "uvx", package if package and not package.startswith("-"):
            return uv_tool(package)
        case "uv", "--directory" if rest[1:2] == ["run"]:
            return uv_project(root / rest[0], rest[2:])
        case "uv", "run":
            return uv_project(root, rest)
        case _:
            return None


def npm_package(root: Path, package: str) -> tuple[str, bool] | None:
    """`npx` finds a package in the folders above, among npm's global packages, and in its cache."""
    name = package if package.rfind("@") < 1 else package[: package.rfind("@")]
    npx = Path(shutil.which("npx") or "/")
    places = [
        *(folder / "node_modules" for folder in with_parents(root)),
        *HOME.glob(".npm/_npx/*/node_modules"),
        *(folder / "lib/node_modules" for path in (npx, npx.resolve()) for folder in with_parents(path)),
    ]
    if any((place / name).exists() or (place / ".bin" / name).exists() for place in places):
        return None
    return f"the npm package {name}", True


def uv_tool(package: str) -> tuple[str, bool] | None:
    """`uvx` finds an installed or cached tool, whose entries do not tell what they contain."""
    name = re.sub(r"[-_.]+", "-", re.split(r"[\[=<>@~! ]", package)[0]).lower()
    data = Path(os.environ.get("XDG_DATA_HOME") or HOME / ".local/share")
    cache = Path(os.environ.get("UV_CACHE_DIR") or HOME / ".cache/uv")
    tools = Path(os.environ.get("UV_TOOL_DIR") or data / "uv/tools")
    if (tools / name).exists() or shutil.which(package, path=str(HOME / ".local/bin")):
        return None
    return None if any(cache.glob("archive-*/*")) else (f"the Python tool {name}", True)


def uv_project(folder: Path, arguments: list[str]) -> tuple[str, bool] | None:
    """`uv run` finds a module, script or program in the environment of the project around the folder."""
    if not folder.is_dir():
        return f"the folder {folder}", False
    base = next((path for path in with_parents(folder) if (path / "pyproject.toml").exists()), None)
    runs_module = arguments[:1] == ["-m"] and len(arguments) > 1
    if base is None or not arguments or (arguments[0].startswith("-") and not runs_module):
        return None
    if os.environ.get("UV_PROJECT_ENVIRONMENT"):
        return None
    environment = base / ".venv"
    if not environment.is_dir():
        return f"the Python environment {environment}", True
    if runs_module:
        name = arguments[1].partition(".")[0]
        places = [base, *environment.glob("lib/python3*/site-packages")]
        exists = any(any(place.glob(f"{name}{end}")) for place in places for end in ("", ".py", ".*.so"))
        return None if exists else (f"the Python module {name}", True)
    if arguments[0].endswith(".py"):
        path = folder / arguments[0]
        return None if path.exists() else (f"the file {path}", False)
    exists = (environment / "bin" / arguments[0]).exists() or shutil.which(arguments[0])
    return None if exists else (f"the Python program {arguments[0]}", True)


def with_parents(path: Path) -> Iterator[Path]:
    """The path itself, then its parents, innermost first."""
    yield path
    yield from path.parents


if __name__ == "__main__":
    main()
