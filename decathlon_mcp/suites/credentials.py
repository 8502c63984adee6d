"""The archives of credentials that a task's sandboxes get, and those of files that its services get."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.resources import SuiteResources
from decathlon_mcp.suites.suite_file import Credentials, Service
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.suites.tokens import SOURCES

SUITE_ROOT = PurePosixPath()
FILE_SYSTEM_ROOT = PurePosixPath("/")
_HEADING = "\n# The values of this episode's account (suite.yaml):\n"


def credential_archives(
    resources: SuiteResources, task: Task, slots: Mapping[str, str]
) -> list[tuple[PurePosixPath, bytes]]:
    """Tar archives, each with the folder to unpack it in; see `Suite.credentials`."""
    credentials = resources.credentials(task, slots)
    files = {PurePosixPath(target): Path(path) for target, path in credentials.files.items()}
    relative = {target: path for target, path in files.items() if not target.is_absolute()}
    absolute = {target.relative_to("/"): path for target, path in files.items() if target.is_absolute()}
    token_files = dict(_token_files(resources, credentials))
    archives: list[tuple[PurePosixPath, bytes]] = []
    if relative or token_files:
        archives.append((SUITE_ROOT, _pack(relative, token_files)))
    if absolute:
        archives.append((FILE_SYSTEM_ROOT, _pack(absolute, {})))
    return archives


def service_archive(resources: SuiteResources, service: Service) -> bytes:
    """A tar archive of the files in a service's working folder; see `Suite.service_files`."""
    return _pack({PurePosixPath(name): resources.checkout / path for name, path in service.files.items()}, {})


def _token_files(resources: SuiteResources, credentials: Credentials) -> Iterator[tuple[PurePosixPath, str]]:
    """The suite's token files with the credentials' values appended, for each file that gets any."""
    for prefix, (file, variable) in SOURCES.items():
        values = {key: value for key, value in credentials.values.items() if key.startswith(f"{prefix}.")}
        if values:
            path = resources.checkout / file
            if not path.exists():
                path = resources.checkout / dict(resources.profile.stand_ins).get(file, file)
            lines = [f"{variable}[{key.partition('.')[2]!r}] = {value!r}\n" for key, value in values.items()]
            yield PurePosixPath(file), "".join([_read(path).decode(), _HEADING, *lines])


def _pack(files: Mapping[PurePosixPath, Path], texts: Mapping[PurePosixPath, str]) -> bytes:
    """A tar archive of the files, readable only by the sandbox's user."""
    contents = {str(goal): text.encode() for goal, text in texts.items()}
    for goal, path in files.items():
        for place in _below(path):
            contents[str(goal / place.relative_to(path))] = _read(place)
    return pack_files(contents, mode=0o600)


def _below(path: Path) -> Iterator[Path]:
    """A file itself, or all files below a folder, sorted."""
    # Symbolic links are followed: the operator made these folders, not a checkout from elsewhere.
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
