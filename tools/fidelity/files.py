"""The files of a correct attempt, from a task's own ground truth, and the same with a mistake.

Nothing of a checkout is part of this project: the files are read when a task is played. Paths are relative
to the workspace; bytes are a file's content, and None means that the file is removed.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import openpyxl

Files: TypeAlias = Mapping[str, bytes | None]
FilesOf: TypeAlias = Callable[[Path], Files]
"""The files of a correct attempt at the task in this folder."""

TASKS = Path("tasks/finalpool")
TRUTH = "groundtruth_workspace"
_OTHER_DIGITS = bytes.maketrans(b"0123456789", b"1234567890")


def copied(**names: str) -> FilesOf:
    """Files of the ground truth under other names: `copied(**{"name here": "name there"})`."""
    return lambda task: {goal: (task / TRUTH / name).read_bytes() for goal, name in names.items()}


def same(*names: str, without: tuple[str, ...] = ()) -> FilesOf:
    """Files of the ground truth with these names; `without` are removed from the workspace."""
    return lambda task: {
        **{name: (task / TRUTH / name).read_bytes() for name in names},
        **dict.fromkeys(without),
    }


def unpacked(archive: str, *suffixes: str) -> FilesOf:
    """The files in an archive of the ground truth whose names end so; all of them without suffixes."""

    def files(task: Path) -> Files:
        found: dict[str, bytes | None] = {}
        with tarfile.open(task / TRUTH / archive) as tar:
            for member in tar.getmembers():
                name = member.name.rpartition("/")[2]
                if member.isfile() and not name.startswith("._") and member.name.endswith(suffixes or ("",)):
                    content = tar.extractfile(member)
                    assert content is not None
                    found[member.name.removeprefix("./")] = content.read()
        return found

    return files


def with_mistake(files: Files) -> Files:
    """The same files with one mistake in each: other digits in texts, another number in tables."""
    return {name: content and _with_mistake(name, content) for name, content in files.items()}


def _with_mistake(name: str, content: bytes) -> bytes:
    if name.endswith(".xlsx"):
        return _with_another_number(content)
    return content.translate(_OTHER_DIGITS)


def _with_another_number(content: bytes) -> bytes:
    """A table whose last number, or last cell if it has none, is another."""
    book = openpyxl.load_workbook(io.BytesIO(content))
    sheet = book.worksheets[0]
    cells = [cell for row in sheet.iter_rows() for cell in row if cell.value is not None]
    cell = next((cell for cell in reversed(cells) if isinstance(cell.value, int | float)), cells[-1])
    cell.value = cell.value + 1 if isinstance(cell.value, int | float) else "wrong"
    stored = io.BytesIO()
    book.save(stored)
    return stored.getvalue()


def archive(files: Files) -> bytes:
    """A compressed archive of the files that are not removed."""
    stored = io.BytesIO()
    with tarfile.open(fileobj=stored, mode="w:gz") as tar:
        for name, content in files.items():
            if content is not None:
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return stored.getvalue()
