"""What is laid over a task's sandboxes because of the accounts it works on and the servers it needs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.resources import SuiteResources
from decathlon_mcp.suites.suite_file import Credentials
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.suites.tokens import SOURCES

HERE = PurePosixPath()
MACHINE = PurePosixPath("/")
_HEADING = "\n# Of the account that this episode has (suite.yaml):\n"


def credentials_of(
    resources: SuiteResources, task: Task, slots: Mapping[str, str]
) -> list[tuple[PurePosixPath, bytes]]:
    """Archives, each with the folder it belongs in: the suite's root, or that of the machine.

    Blocks: reads files. Raises SuiteError for one that cannot be read.
    """
    said = resources.credentials(task, slots)
    members = {PurePosixPath(goal): Path(path) for goal, path in said.files.items()}
    found: list[tuple[PurePosixPath, bytes]] = []
    for folder, chosen in (
        (HERE, {goal: path for goal, path in members.items() if not goal.is_absolute()}),
        (MACHINE, {goal.relative_to("/"): path for goal, path in members.items() if goal.is_absolute()}),
    ):
        texts = dict(_token_files(resources, said)) if folder == HERE else {}
        if chosen or texts:
            found.append((folder, _pack(chosen, texts)))
    return found


def _token_files(resources: SuiteResources, said: Credentials) -> Iterator[tuple[PurePosixPath, str]]:
    """The suite's token files with the account's values set at their ends, where there are any."""
    for prefix, (file, name) in SOURCES.items():
        values = {key: value for key, value in said.values.items() if key.startswith(f"{prefix}.")}
        if values:
            path = resources.checkout / file
            if not path.exists():
                path = resources.checkout / dict(resources.profile.stand_ins).get(file, file)
            lines = [f"{name}[{key.partition('.')[2]!r}] = {value!r}\n" for key, value in values.items()]
            yield PurePosixPath(file), "".join([_read(path).decode(), _HEADING, *lines])


def _pack(files: Mapping[PurePosixPath, Path], texts: Mapping[PurePosixPath, str]) -> bytes:
    """Nobody but the sandbox's own user can read them, folders on the way but for those that exist."""
    contents = {str(goal): text.encode() for goal, text in texts.items()}
    for goal, path in files.items():
        for place in _below(path):
            contents[str(goal / place.relative_to(path))] = _read(place)
    return pack_files(contents, mode=0o600)


def _below(path: Path) -> Iterator[Path]:
    """A file itself, or all files of a folder, sorted; links are followed, since the operator made them."""
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path, followlinks=True):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SuiteError(f"{path} cannot be read: {error.strerror}", file=str(path)) from None
