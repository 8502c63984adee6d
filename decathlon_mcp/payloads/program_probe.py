"""Runs where a suite's MCP servers would, sent along as source: tells which of their programs are not there.

    python3 -c SOURCE '{"root": DIR, "own": [DIR/, ...], "servers": [{"name", "command", "args"}, ...]}'

Only what can be told for sure is said to be absent: a command that no PATH has, a file in one of the folders
`own`, a package in none of the places that `npx`, `uvx` and `uv run` take it from without a network. Prints
`{server: [what, is it fetched where there is a network]}`. Nothing is started, nothing of ours is imported.
Standard library only, any Python from 3.10.
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
QUIET = ("-y", "--yes", "-q", "--quiet")


def main() -> None:
    """What is absent, as one line of JSON."""
    order = json.loads(sys.argv[1])
    root, own = Path(order["root"]), tuple(order["own"])
    found = {
        each["name"]: what
        for each in order["servers"]
        if (what := absent(root, own, each["command"], each["args"])) is not None
    }
    sys.stdout.write(json.dumps(found) + "\n")


def absent(root: Path, own: tuple[str, ...], command: str, args: list[str]) -> tuple[str, bool] | None:
    """What of a server's program is not there."""
    for text in (command, *args):
        if text.startswith(own) and not Path(text).exists():
            return f"the file {text}", False
    if "/" not in command and shutil.which(command) is None:
        return f"the program {command}", False
    words = [word for word in args if word not in QUIET]
    first, rest = (words[0], words[1:]) if words else ("", [])
    match Path(command).name, first:
        case "npx", package if package and not package.startswith("-"):
            return npm(root, package)
        case "uvx", "--from" if rest:
            return tool(rest[0])
        case "uvx", package if package and not package.startswith("-"):
            return tool(package)
        case "uv", "--directory" if rest[1:2] == ["run"]:
            return project(root / rest[0], rest[2:])
        case "uv", "run":
            return project(root, rest)
        case _:
            return None


def npm(root: Path, package: str) -> tuple[str, bool] | None:
    """`npx` takes a package from the folders above, from npm's own, or from what it has once fetched."""
    name = package if package.rfind("@") < 1 else package[: package.rfind("@")]
    npx = Path(shutil.which("npx") or "/")
    places = [
        *(folder / "node_modules" for folder in above(root)),
        *HOME.glob(".npm/_npx/*/node_modules"),
        *(folder / "lib/node_modules" for path in (npx, npx.resolve()) for folder in above(path)),
    ]
    if any((place / name).exists() or (place / ".bin" / name).exists() for place in places):
        return None
    return f"the npm package {name}", True


def tool(package: str) -> tuple[str, bool] | None:
    """`uvx` takes a tool that is installed; of one in its cache nothing can be told."""
    name = re.sub(r"[-_.]+", "-", re.split(r"[\[=<>@~! ]", package)[0]).lower()
    data = Path(os.environ.get("XDG_DATA_HOME") or HOME / ".local/share")
    cache = Path(os.environ.get("UV_CACHE_DIR") or HOME / ".cache/uv")
    tools = Path(os.environ.get("UV_TOOL_DIR") or data / "uv/tools")
    if (tools / name).exists() or shutil.which(package, path=str(HOME / ".local/bin")):
        return None
    return None if any(cache.glob("archive-*/*")) else (f"the Python tool {name}", True)


def project(folder: Path, words: list[str]) -> tuple[str, bool] | None:
    """`uv run` takes a module, a script or a program from the environment of the project that it is in."""
    if not folder.is_dir():
        return f"the folder {folder}", False
    base = next((each for each in above(folder) if (each / "pyproject.toml").exists()), None)
    runs_module = words[:1] == ["-m"] and len(words) > 1
    if base is None or not words or (words[0].startswith("-") and not runs_module):
        return None
    if os.environ.get("UV_PROJECT_ENVIRONMENT"):
        return None
    environment = base / ".venv"
    if not environment.is_dir():
        return f"the Python environment {environment}", True
    if runs_module:
        name = words[1].partition(".")[0]
        places = [base, *environment.glob("lib/python3*/site-packages")]
        there = any(any(place.glob(f"{name}{end}")) for place in places for end in ("", ".py", ".*.so"))
        return None if there else (f"the Python module {name}", True)
    if words[0].endswith(".py"):
        path = folder / words[0]
        return None if path.exists() else (f"the file {path}", False)
    there = (environment / "bin" / words[0]).exists() or shutil.which(words[0])
    return None if there else (f"the Python program {words[0]}", True)


def above(path: Path) -> Iterator[Path]:
    """The folder, the one that it is in, and so on."""
    yield path
    yield from path.parents


if __name__ == "__main__":
    main()
