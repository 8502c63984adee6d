"""Runs where a suite's MCP servers would, sent along as source: tells which of their programs are not there.

    python3 -c SOURCE '{"root": DIR, "own": [DIR/, ...], "servers": [{"name", "command", "args"}, ...]}'

Only what can be told for sure is said to be absent: a command that no PATH has, a file in one of the folders
`own`, a package in none of the places that `npx`, `uvx` and `uv run` take it from without a network. Prints
`{server: [what, is it fetched where there is a network]}`. Nothing is started, nothing of ours is imported.
Standard library only, any Python from 3.10.
"""

# Paths are texts here, as the commands have them.
# ruff: noqa: PTH

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator

HOME = os.path.expanduser("~")


def main() -> None:
    """What is absent, as one line of JSON."""
    order = json.loads(sys.argv[1])
    own = tuple(order["own"])
    found = {
        each["name"]: what
        for each in order["servers"]
        if (what := absent(order["root"], own, each["command"], each["args"])) is not None
    }
    sys.stdout.write(json.dumps(found) + "\n")


def absent(root: str, own: tuple[str, ...], command: str, args: list[str]) -> tuple[str, bool] | None:
    """What of a server's program is not there."""
    for text in (command, *args):
        if text.startswith(own) and not os.path.exists(text):
            return f"the file {text}", False
    if "/" not in command and shutil.which(command) is None:
        return f"the program {command}", False
    words = [word for word in args if word not in ("-y", "--yes", "-q", "--quiet")]
    first, rest = (words[0], words[1:]) if words else ("", [])
    match os.path.basename(command), first:
        case "npx", package if package and not package.startswith("-"):
            return npm(root, package)
        case "uvx", "--from" if rest:
            return tool(rest[0])
        case "uvx", package if package and not package.startswith("-"):
            return tool(package)
        case "uv", "--directory" if rest[1:2] == ["run"]:
            return project(os.path.join(root, rest[0]), rest[2:])
        case "uv", "run":
            return project(root, rest)
        case _:
            return None


def npm(root: str, package: str) -> tuple[str, bool] | None:
    """`npx` takes a package from the folders above, from npm's own, or from what it has once fetched."""
    name = package if package.rfind("@") < 1 else package[: package.rfind("@")]
    places = [os.path.join(folder, "node_modules") for folder in above(root)]
    places += glob.glob(os.path.join(HOME, ".npm", "_npx", "*", "node_modules"))
    npx = shutil.which("npx") or "/"
    for folder in (*above(os.path.dirname(npx)), *above(os.path.dirname(os.path.realpath(npx)))):
        places.append(os.path.join(folder, "lib", "node_modules"))
    if any(
        os.path.exists(os.path.join(place, *under, name)) for place in places for under in ((), (".bin",))
    ):
        return None
    return f"the npm package {name}", True


def tool(package: str) -> tuple[str, bool] | None:
    """`uvx` takes a tool that is installed; of one in its cache nothing can be told."""
    name = re.sub(r"[-_.]+", "-", re.split(r"[\[=<>@~! ]", package)[0]).lower()
    data = os.environ.get("XDG_DATA_HOME") or os.path.join(HOME, ".local", "share")
    cache = os.environ.get("UV_CACHE_DIR") or os.path.join(HOME, ".cache", "uv")
    tools = os.environ.get("UV_TOOL_DIR") or os.path.join(data, "uv", "tools")
    if os.path.exists(os.path.join(tools, name)) or shutil.which(
        package, path=os.path.join(HOME, ".local", "bin")
    ):
        return None
    return None if glob.glob(os.path.join(cache, "archive-*", "*")) else (f"the Python tool {name}", True)


def project(folder: str, words: list[str]) -> tuple[str, bool] | None:
    """`uv run` takes a module, a script or a program from the environment of the project that it is in."""
    if not os.path.isdir(folder):
        return f"the folder {folder}", False
    base = next(
        (each for each in above(folder) if os.path.exists(os.path.join(each, "pyproject.toml"))), None
    )
    runs_module = words[:1] == ["-m"] and len(words) > 1
    if base is None or not words or (words[0].startswith("-") and not runs_module):
        return None
    if os.environ.get("UV_PROJECT_ENVIRONMENT"):
        return None
    environment = os.path.join(base, ".venv")
    if not os.path.isdir(environment):
        return f"the Python environment {environment}", True
    if runs_module:
        name = words[1].partition(".")[0]
        places = [base, *glob.glob(os.path.join(environment, "lib", "python3*", "site-packages"))]
        there = any(glob.glob(os.path.join(place, f"{name}{end}")) for place in places for end in ENDS)
        return None if there else (f"the Python module {name}", True)
    if words[0].endswith(".py"):
        path = os.path.join(folder, words[0])
        return None if os.path.exists(path) else (f"the file {path}", False)
    there = os.path.exists(os.path.join(environment, "bin", words[0])) or shutil.which(words[0])
    return None if there else (f"the Python program {words[0]}", True)


ENDS = ("", ".py", ".*.so")


def above(path: str) -> Iterator[str]:
    """The folder, the one that it is in, and so on."""
    yield path
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        yield path


if __name__ == "__main__":
    main()
