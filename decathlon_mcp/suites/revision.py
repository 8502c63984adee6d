"""Which state a checkout is in, as a short word that changes when it does."""

from __future__ import annotations

import hashlib
import stat
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from decathlon_mcp.suites.archives import LEFT_OUT, walk

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
