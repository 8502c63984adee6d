"""Files and folders that appear when they are complete, and replace others only if that was asked for."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from decathlon_mcp.errors import BadRequestError


@contextmanager
def new_file(out: Path, *, force: bool) -> Generator[BinaryIO]:
    """A file that becomes `out` at the end of the context; after an error nothing is left.

    Raises BadRequestError if `out` exists, unless `force` replaces it, or if it is a folder.
    """
    if out.is_dir():
        raise BadRequestError(f"{out} is a folder; name a file")
    _refuse_existing(out, force=force)
    partial = _beside(out)
    try:
        with partial.open("xb") as file:
            yield file
        _refuse_existing(out, force=force)
        os.replace(partial, out)  # noqa: PTH105  (documented as atomic)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def new_folder(out: Path, *, holds: str, force: bool) -> Generator[Path]:
    """A folder that becomes `out` at the end of the context; after an error nothing is left.

    `holds`: pattern of an export's files, such as `*.parquet` or `*/task.toml`. Raises BadRequestError if
    `out` exists, unless `force` replaces it. Even then only a folder with such files alone, or with folders
    that have one each: any other is no earlier export.
    """
    if out.exists() and not out.is_dir():
        raise BadRequestError(f"{out} is a file; name a folder")
    _refuse_existing(out, force=force)
    if out.exists():
        expected = {file.relative_to(out).parts[0] for file in out.glob(holds) if file.is_file()}
        if any(file.name not in expected for file in out.iterdir()):
            raise BadRequestError(
                f"{out} has other files than {holds}; --force replaces only an earlier export"
            )
    partial, old = _beside(out), _beside(out)
    partial.mkdir()
    try:
        yield partial
        _refuse_existing(out, force=force)
        if out.exists():
            # A folder cannot be replaced in one step: for a moment there is none.
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)


def _refuse_existing(out: Path, *, force: bool) -> None:
    if out.exists() and not force:
        raise BadRequestError(f"{out} exists; --force replaces it")


def _beside(out: Path) -> Path:
    return out.absolute().parent / f".{out.absolute().name}.{secrets.token_hex(4)}.partial"
