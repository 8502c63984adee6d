"""The writer of archives, read back by the standard library."""

from __future__ import annotations

import io
import os
import resource
import tarfile
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.unpacking import unpack, with_owner
from decathlon_mcp.archives.writing import (
    archive_chunks,
    pack_files,
    save,
)
from decathlon_mcp.errors import LimitExceededError


def members(archive: bytes) -> list[tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return tar.getmembers()


def test_body_shorter_than_its_size_is_filled_and_a_longer_one_is_an_error() -> None:
    member = Member(name="a", kind=Kind.FILE, size=4)
    archive = b"".join(archive_chunks([(member, [b"12"]), (Member(name="b", kind=Kind.FILE), ())]))
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        file = tar.extractfile("a")
        assert file is not None
        assert file.read() == b"12\0\0"
        assert tar.getnames() == ["a", "b"]
    with pytest.raises(ValueError, match="longer than 4 bytes"):
        list(archive_chunks([(member, [b"12345"])]))


def test_folder_is_packed_with_links_and_fifos_and_without_sockets(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("1")
    (folder / "link").symlink_to("/etc/passwd")
    os.mkfifo(folder / "fifo")
    descriptors = len([*Path("/proc/self/fd").iterdir()])
    pack_folder(folder, tmp_path / "a.tar", 1 << 20, below=tmp_path)
    assert len([*Path("/proc/self/fd").iterdir()]) == descriptors, "none stays open"
    packed = sorted(members((tmp_path / "a.tar").read_bytes()), key=lambda info: info.name)
    assert [info.name for info in packed] == [".", "./fifo", "./link", "./sub", "./sub/file"]
    assert [info.type for info in packed[:3]] == [tarfile.DIRTYPE, tarfile.FIFOTYPE, tarfile.SYMTYPE]


def test_file_with_many_names_is_packed_once(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    (folder / "deep/er").mkdir(parents=True)
    (folder / "a").write_bytes(b"x" * 30_000)
    for number in range(200):
        os.link(folder / "a", folder / f"deep/er/{number}")
    pack_folder(folder, tmp_path / "a.tar", 1 << 20, below=tmp_path)
    with tarfile.open(tmp_path / "a.tar") as tar:
        links = [member for member in tar if member.islnk()]
    assert {member.linkname for member in links} == {"./a"}
    assert len(links) == 200
    assert (tmp_path / "a.tar").stat().st_size < 30_000 + 210 * 512
    unpack(tmp_path / "a.tar", tmp_path / "copy", below=tmp_path)
    assert (tmp_path / "copy/deep/er/7").samefile(tmp_path / "copy/a")


def test_folder_behind_a_link_is_packed_as_empty(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    pack_folder(tmp_path / "link" / "ssl", tmp_path / "a.tar", 1 << 20, below=tmp_path)
    assert members((tmp_path / "a.tar").read_bytes()) == []


@pytest.mark.parametrize("missing", range(1, 9))
def test_folder_is_never_packed_as_empty_when_descriptors_run_out(tmp_path: Path, missing: int) -> None:
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "sub" / "file").write_text("1")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with ExitStack() as stack:
        # All descriptors below the limit are in use, but for the last ones.
        taken = [stack.enter_context(Path("/dev/null").open()) for _ in range(20)]
        limit = max(file.fileno() for file in taken) + missing
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limits[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        # Where they suffice, nothing is missing.
        with suppress(OSError):
            pack_folder(folder, tmp_path / "a.tar", 1 << 20, below=tmp_path)
    if (tmp_path / "a.tar").exists():
        assert [info.name for info in members((tmp_path / "a.tar").read_bytes())] == [
            ".",
            "./sub",
            "./sub/file",
        ]


def test_archive_above_the_limit_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(LimitExceededError, match="exceed the limit of 3 bytes"):
        save([b"12", b"34"], tmp_path / "a.tar", 3)
    assert not (tmp_path / "a.tar").exists()


def test_owner_of_every_member_is_replaced() -> None:
    chunks = with_owner(pack_files({"a": b"1"}), 3, 4)
    (member,) = members(b"".join(chunks))
    assert (member.uid, member.gid, member.uname, member.gname) == (3, 4, "", "")
