"""Programs of servers that can start as forks, and requirements on the process that they are forked from."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path, PurePosixPath
from typing import Any

from decathlon_mcp.sandboxes.host.host_files import HostFiles
from decathlon_mcp.sandboxes.host.mounts import RootFiles
from decathlon_mcp.types import JsonObject

MERGED_VARIABLES = {"PYTHONHASHSEED": "0"}
MINIMAL_VARIABLES = ("HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER")
"""Both as in `decathlon_sandbox.child_processes`."""
COMPARED_PREFIXES = ("PYTHON", "LC_", "LD_", "MALLOC_", "GLIBC_")
COMPARED_NAMES = (
    *("LANG", "LANGUAGE", "TZ", "PATH", "HOME", "OPENSSL_CONF", "OPENSSL_MODULES", "SSL_CERT_FILE"),
    *("SSL_CERT_DIR", "TMPDIR", "TERM", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"),
)
"""Variables that interpreters and the C library read when they start: a fork has its origin's values."""
PYTHON_VARIABLES = (
    *("PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONHASHSEED", "PYTHONIOENCODING", "PYTHONUTF8"),
    *("PYTHONNOUSERSITE", "PYTHONSAFEPATH", "PYTHONOPTIMIZE"),
)
"""Python's variables with which a server can be a fork."""
_OPTIONS = re.compile(r"-[PuBOqs]+")
_SHEBANG_BYTES = 256
_PYTHON_NAME = re.compile(r"python(3(\.\d+)?)?")
_IMPORT = re.compile(r"^(?:from|import)\s+([A-Za-z_]\w*)", re.MULTILINE)


class NotPythonError(Exception):
    """The server starts by itself; the argument says why."""


@dataclass(frozen=True, slots=True)
class Program:
    """A server's program in a Python, without the arguments that only the server reads.

    All fields but `own` are the same for every sandbox.
    """

    command: tuple[str, ...]
    """What is executed: the interpreter, its options, and the module or script."""
    replaced: tuple[str, ...]
    """The beginning of the server's command line that `command` stands for."""
    name: str
    """The file that the kernel names the process after."""
    script: str | None
    """The script's absolute path; None for a module."""
    variables: tuple[tuple[str, str], ...]
    """The variables that interpreters read."""
    own: tuple[str, ...]
    """The server's own packages, which are not libraries."""

    @property
    def key(self) -> str:
        """Identifies the program."""
        parts = [self.command, self.replaced, self.variables]
        return sha256(json.dumps(parts).encode()).hexdigest()[:32]


def program_of(spec: JsonObject, files: RootFiles, *, merged: bool = False) -> Program:
    """The program of a server, of its SERVER object. Raises NotPythonError. Blocks.

    `merged`: whether its sandbox's memory is merged with other sandboxes'.
    """
    if not isinstance(files, HostFiles):
        raise NotPythonError("its sandbox has the files of an image")
    environment = _environment(spec, files, MERGED_VARIABLES if merged else {})
    variables = {
        name: value
        for name, value in environment.items()
        if name.startswith(COMPARED_PREFIXES) or name in COMPARED_NAMES
    }
    refused = [
        name
        for name in variables
        if name.startswith(("LD_", "MALLOC_", "GLIBC_"))
        or (name.startswith("PYTHON") and name not in PYTHON_VARIABLES)
    ]
    if refused:
        raise NotPythonError(f"it has the variable {refused[0]}")
    arguments: list[str] = [spec["command"], *spec["args"]]
    found = _find(arguments[0], environment.get("PATH", ""), files)
    if _PYTHON_NAME.fullmatch(found.name):
        interpreter, replaced_by, rest = [arguments[0]], 1, arguments[1:]
        script = None
    else:
        interpreter = _shebang(found)
        _find(interpreter[0], "", files)
        replaced_by, rest, script = 1, [], str(found)
    options = list[str]()
    while rest and _OPTIONS.fullmatch(rest[0]):
        options.append(rest.pop(0))
    if script is not None:
        command, own = [*interpreter, script], own_packages(found)
    elif rest[:1] == ["-m"] and len(rest) > 1:
        command, own = [*interpreter, *options, *rest[:2]], [rest[1].partition(".")[0]]
        replaced_by = len(command)
    elif rest and PurePosixPath(rest[0]).is_absolute():
        script, own = rest[0], []
        command = [*interpreter, *options, script]
        replaced_by = len(command)
    else:
        raise NotPythonError("it runs neither a module nor a script with an absolute path")
    return Program(
        tuple(command),
        tuple(arguments[:replaced_by]),
        found.name,
        script,
        tuple(variables.items()),
        tuple(own),
    )


def _environment(spec: JsonObject, files: HostFiles, own: Mapping[str, str]) -> Mapping[str, Any]:
    """What the driver gives the server, as far as it can be known. `own`: variables of the driver's."""
    base: dict[str, str] = {**files.environment, "HOME": str(files.user.home)}
    if spec["inherit"] == "minimal":
        base = {name: value for name, value in base.items() if name in MINIMAL_VARIABLES}
    return {**base, **own, **spec["env"]}


def _find(name: str, path: str, files: HostFiles) -> Path:
    """A program that no sandbox can replace. Raises NotPythonError."""
    folders = [name] if "/" in name else [f"{folder}/{name}" for folder in path.split(":")]
    for place in map(Path, folders):
        if not place.is_absolute() or not _is_shown(place, files):
            raise NotPythonError(f"{place} could be the sandbox's own")
        if os.access(place, os.X_OK):
            return place
    raise NotPythonError(f"there is no {name}")


def _is_shown(place: Path, files: HostFiles) -> bool:
    if ".." in place.parts:
        return False
    return place.parts[1] in ("usr", "bin", "sbin") or any(map(place.is_relative_to, files.shown))


def _shebang(script: Path) -> list[str]:
    """The interpreter of a script, and its argument. Raises NotPythonError."""
    try:
        with script.open("rb") as file:
            line = file.read(_SHEBANG_BYTES).partition(b"\n")[0]
    except OSError as error:
        raise NotPythonError(f"{script.name} cannot be read") from error
    parts = os.fsdecode(line.removeprefix(b"#!")).split(maxsplit=1)
    if not line.startswith(b"#!") or not parts or not _PYTHON_NAME.fullmatch(Path(parts[0]).name):
        raise NotPythonError("it is no Python program")
    if len(parts) > 1 and not _OPTIONS.fullmatch(parts[1].strip()):
        raise NotPythonError("its first line has other options")
    return [part.strip() for part in parts]


def own_packages(script: Path) -> list[str]:
    """The packages that an installed script imports: the server's own."""
    try:
        return _IMPORT.findall(script.read_text("utf-8", "replace")[:10_000])
    except OSError:
        return []
