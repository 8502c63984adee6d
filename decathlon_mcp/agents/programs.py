"""Finds an agent's program on this machine, and the folders that it needs to run in namespaces."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.sandboxes.bubblewrap.host_files import USR

_FIRST_LINE_BYTES = 256
_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"


@dataclass(frozen=True, slots=True)
class Program:
    """A command whose program was found.

    `path`: the program's folders, for the variable PATH. `folders`: those that it needs to see.
    """

    name: str
    command: tuple[str, ...]
    path: tuple[Path, ...]
    folders: tuple[Path, ...]


def find_program(
    command: Sequence[str], *, shown: Sequence[Path] = (), hidden: Collection[Path] = (), isolated: bool
) -> Program:
    """The program of a command line. `shown`, `hidden`: folders that it shall see, and must not.

    The folders of an npm package are its whole `node_modules`, those of a script also its interpreter's.
    Raises BadRequestError if there is no such program, or if it could not be run in namespaces (`isolated`).
    """
    found = shutil.which(command[0])
    if found is None:
        raise BadRequestError(f"there is no program {command[0]} on the PATH")
    program = Path(os.path.abspath(found))  # noqa: PTH100  (links are kept)
    chain = [program, *_interpreters(program)]
    folders = dict.fromkeys(folder.resolve() for folder in shown)
    for path in chain:
        folders |= dict.fromkeys(_folders_of(path))
    needed = tuple(folder for folder in folders if not folder.is_relative_to(USR))
    path = tuple(dict.fromkeys(place.parent for link in chain for place in (link, link.resolve())))
    if isolated:
        _check(program, command[1:], needed, hidden)
        # The link need not be there inside.
        program = program.resolve() if not _is_in_environment(program) else program
    return Program(Path(command[0]).name, (str(program), *command[1:]), path, needed)


def _check(program: Path, arguments: Sequence[str], shown: Sequence[Path], hidden: Collection[Path]) -> None:
    """Raises BadRequestError for what the program would not find, and for folders that show too much."""
    home = Path.home().resolve()
    for folder in shown:
        if home.is_relative_to(folder):
            raise BadRequestError(
                f"all of {folder} would have to be shown to the program: move what it needs into a folder "
                "of its own, or use --trust-command"
            )
        if not folder.is_dir():
            raise BadRequestError(f"--show {folder} is not a folder")
    for folder in hidden:
        if program.resolve().is_relative_to(folder.resolve()):
            raise BadRequestError(f"{program} lies in {folder}, which is hidden from it: move it elsewhere")
    for argument in arguments:
        file = Path(argument)
        with suppress(OSError, ValueError):  # such as a text too long for a name
            if not file.is_file():
                continue
            real = file.resolve()
            if not file.is_absolute():
                raise BadRequestError(f"the program starts in an empty folder: name {argument} as {real}")
            if not any(map(real.is_relative_to, (USR, *shown))):
                raise BadRequestError(f"the program does not see {argument}: add --show {real.parent}")


def _interpreters(program: Path) -> Iterator[Path]:
    """The program that the first line of a script names."""
    with suppress(OSError), program.open("rb") as file:
        line = file.read(_FIRST_LINE_BYTES).partition(b"\n")[0]
        words = line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-")]
        if words and (found := shutil.which(words[0])) is not None:
            yield Path(found)


def _folders_of(program: Path) -> Iterator[Path]:
    """The folders that a program needs besides those of the system."""
    if _is_in_environment(program):
        yield program.parent.parent
        if program.is_symlink():  # its Python, with its library beside
            yield program.resolve().parent.parent
        return
    real = program.resolve()
    if "node_modules" in real.parts:
        yield Path(*real.parts[: real.parts.index("node_modules") + 1])
    else:
        yield real.parent


def _is_in_environment(program: Path) -> bool:
    """Whether it belongs to a virtual environment of Python."""
    return (program.parent.parent / _VIRTUAL_ENVIRONMENT).is_file()
