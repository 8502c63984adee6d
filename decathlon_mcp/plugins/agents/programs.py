"""The agent programs that are known, and how a program is found on this machine with the folders it needs.

Of a known program one version was checked: a scripted model was offered no tool but the task's and those that
`docs/clients/agent-programs.md` lists. `configuration` switches the program's own tools off by name, and
another version may have others.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.sandboxes.host.answer_traces import repositories_of
from decathlon_mcp.sandboxes.host.host_files import USR, python_files

VERSION_SECONDS = 30.0
"""How long a program may take to print its version; Node's take a second or two."""
VERSION_BYTES = 4096
"""How much of what it prints is read."""
_VERSION = re.compile(rb"\d+(?:\.\d+){1,3}(?:-[0-9A-Za-z.]+)?")
_FIRST_LINE_BYTES = 256
_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One known program, which is named as its file is."""

    command: Sequence[str]
    """Its command line, with the placeholders of `configuration.configure`."""
    words: int = 1
    """How many words of it name the program and its subcommand: options follow them."""
    version: str
    """The version that was checked."""
    package: str
    """Its package on npm."""
    variables: Sequence[str]
    """Beginnings of the variables that it gets beside those of every program: its model's address and key."""

    def command_for(self, model: str | None) -> list[str]:
        """The command line, with the model if one is named."""
        chosen = [] if model is None else ["--model", model]
        return [*self.command[: self.words], *chosen, *self.command[self.words :]]


PRESETS: Mapping[str, Preset] = {
    "claude": Preset(
        command=(
            "claude",
            "-p",
            "{prompt}",
            "--mcp-config",
            "{mcp_config}",
            "--strict-mcp-config",
            "--tools",
            "",
        ),
        version="2.1.332",
        package="@anthropic-ai/claude-code",
        variables=("ANTHROPIC_", "CLAUDE_CODE_"),
    ),
    "codex": Preset(
        command=("codex", "exec", "--skip-git-repo-check", "{prompt}"),
        words=2,
        version="0.171.0",
        package="@openai/codex",
        variables=("OPENAI_", "CODEX_"),
    ),
    "opencode": Preset(
        command=("opencode", "run", "{prompt}"),
        words=2,
        version="1.18.33",
        package="opencode-ai",
        variables=("OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_GENERATIVE_AI_", "OPENROUTER_"),
    ),
    "gemini": Preset(
        command=("gemini", "-p", "{prompt}"),
        version="0.61.0",
        package="@google/gemini-cli",
        variables=("GEMINI_", "GOOGLE_GEMINI_", "GOOGLE_GENAI_", "GOOGLE_API_KEY"),
    ),
}


def version_in(output: bytes) -> str | None:
    """The version in what a program printed; None if there is none."""
    found = _VERSION.search(output)
    return None if found is None else found[0].decode()


@dataclass(frozen=True, slots=True)
class Program:
    """A command whose program was found.

    `path`: the program's folders, for the variable PATH. `folders`: those that it needs to see. `prefixes`:
    folders of Pythons and virtual environments, of which it needs to see `host_files.python_files`.
    """

    name: str
    command: tuple[str, ...]
    path: tuple[Path, ...]
    folders: tuple[Path, ...]
    prefixes: tuple[Path, ...]


def find_program(
    command: Sequence[str], *, shown: Sequence[Path] = (), hidden: Collection[Path] = (), isolated: bool
) -> Program:
    """The program of a command line. `shown`, `hidden`: folders that it shall see, and must not.

    The folders of an npm package are its whole `node_modules`, those of a script also its interpreter's.
    Neither `shown` nor a program's folder may have a hidden folder or its repository in it.
    Raises BadRequestError if there is no such program, or if it could not be run in namespaces (`isolated`).
    """
    found = shutil.which(command[0])
    if found is None:
        raise BadRequestError(f"there is no program {command[0]} on the PATH")
    program = Path(os.path.abspath(found))  # noqa: PTH100  (links are kept)
    chain = [program, *_interpreters(program)]
    prefixes = _outside_usr(prefix for path in chain for prefix in _pythons_of(path))
    own = _outside_usr(folder for path in chain for folder in _folders_of(path))
    asked = _outside_usr(folder.resolve() for folder in shown)
    path = tuple(dict.fromkeys(place.parent for link in chain for place in (link, link.resolve())))
    if isolated:
        _check_folders(asked, own, hidden)
        seen = (USR, *asked, *own, *(file for prefix in prefixes for file in python_files(prefix)))
        _check_arguments(command[1:], seen)
        # The link need not be there inside.
        program = program.resolve() if not _is_in_environment(program) else program
    folders = tuple(dict.fromkeys((*asked, *own)))
    return Program(Path(command[0]).name, (str(program), *command[1:]), path, folders, prefixes)


def _outside_usr(folders: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(folder for folder in dict.fromkeys(folders) if not folder.is_relative_to(USR))


def _check_folders(shown: Sequence[Path], own: Sequence[Path], hidden: Collection[Path]) -> None:
    """Raises BadRequestError for folders that show too much, or that are none."""
    home = Path.home().resolve()
    secret = {path for folder in hidden for path in (folder.resolve(), *repositories_of(folder.resolve()))}
    for folder in (*shown, *own):
        what = f"--show {folder}" if folder in shown else f"the program's folder {folder}"
        if home.is_relative_to(folder):
            raise BadRequestError(
                f"all of {folder} would have to be shown to the program: move what it needs into a folder "
                "of its own, or use --trust-command"
            )
        if not folder.is_dir():
            raise BadRequestError(f"{what} is not a folder")
        for path in sorted(secret):
            if folder.is_relative_to(path):
                raise BadRequestError(f"{what} lies in {path}, which is hidden from it: move it elsewhere")
            if path.is_relative_to(folder):
                raise BadRequestError(
                    f"{what} has {path} in it, which must not be seen: name folders beside that one"
                )


def _check_arguments(arguments: Sequence[str], seen: Sequence[Path]) -> None:
    """Raises BadRequestError for what the program would not find."""
    for argument in arguments:
        file = Path(argument)
        with suppress(OSError, ValueError):  # such as a text too long for a name
            if not file.is_file():
                continue
            real = file.resolve()
            if not file.is_absolute():
                raise BadRequestError(f"the program starts in an empty folder: name {argument} as {real}")
            if not any(map(real.is_relative_to, seen)):
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


def _pythons_of(program: Path) -> Iterator[Path]:
    """The virtual environment that a program belongs to, and the Python that it is."""
    if _is_in_environment(program):
        yield program.parent.parent
    real = program.resolve()
    if _is_python(real):
        yield real.parent.parent


def _folders_of(program: Path) -> Iterator[Path]:
    """The folders that a program needs besides those of the system and of Pythons."""
    real = program.resolve()
    if _is_in_environment(program) or _is_python(real):
        return
    if "node_modules" in real.parts:
        yield Path(*real.parts[: real.parts.index("node_modules") + 1])
    else:
        yield real.parent


def _is_in_environment(program: Path) -> bool:
    """Whether it belongs to a virtual environment of Python."""
    return (program.parent.parent / _VIRTUAL_ENVIRONMENT).is_file()


def _is_python(program: Path) -> bool:
    """Whether it is a Python with its library beside."""
    library = program.parent.parent / "lib"
    return program.parent.name == "bin" and any(library.glob("python*")) and "python" in program.name
