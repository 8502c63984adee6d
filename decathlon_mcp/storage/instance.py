"""The instance lock: each running server locks a file that is named like the label of its sandboxes.

A file without a lock belongs to a server that died; the next server removes the sandboxes that it left.
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
    """Hold the lock of a new server name; yields that name and the names of servers that died."""
    folder = state / "servers"
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    dead = [file.name for file in sorted(folder.iterdir()) if not _is_locked(file)]
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
    """Remove the lock file of a dead server, once its sandboxes are removed."""
    (state / "servers" / name).unlink(missing_ok=True)


def _is_locked(file: Path) -> bool:
    descriptor = os.open(file, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
