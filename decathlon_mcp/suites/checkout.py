"""What goes into a sandbox, as tar archives: the same bytes for the same checkout.

Members are sorted, belong to root, keep their mode and their time (whole seconds), and are named as they lie
in the checkout. Nothing outside of it is ever read: a link is kept as a link where it leads to a place
inside, and left out where it does not.

Which state a checkout is in, as a short word that changes when it does.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import subprocess
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath

from decathlon_mcp.archives.writing import append_from_checkout
from decathlon_mcp.errors import SuiteError

log = logging.getLogger("decathlon.suites")

LEFT_OUT = frozenset({"__pycache__", ".git", ".DS_Store"})

PACKAGE = "__init__.py"


def walk(checkout: Path, path: PurePosixPath, without: Collection[str] = ()) -> Iterator[PurePosixPath]:
    """`path` and everything below it, sorted, links not followed; nothing where it is not there.

    `without` are names directly below `path`.
    """
    here = checkout / path
    if here.is_symlink() or here.exists():
        yield path
    if here.is_dir() and not here.is_symlink():
        yield from _below(here, path, without)


def _below(folder: Path | str, path: PurePosixPath, without: Collection[str]) -> Iterator[PurePosixPath]:
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name in LEFT_OUT or entry.name in without:
            continue
        yield path / entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _below(entry.path, path / entry.name, ())


def packages_above(checkout: Path, path: PurePosixPath) -> Iterator[PurePosixPath]:
    """The `__init__.py`s that exist in the folders on the way to `path`."""
    for parent in reversed(path.parents):
        if (checkout / parent / PACKAGE).is_file():
            yield parent / PACKAGE


def write(
    into: Path,
    checkout: Path,
    members: Iterable[PurePosixPath],
    aliases: Mapping[PurePosixPath, PurePosixPath],
) -> None:
    """Add these members to the archive `into`, and `aliases`: more names, each with the path it is read from.

    Where there is no such file yet, it is made.
    """
    named = {**{member: member for member in members}, **aliases}
    for link in append_from_checkout(into, checkout, named):
        log.warning("a link out of the checkout was left out", extra={"fields": {"path": str(link)}})


def inside(checkout: Path, path: PurePosixPath) -> Path:
    """The real place of a path of the checkout. Raises SuiteError where that is outside of it."""
    real, base = (checkout / path).resolve(), checkout.resolve()
    if not real.is_relative_to(base):
        raise SuiteError(
            f"{checkout / path} leads out of the checkout, to {real}: put a copy in its place",
            file=str(checkout / path),
        )
    return real


LENGTH = 12
_GIT = ("git", "-c", "core.fsmonitor=false", "--no-optional-locks")
"""Reading only, and running nothing that the checkout's own configuration names."""
_STATUS = ("status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=all", "--ignored")


def revision(checkout: Path, parts: Iterable[PurePosixPath]) -> str:
    """A git checkout's commit, and a digest of what of its `parts` differs from it; else a digest of these.

    Files that git ignores count: tokens are such files. A digest is over path, size and time of each file.
    """
    parts = list(parts)
    if (checkout / ".git").exists():
        head = _git(checkout, "rev-parse", "HEAD")
        said = _git(checkout, *_STATUS, "--", *map(str, parts))
        if head is not None and said is not None:
            changed = [PurePosixPath(entry[3:]) for entry in said.split("\0") if entry]
            changed = [path for path in changed if LEFT_OUT.isdisjoint(path.parts)]
            return head.strip()[:LENGTH] + (f"-{digest(checkout, changed)}" if changed else "")
    return digest(checkout, parts)


def digest(checkout: Path, parts: Iterable[PurePosixPath]) -> str:
    """Over every file in these paths; one that is not there counts by its name."""
    total = hashlib.sha256()
    for part in parts:
        total.update(f"{part}\n".encode())
        for path in walk(checkout, part):
            status = (checkout / path).lstat()
            if not stat.S_ISDIR(status.st_mode):
                total.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
    return total.hexdigest()[:LENGTH]


def _git(checkout: Path, *words: str) -> str | None:
    try:
        done = subprocess.run(
            [*_GIT, "-C", str(checkout), *words],
            capture_output=True,
            text=True,
            errors="surrogateescape",
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
