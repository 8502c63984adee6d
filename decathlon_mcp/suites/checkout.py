"""The files of a checkout: walking them, packing them into reproducible tar archives, and their revision.

The same checkout gives the same archive, byte for byte: members are sorted by their paths in the checkout,
belong to root, and keep their modes and times (in whole seconds). Nothing outside of the checkout is read:
symbolic links that lead out of it are left out, others stay links.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path, PurePosixPath

from msgspec.structs import replace

from decathlon_mcp.archives.reading import Kind
from decathlon_mcp.archives.writing import Entry, archive_chunks, path_entry, save
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.storage.disk import open_regular

log = logging.getLogger("decathlon.suites")

EXCLUDED_NAMES = frozenset({"__pycache__", ".git", ".DS_Store"})
"""What others than a task's author leave in a checkout. It is left out, except in `DATA_FOLDERS`."""
DATA_FOLDERS = ("initial_workspace", "groundtruth_workspace")
"""How the names of a task's folders begin that hold its data: upstream copies them whole, with the repository
that the agent is to work on."""

PACKAGE = "__init__.py"
MAX_DEPTH = 200
"""Levels of folders; those of installed packages have some twenty."""


def walk(checkout: Path, path: PurePosixPath, without: Collection[str] = ()) -> Iterator[PurePosixPath]:
    """`path` and everything below it, sorted; empty if it does not exist. Links are not followed.

    `without`: entries directly below `path` to leave out.
    """
    place = checkout / path
    if place.is_symlink() or place.exists():
        yield path
    if place.is_dir() and not place.is_symlink():
        yield from _below(place, path, without)


def _below(folder: Path | str, path: PurePosixPath, without: Collection[str]) -> Iterator[PurePosixPath]:
    is_data = _is_data(path)
    if len(path.parts) > MAX_DEPTH:
        raise SuiteError(f"{folder}: more than {MAX_DEPTH} folders below each other", file=str(folder))
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        raise SuiteError(f"{folder} cannot be read: {error.strerror}", file=str(folder)) from None
    for entry in entries:
        if (entry.name in EXCLUDED_NAMES and not is_data) or entry.name in without:
            continue
        yield path / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, path / entry.name, ())


def _is_data(path: PurePosixPath) -> bool:
    """Whether a path is in a task's data, `tasks/<split>/<task>/initial_workspace`."""
    return len(path.parts) > 3 and path.parts[3].startswith(DATA_FOLDERS)


def packages_above(checkout: Path, path: PurePosixPath) -> Iterator[PurePosixPath]:
    """The `__init__.py` files in the folders above `path`."""
    for parent in reversed(path.parents):
        if (checkout / parent / PACKAGE).is_file():
            yield parent / PACKAGE


def write(
    into: Path,
    checkout: Path,
    members: Iterable[PurePosixPath],
    aliases: Mapping[PurePosixPath, PurePosixPath],
) -> None:
    """Write these members to the archive `into`.

    `aliases`: more members by name, each with the path of the file that it is read from.
    """
    save(archive_chunks(_entries(checkout, {**{member: member for member in members}, **aliases})), into)


def _entries(checkout: Path, sources: Mapping[PurePosixPath, PurePosixPath]) -> Iterator[Entry]:
    base = checkout.resolve()
    for name in sorted(sources):
        path = checkout / sources[name]
        if path.is_symlink() and (path.readlink().is_absolute() or not path.resolve().is_relative_to(base)):
            log.warning("a link out of the checkout was left out", extra={"fields": {"path": str(path)}})
            continue
        entry = path_entry(str(path), str(name))
        if entry is not None and entry[0].kind is not Kind.FIFO:
            member, body = entry
            yield replace(member, mode=member.mode & 0o777), body


def inside(checkout: Path, path: PurePosixPath) -> Path:
    """Resolve a path of the checkout. Raises SuiteError if it leads out of the checkout."""
    real, base = (checkout / path).resolve(), checkout.resolve()
    if not real.is_relative_to(base):
        raise SuiteError(
            f"{checkout / path} leads out of the checkout, to {real}: put a copy in its place",
            file=str(checkout / path),
        )
    return real


REVISION_CHARACTERS = 12
# Git must not write to the checkout, nor run a program that the checkout's own configuration names: a
# monitor, the transport of a remote, or (`_has_filters`) a filter, also of a submodule.
_GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")
_GIT_ENVIRONMENT = {"GIT_ALLOW_PROTOCOL": "none", "GIT_NO_LAZY_FETCH": "1"}
_STATUS = (
    *("status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--ignored"),
    "--ignore-submodules=dirty",
)


def revision(checkout: Path, parts: Iterable[PurePosixPath], secrets: Collection[PurePosixPath] = ()) -> str:
    """The commit of a git checkout, with a digest of changed files among `parts` appended if there are any.

    Without git, and with filters or submodules of the checkout's own, it is a digest of all files in `parts`.
    `secrets`: see `digest`.
    """
    parts = list(parts)
    if (checkout / ".git").exists() and not ((checkout / ".gitmodules").exists() or _has_filters(checkout)):
        head = git_output(checkout, "rev-parse", "HEAD")
        # Ignored files are listed, too: token files are usually ignored.
        status = git_output(checkout, *_STATUS, "--", *map(str, parts))
        if head is not None and status is not None:
            changed = [PurePosixPath(entry[3:]) for entry in status.split("\0") if entry]
            changed = [path for path in changed if _is_data(path) or EXCLUDED_NAMES.isdisjoint(path.parts)]
            return head.strip()[:REVISION_CHARACTERS] + (
                f"-{digest(checkout, changed, secrets)}" if changed else ""
            )
    return digest(checkout, parts, secrets)


def digest(checkout: Path, parts: Iterable[PurePosixPath], secrets: Collection[PurePosixPath] = ()) -> str:
    """A digest of path and content of every file in these paths; a missing path counts by its name.

    A file is read again only if its size, time or inode has changed. `secrets` count by size and time:
    clients see the digest, which must not confirm a guess of a password.
    """
    total = hashlib.sha256()
    for part in parts:
        total.update(f"{part}\n".encode("utf-8", "surrogateescape"))
        for path in walk(checkout, part):
            status = (checkout / path).lstat()
            if not stat.S_ISDIR(status.st_mode):
                size, time_ns = status.st_size, status.st_mtime_ns
                content = (
                    f"{size} {time_ns}"
                    if not {path, *path.parents}.isdisjoint(secrets)
                    else _content_digest(checkout / path, status.st_mode, size, time_ns, status.st_ino)
                )
                total.update(f"{path}\0{content}\n".encode("utf-8", "surrogateescape"))
    return total.hexdigest()[:REVISION_CHARACTERS]


# Times are not part of the digest, so that two installations of the same suite have the same revision.
@lru_cache(maxsize=1 << 16)
def _content_digest(file: Path, mode: int, *_status: int) -> str:
    """Of a link's target, or a file's content; empty for what is neither, or cannot be read."""
    try:
        if stat.S_ISLNK(mode):
            return str(file.readlink())
        if not stat.S_ISREG(mode):
            return ""
        with open_regular(file) as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError:
        return ""


def _has_filters(checkout: Path) -> bool:
    """Whether the checkout's own configuration may have programs that git runs on files to compare them."""
    listed = git_output(checkout, "config", "--list", "--show-scope", "--name-only", "-z")
    # Pairs of a scope and a name; an old git does not list scopes.
    fields = (listed or "local\0filter.").split("\0")
    own = ("local", "worktree")
    return any(
        scope in own and name.startswith("filter.")
        for scope, name in zip(fields[::2], fields[1::2], strict=False)
    )


def git_output(checkout: Path, *arguments: str) -> str | None:
    """The output of a git command; None if it fails or there is no git."""
    try:
        process = subprocess.run(
            [*_GIT, "-C", str(checkout), *arguments],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=30,
            check=True,
            env={**os.environ, **_GIT_ENVIRONMENT},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout
