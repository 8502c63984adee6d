"""A change of somebody's file: shown, asked for, written in one piece, with what was there kept beside it."""

from __future__ import annotations

import difflib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from decathlon_mcp.cli.install.edit import Text
from decathlon_mcp.cli.install.jsonc import NotJsonError
from decathlon_mcp.errors import BadRequestError

OWN_MODE = 0o600


@dataclass(frozen=True, slots=True)
class Kept:
    """A file as it was found: None where there is none."""

    path: Path
    data: bytes | None

    @classmethod
    def read(cls, path: Path) -> Kept:
        """Where it is a link, the file that it leads to. Raises BadRequestError."""
        real = path.resolve()
        try:
            return cls(real, real.read_bytes())
        except FileNotFoundError:
            return cls(real, None)
        except OSError as error:
            raise BadRequestError(f"{path}: {error.strerror}") from None

    def text(self, *, comments: bool) -> Text:
        """Raises BadRequestError for what is not JSON: it is left as it is."""
        try:
            return Text((self.data or b"").decode(), comments=comments)
        except (NotJsonError, UnicodeDecodeError) as error:
            said = error if isinstance(error, NotJsonError) else "not UTF-8"
            raise BadRequestError(
                f"{self.path} is not what it should be, and was not touched: {said}"
            ) from None


@dataclass(frozen=True, slots=True)
class Change:
    """What a file is to become; `after` None: it is to go."""

    before: Kept
    after: bytes | None

    def __bool__(self) -> bool:
        return self.before.data != self.after

    def shown(self, secrets: Sequence[str]) -> str:
        """As a unified diff, with dots for what nobody should read over a shoulder."""
        old, new = ((data or b"").decode().splitlines() for data in (self.before.data, self.after))
        lines = difflib.unified_diff(old, new, str(self.before.path), str(self.before.path), lineterm="")
        said = "\n".join(lines)
        for secret in secrets:
            said = said.replace(secret, "…")
        return said

    def write(self) -> None:
        """All of it or nothing. Raises BadRequestError where the file cannot be written, or has changed."""
        path = self.before.path
        if Kept.read(path).data != self.before.data:
            raise BadRequestError(f"{path} has changed meanwhile; nothing was written")
        try:
            if self.after is None:
                path.unlink()
            else:
                _replace(path, self.after)
        except OSError as error:
            raise BadRequestError(f"{path}: {error.strerror}") from None


def keep(before: Kept, name: str) -> Path:
    """Put what was there beside it, an empty file for nothing; where it is."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    backup = before.path.with_name(f"{before.path.name}.before-{name}-{stamp}")
    backup.parent.mkdir(parents=True, exist_ok=True)
    _replace(backup, before.data or b"")
    return backup


def newest_backup(path: Path, name: str) -> Path:
    """Raises BadRequestError where there is none."""
    path = path.resolve()
    prefix = f"{path.name}.before-{name}-"
    found = sorted(each for each in path.parent.glob("*") if each.name.startswith(prefix))
    if not found:
        raise BadRequestError(f"nothing to undo: no {prefix}… in {path.parent}")
    return found[-1]


def _replace(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o777 if path.exists() else OWN_MODE
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(partial).chmod(mode)
        Path(partial).replace(path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise
