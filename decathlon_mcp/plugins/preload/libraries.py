"""The libraries that a server imports, learnt from one start of it, and kept in the state folder."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import anyio
import msgspec
from anyio import to_thread

from decathlon_mcp.plugins.preload.forkable_programs import Program
from decathlon_mcp.plugins.preload.preloader import Preloader, PreloaderError
from decathlon_mcp.sandboxes.host.command import as_user, user_of
from decathlon_mcp.sandboxes.host.mounts import RootFiles, view_launcher
from decathlon_mcp.storage.disk import new_file, open_regular

FILE_NAME = "preload.json"
MAX_FILE_BYTES = 16 << 20
MAX_KEPT = 200
MAX_LIBRARIES = 5000
MAX_CHECKS = 25
"""How often libraries are left out of a list, and the rest is checked again."""
LOOK_SECONDS = 30.0
"""How long the program's Python may look for its distributions; it takes half a second on an idle machine."""
_VERSION = 1
# Of names on stdin, the modules in packages of distributions, but the server's own; and the path, for which
# the packages, which take half a second, need not be found.
_SELECT = """
import json, sys
own, names = json.load(sys.stdin)
if not names:
    print(json.dumps([[], sys.path]))
    sys.exit()
import importlib.metadata, importlib.util
folders = tuple({f"{p}/" for p in sys.path if p.endswith(("site-packages", "dist-packages"))})
of = importlib.metadata.packages_distributions()
mine = {d for top in own for d in of.get(top, ())}
kept, known = [], {}
for name in dict.fromkeys(names):
    top = name.partition(".")[0]
    if top not in known:
        try:
            spec = importlib.util.find_spec(top)
            places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec else []
        except Exception:
            places = []
        known[top] = top not in own and top in of and not mine.intersection(of[top]) and any(
            place.startswith(folders) for place in places)
    if known[top]:
        kept.append(name)
print(json.dumps([kept, sys.path]))
"""


@dataclass(frozen=True, slots=True)
class Libraries:
    """What a program imports. `digest`: of the environment in which that was found out."""

    digest: str
    names: tuple[str, ...]
    reads: tuple[str, ...] = ()
    """Names of the variables that the libraries read when they are imported."""


class KeptLibraries:
    """The libraries of programs by their keys, in a file of the state folder."""

    def __init__(self, state: Path) -> None:
        self._file = state / FILE_NAME
        self._libraries: dict[str, Libraries] = {}
        try:
            with open_regular(self._file) as content:
                kept = msgspec.json.decode(content.read(MAX_FILE_BYTES))
            if kept["version"] == _VERSION:
                self._libraries = msgspec.convert(kept["programs"], dict[str, Libraries])
        except (OSError, ValueError, KeyError, TypeError):
            return  # they are found out again

    def get(self, key: str, digest: str) -> Libraries | None:
        found = self._libraries.get(key)
        return found if found is not None and found.digest == digest else None

    def keep(self, key: str, libraries: Libraries) -> None:
        """Blocks. Raises OSError."""
        self._libraries.pop(key, None)
        self._libraries[key] = libraries
        for oldest in list(self._libraries)[:-MAX_KEPT]:
            del self._libraries[oldest]
        with new_file(self._file, self._file.with_name(f".{FILE_NAME}.{os.getpid()}")) as content:
            content.write(msgspec.json.encode({"version": _VERSION, "programs": self._libraries}))


def digest_of(program: Program, files: RootFiles, script: Path | None) -> str:
    """Says which packages there are for a program. `script`: its script's file on this machine. Blocks.

    Raises PreloaderError.
    """
    _, folders = _select(program, files, [])
    parts: list[object] = [program.key]
    for place in (*folders, *([] if script is None else [str(script)])):
        try:
            status = Path(place).stat()
        except OSError:
            continue
        parts.append([place, status.st_mtime_ns, status.st_size, status.st_ino])
    return sha256(json.dumps(parts).encode()).hexdigest()


async def find_libraries(
    program: Program, files: RootFiles, digest: str, imported: Sequence[str]
) -> tuple[Libraries, dict[str, str]]:
    """The libraries among imported modules that a fork may have, and the others with reasons.

    Raises PreloaderError.
    """
    names, _ = await to_thread.run_sync(_select, program, files, imported[:MAX_LIBRARIES])
    left_out: dict[str, str] = {}
    reads: Sequence[str] = ()
    for _ in range(MAX_CHECKS):
        if not names:
            break
        process = Preloader.start(program, files, names, checks=True)
        try:
            unsafe, reads = await process.checked()
        finally:
            await process.close()
        if not unsafe:
            break
        left_out |= unsafe
        # A package is imported before its modules.
        refused = tuple(f"{name}." for name in unsafe)
        names = [name for name in names if name not in unsafe and not name.startswith(refused)]
    else:
        raise PreloaderError(f"{len(left_out)} libraries cannot be forked safely, such as {min(left_out)}")
    return Libraries(digest, tuple(names), tuple(reads)), left_out


def _select(program: Program, files: RootFiles, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """Names of modules that belong to libraries, and the path of the program's Python. Blocks."""
    interpreter = program.command[0]
    try:
        result = subprocess.run(
            [*view_launcher(files.reached), *as_user(user_of(files)), interpreter, "-c", _SELECT],
            input=json.dumps([program.own, list(names)]).encode(),
            env=dict(program.variables),
            cwd="/usr",
            capture_output=True,
            timeout=LOOK_SECONDS,
            check=True,
        )
        return json.loads(result.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise PreloaderError(f"its Python could not be asked: {error}") from error


async def read_imports(report: int, ended: anyio.Event) -> list[str]:
    """The names of modules that a fork has reported, until `ended`."""
    content = b""
    os.set_blocking(report, False)
    while not ended.is_set() and len(content) < MAX_FILE_BYTES:
        with anyio.move_on_after(0.2):
            await anyio.wait_readable(report)
        try:
            if not (chunk := os.read(report, 1 << 16)):
                break
            content += chunk
        except BlockingIOError:
            continue
    return [line for line in content.decode("utf-8", "replace").split("\n") if line]
