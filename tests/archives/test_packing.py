"""Packing a folder that an agent has filled: what it costs the server is bounded, whatever is in it."""

from __future__ import annotations

import io
import os
import stat
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from decathlon_mcp.archives import packing
from decathlon_mcp.archives.packing import FolderCursor, counted, pack_folder
from decathlon_mcp.errors import LimitExceededError

LEVELS = 300


def deep_folder(top: Path) -> int:
    """A descriptor of a folder many levels below `top`, which is created."""
    top.mkdir()
    place = os.open(top, os.O_RDONLY)
    for _ in range(LEVELS):
        os.mkdir("d" * 9, dir_fd=place)
        place, above = os.open("d" * 9, os.O_RDONLY, dir_fd=place), place
        os.close(above)
    return place


def make_sockets(place: int, count: int) -> None:
    os.mknod("s", stat.S_IFSOCK | 0o600, dir_fd=place)
    for number in range(count - 1):
        os.link("s", f"{number:040}", src_dir_fd=place, dst_dir_fd=place)


def make_folders(place: int, count: int) -> None:
    for number in range(count):
        os.mkdir(f"{number:040}", dir_fd=place)


def make_linked_files(place: int, count: int) -> None:
    for number in range(count // 2):
        os.close(os.open(f"a{number}", os.O_CREAT | os.O_WRONLY, dir_fd=place))
        os.link(f"a{number}", f"b{number}", src_dir_fd=place, dst_dir_fd=place)


def peak_bytes(top: Path) -> int:
    tracemalloc.start()
    try:
        pack_folder(top, top.with_suffix(".tar"), 1 << 30, below=top.parent)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("make", [make_sockets, make_folders, make_linked_files])
def test_memory_hardly_grows_with_the_number_of_names(
    tmp_path: Path, make: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "MAX_FIRST_NAME_BYTES", 200_000)
    few, many = 300, 2_000
    peaks: list[int] = []
    for count in (few, many):
        place = deep_folder(tmp_path / str(count))
        make(place, count)
        os.close(place)
        peaks.append(peak_bytes(tmp_path / str(count)))
    assert peaks[1] < 2_000_000
    # Each path has 3,000 bytes: a list of them would take 5 MB more.
    assert peaks[1] - peaks[0] < 600_000


LIMITS = [
    ("MAX_ENTRIES", 99, "entries"),
    ("MAX_NAME_BYTES", 3_999, "name_bytes"),
    ("MAX_PENDING_BYTES", 4_099, "pending_bytes"),
    ("MAX_SECONDS", 0.0, "seconds"),
]


@pytest.mark.parametrize(("constant", "limit", "budget"), LIMITS)
def test_each_limit_ends_the_walk_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constant: str, limit: float, budget: str
) -> None:
    top = tmp_path / "top"
    top.mkdir()
    for number in range(100):
        (top / f"{number:040}").mkdir()
    pack_folder(top, tmp_path / "a.tar", 1 << 20, below=tmp_path)
    (tmp_path / "a.tar").unlink()
    monkeypatch.setattr(packing, constant, limit)
    with pytest.raises(LimitExceededError) as raised:
        pack_folder(top, tmp_path / "a.tar", 1 << 20, below=tmp_path)
    assert raised.value.data["budget"] == budget
    assert not (tmp_path / "a.tar").exists()


@pytest.mark.parametrize("tar_format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_members_of_somebody_elses_archive_are_counted(
    monkeypatch: pytest.MonkeyPatch, tar_format: int
) -> None:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tar_format) as archive:
        for number in range(5):
            for name in (f"{number}", f"{number}" * 200):
                info = tarfile.TarInfo(name)
                info.size = 700
                archive.addfile(info, io.BytesIO(b"\1" * 700))
            link = tarfile.TarInfo(f"link{number}")
            link.type, link.size = tarfile.SYMTYPE, 700  # of which no body follows
            link.linkname = "0"
            archive.addfile(link)
    content = file.getvalue()
    chunks = [content[start : start + 333] for start in range(0, len(content), 333)]
    monkeypatch.setattr(packing, "MAX_ENTRIES", 15)
    assert b"".join(counted(chunks)) == content
    monkeypatch.setattr(packing, "MAX_ENTRIES", 14)
    with pytest.raises(LimitExceededError) as raised:
        list(counted(chunks))
    assert raised.value.data["budget"] == "entries"


def test_folder_that_is_moved_meanwhile_leads_nowhere_else(tmp_path: Path) -> None:
    deep = tuple("d" * 40)
    top = tmp_path / "top"
    (tmp_path / "elsewhere" / "sibling").mkdir(parents=True)
    with FolderCursor(top.parent, creates=True) as cursor:
        cursor.enter(("top", *deep, "one"))
        sibling = os.fstat(cursor.enter(("top", *deep, "sibling")))
        moved = top.joinpath(*deep, "sibling").rename(tmp_path / "elsewhere" / "moved")
        # Its `..` is another folder now, which has a folder of that name too.
        found = os.fstat(cursor.enter(("top", *deep, "one")))
        assert os.path.samestat(sibling, moved.stat())
        assert os.path.samestat(found, top.joinpath(*deep, "one").stat())
