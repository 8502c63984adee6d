"""Moves through folders by descriptors, for folders whose owner may be hostile: no link is ever followed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Self

from decathlon_mcp.errors import BadRequestError, LimitExceededError

MAX_LEVELS = 1000
"""How deep folders may lie. A move between folders costs as many calls as there are folders between them."""
_OPEN_LEVELS = 32
"""Down to this level, the descriptors of the folders above the current one are kept open. Below it,
`..` leads back."""
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Parts = tuple[str, ...]


class FolderCursor:
    """The current folder, at or below `base`, a path or a descriptor of a folder.

    `creates`: whether folders that are missing are created.
    """

    def __init__(self, base: Path | int, *, creates: bool = False) -> None:
        self._creates = creates
        if isinstance(base, int):
            self._open_levels = [os.open(".", _FOLDER_FLAGS, dir_fd=base)]
        else:
            self._open_levels = [os.open(base, _FOLDER_FLAGS)]
        self._parts: Parts = ()
        self._current = os.dup(self._open_levels[0])
        self._identities: list[tuple[int, int]] = []
        """Device and inode of each folder of `_parts`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for descriptor in (*self._open_levels, self._current):
            os.close(descriptor)

    def second(self) -> FolderCursor:
        """A cursor that moves independently below the same folder, which must exist; it creates none."""
        return FolderCursor(self._open_levels[0])

    def enter(self, parts: Parts) -> int:
        """A descriptor of that folder, valid until the next call.

        Raises OSError, e.g. for a link, LimitExceededError below `MAX_LEVELS`, and BadRequestError for "..".
        """
        if len(parts) > MAX_LEVELS:
            raise LimitExceededError(
                f"folders in the sandbox are more than {MAX_LEVELS} levels deep", budget="levels"
            )
        if parts != self._parts:
            level = _common(parts, self._parts)
            if (current := self._above(level)) is None:
                level = min(level, len(self._open_levels) - 1)
                current = os.dup(self._open_levels[level])
            for descriptor in self._open_levels[level + 1 :]:
                os.close(descriptor)
            del self._open_levels[level + 1 :]
            os.close(self._current)
            self._current, self._parts = current, parts[:level]
            del self._identities[level:]
            for part in parts[level:]:
                self._descend(part)
        return self._current

    def _above(self, level: int) -> int | None:
        """A descriptor of the folder of that level above the current one; None if another way is shorter."""
        steps = len(self._parts) - level
        if steps == 0:
            return os.dup(self._current)
        if steps > level - len(self._open_levels) + 1:
            return None
        try:
            folder = os.open("/".join([".."] * steps), _FOLDER_FLAGS, dir_fd=self._current)
        except OSError:
            return None
        # It leads elsewhere if a folder was moved meanwhile.
        if _identity(folder) == self._identities[level - 1]:
            return folder
        os.close(folder)
        return None

    def _descend(self, part: str) -> None:
        if part in ("", ".", ".."):
            raise BadRequestError(f"{part!r} is no name of a folder")
        child = self._open(part)
        if len(self._open_levels) == len(self._parts) + 1 and len(self._open_levels) <= _OPEN_LEVELS:
            self._open_levels.append(os.dup(child))
        os.close(self._current)
        self._current, self._parts = child, (*self._parts, part)
        self._identities.append(_identity(child))

    def _open(self, name: str) -> int:
        try:
            return open_accessible(name, _FOLDER_FLAGS, self._current, 0o700)
        except FileNotFoundError:
            if not self._creates:
                raise
            os.mkdir(name, 0o755, dir_fd=self._current)
            return os.open(name, _FOLDER_FLAGS, dir_fd=self._current)


def _common(parts: Parts, others: Parts) -> int:
    """How many of the first parts are the same."""
    length = min(len(parts), len(others))
    if parts[:length] == others[:length]:
        return length
    return next(number for number in range(length) if parts[number] != others[number])


def _identity(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


def open_accessible(name: str, flags: int, folder: int, mode: int) -> int:
    """Open a file in a folder without following a link.

    Its owner may have taken the permission from itself: then it gets the permissions `mode` first. Raises
    OSError.
    """
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=folder)
    except PermissionError:
        descriptor = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            # chmod(2) would follow a link that has replaced it, and fchmod(2) refuses such a descriptor.
            os.chmod(f"/proc/self/fd/{descriptor}", mode)  # noqa: PTH101
        finally:
            os.close(descriptor)
        return os.open(name, flags, dir_fd=folder)
