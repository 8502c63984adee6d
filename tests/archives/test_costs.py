"""What a member of a workspace costs on its way into a grader's sandbox, in calls of Python functions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.unpacking import joined, unpack
from decathlon_mcp.archives.workspace import CleanWorkspace
from decathlon_mcp.archives.writing import pack_files

FEW, MANY = 50, 250
MAX_CALLS = 100
"""For one member: packed, its name read, filtered, joined with other archives, and unpacked."""


def write_file(folder: Path, number: int) -> None:
    (folder / f"file-{number}").write_bytes(b"1")


def write_link(folder: Path, number: int) -> None:
    (folder / f"link-{number}").hardlink_to(folder / "a")


def write_link_in_other_folder(folder: Path, number: int) -> None:
    (folder / "deep/below").mkdir(parents=True, exist_ok=True)
    (folder / f"deep/below/link-{number}").hardlink_to(folder / "a")


def calls(of: Callable[[], object]) -> int:
    count = 0

    def trace(frame: Any, event: str, argument: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(trace)
    try:
        of()
    finally:
        sys.setprofile(None)
    return count


def transfer(place: Path) -> None:
    pack_folder(place / "workspace", place / "workspace.tar", 1 << 20, below=place)
    workspace = CleanWorkspace(
        place / "workspace.tar", prefix="dumps/workspace", limit_bytes=1 << 20, limit_members=1000
    )
    parts = [(PurePosixPath(), pack_files({"task": b""})), (PurePosixPath(), workspace.streamed())]
    unpack(joined(parts), place / "root", below=place)


def cost(place: Path, write: Callable[[Path, int], None]) -> float:
    """Calls for one more member."""
    counts: list[int] = []
    for number in (FEW, MANY):
        folder = place / f"{write.__name__}-{number}" / "workspace"
        folder.mkdir(parents=True)
        (folder / "a").write_bytes(b"1" * 1000)
        for member in range(number):
            write(folder, member)
        counts.append(calls(lambda folder=folder: transfer(folder.parent)))
        copies = (folder.parent / "root/dumps/workspace").rglob("*-*")
        assert sum(1 for copy in copies if copy.is_file()) == number
    return (counts[1] - counts[0]) / (MANY - FEW)


def test_link_costs_no_more_than_a_file_and_both_cost_little(tmp_path: Path) -> None:
    file = cost(tmp_path, write_file)
    assert file <= MAX_CALLS
    assert cost(tmp_path, write_link) <= file
    assert cost(tmp_path, write_link_in_other_folder) <= file
