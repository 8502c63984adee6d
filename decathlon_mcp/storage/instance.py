"""Which server's sandboxes are whose: each running server holds a lock on a file named after it.

A file that is not locked belongs to a server that died; what it may have left is swept by the next one.
"""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def instance_lock(state: Path) -> Generator[tuple[str, list[str]]]:
    """A name for this server, held while the context lasts, and the names of servers that died."""
    folder = state / "servers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    dead = [file.name for file in sorted(folder.iterdir()) if _taken_over(file)]
    name = secrets.token_hex(6)
    file = folder / name
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield name, dead
    finally:
        file.unlink(missing_ok=True)
        os.close(descriptor)


def forget(state: Path, name: str) -> None:
    """What that server left has been swept."""
    (state / "servers" / name).unlink(missing_ok=True)


def _taken_over(file: Path) -> bool:
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
