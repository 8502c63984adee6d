"""Traces of hidden folders among the files that a sandbox is shown.

A folder with answers is replaced by an empty folder, but what is in it can be had or guessed from other files
too: repositories with its history, lists of installed files with their sizes and hashes, other installations
of the bundled suite.
"""

from __future__ import annotations

import csv
import io
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from decathlon_mcp.errors import ProviderUnavailableError

REPOSITORIES = (".git", ".hg", ".svn", ".jj", ".bzr", ".pijul", "_darcs")
BUNDLED = ("decathlon_mcp", "starter")
"""How the path of the bundled suite and its solutions ends, in every installation and checkout."""
BUNDLES = re.compile(r"decathlon[_-]mcp-.*\.(whl|egg|zip|tar\.\w+|tgz|conda)")
"""Archives of this project, with its bundled suite."""
METADATA_FOLDERS = (".dist-info", ".egg-info")
CONDA_FOLDER = "conda-meta"
ORIGIN = "direct_url.json"
NO_ORIGIN = b'{"url": "file:///", "dir_info": {}}'
"""In place of the hash of the archive from which a package was installed."""
MAX_ENTRIES = 4_000_000
MAX_DEPTH = 100
SEARCH_SECONDS = 120.0
MAX_LIST_BYTES = 32 << 20
"""A longer list of files is replaced by an empty list."""
MAX_COVERED = 200
_MAX_POINTER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Traces:
    """What else must not be seen. `folders`: empty inside. `files`: with another content."""

    folders: tuple[Path, ...]
    files: Mapping[Path, bytes]


def repositories_of(folder: Path) -> Iterator[Path]:
    """The repositories that may have the history of a folder: in it, above it, and where these lead to."""
    for above in (folder, *folder.parents):
        for name in REPOSITORIES:
            yield from _repository(above / name)


def _repository(place: Path) -> Iterator[Path]:
    if place.is_file():  # of a worktree or a submodule
        pointer = _line(place).partition("gitdir:")[2].strip()
        if not pointer:
            return
        place = place.parent / pointer
    if not place.is_dir():
        return
    yield place
    if common := _line(place / "commondir"):
        yield place / common
    for objects in _text(place / "objects" / "info" / "alternates").splitlines():
        yield place / "objects" / objects


def _line(file: Path) -> str:
    return _text(file).partition("\n")[0].strip()


def _text(file: Path) -> str:
    if not file.is_file():
        return ""
    try:
        with file.open("rb") as content:
            return os.fsdecode(content.read(_MAX_POINTER_BYTES))
    except OSError:
        return ""


def find_traces(shown: Iterable[Path], hidden: Iterable[Path]) -> Traces:
    """Search what is shown, links not followed. Raises ProviderUnavailableError if it is too much."""
    covered = {path for folder in hidden for path in (folder.absolute(), folder.resolve())}
    copies: set[Path] = set()
    lists: list[Path] = []
    archives: list[Path] = []
    for entry in _walk(shown, covered):
        if entry.is_dir(follow_symlinks=False):
            if _is_bundled(entry):
                copies.add(Path(entry.path))
            elif entry.name.endswith(METADATA_FOLDERS):
                lists.append(Path(entry.path))
        elif not entry.is_file(follow_symlinks=False):
            continue  # what a link leads to is found where it is, if it is shown at all
        elif BUNDLES.fullmatch(entry.name):
            archives.append(Path(entry.path))
        elif entry.name.endswith(".json") and Path(entry.path).parent.name == CONDA_FOLDER:
            lists.append(Path(entry.path))
    names = _Names({*covered, *copies})
    files = dict.fromkeys(archives, b"")
    for place in lists:
        files |= dict(_without_names(place, names))
    if len(files) > MAX_COVERED:
        raise ProviderUnavailableError(
            f"{len(files)} files list files of hidden folders, such as {min(files)}: show smaller folders"
        )
    return Traces(tuple(sorted(copies - covered)), files)


def _walk(folders: Iterable[Path], hidden: set[Path]) -> Iterator[os.DirEntry[str]]:
    """All entries below, without hidden folders and copies of the bundled suite."""
    remaining, deadline = MAX_ENTRIES, time.monotonic() + SEARCH_SECONDS
    waiting = [(str(folder), 0) for folder in folders]
    skipped = {str(folder) for folder in hidden}
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    remaining -= 1
                    if remaining < 0 or depth > MAX_DEPTH or time.monotonic() > deadline:
                        raise ProviderUnavailableError(
                            f"{folder}: too many files are shown to be searched for answers: show smaller "
                            "folders"
                        )
                    if entry.is_dir(follow_symlinks=False):
                        if entry.path in skipped or entry.name == "__pycache__":
                            continue
                        if not _is_bundled(entry):
                            waiting.append((entry.path, depth + 1))
                    yield entry
        except OSError:
            continue  # a sandbox cannot read it either


def _is_bundled(folder: os.DirEntry[str]) -> bool:
    return folder.name == BUNDLED[-1] and Path(folder.path).parts[-2:] == BUNDLED


class _Names:
    """Recognizes texts that name a path below one of these folders."""

    def __init__(self, folders: Iterable[Path]) -> None:
        self._folders = tuple(folders)
        self._ends = {folder.parts[-2:] for folder in self._folders}
        self._names = tuple({folder.name for folder in self._folders})
        self._last = tuple(map(os.fsencode, self._names))

    def may_be_in(self, content: bytes) -> bool:
        return any(name in content for name in self._last)

    def has_ends(self, content: bytes) -> bool:
        return any(os.fsencode(f"{'/'.join(ends)}/") in content for ends in self._ends)

    def are_below(self, name: str, bases: Iterable[Path]) -> bool:
        """Whether a relative or absolute path leads below. Lists do not say what theirs are relative to."""
        if not any(each in name for each in self._names):
            return False
        parts = Path(name).parts
        if any(parts[at : at + 2] in self._ends for at in range(len(parts) - 1)):
            return True
        paths = [Path(os.path.normpath(base / name)) for base in bases]
        return any(path.is_relative_to(folder) for path in paths for folder in self._folders)


def _without_names(place: Path, names: _Names) -> Iterator[tuple[Path, bytes]]:
    """The files of a package's metadata that name hidden files, with content that does not."""
    if place.suffix == ".json":
        content = _content(place)
        if content is None or names.has_ends(content):
            yield place, b"{}"
        return
    bases = [*dict.fromkeys((place, place.parent, place.parent.parent, place.resolve().parent))]
    names_any = False
    for name, keep in (("RECORD", _records), ("SOURCES.txt", _lines), ("installed-files.txt", _lines)):
        file = place / name
        if file.is_symlink() or not file.is_file():
            continue
        content = _content(file)
        kept = b"" if content is None else None
        if content is not None and names.may_be_in(content):
            kept = keep(os.fsdecode(content), names, bases)
        if kept is not None:
            names_any = True
            yield file, kept
    if names_any and (place / ORIGIN).is_file() and not (place / ORIGIN).is_symlink():
        yield place / ORIGIN, NO_ORIGIN


def _content(file: Path) -> bytes | None:
    """None if it is too long, or no file that can be read."""
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_LIST_BYTES + 1)
    except OSError:
        return None
    return None if len(content) > MAX_LIST_BYTES else content


def _records(text: str, names: _Names, bases: list[Path]) -> bytes | None:
    """A RECORD, the path, hash and size of each file; None if it names no hidden file."""
    kept, names_any = io.StringIO(newline=""), False
    writer = csv.writer(kept, lineterminator="\n")
    try:
        for row in csv.reader(io.StringIO(text, newline="")):
            if row and names.are_below(row[0], bases):
                names_any = True
            elif row:
                # The file with the hash of the archive is replaced too.
                writer.writerow([row[0], "", ""] if row[0].endswith(f"/{ORIGIN}") else row)
    except csv.Error:
        return b""
    return os.fsencode(kept.getvalue()) if names_any else None


def _lines(text: str, names: _Names, bases: list[Path]) -> bytes | None:
    """A list of paths, one a line; None if it names no hidden file."""
    lines = text.splitlines()
    kept = [line for line in lines if not names.are_below(line.strip(), bases)]
    return os.fsencode("".join(f"{line}\n" for line in kept)) if len(kept) < len(lines) else None
