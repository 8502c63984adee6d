"""Unpacking the root file system of an image, whose author may be hostile."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.unpacking import unpack_root
from decathlon_mcp.archives.writing import Entry, archive_chunks
from decathlon_mcp.errors import BadRequestError


def file(name: str, content: bytes = b"content", mode: int = 0o644) -> Entry:
    return Member(name=name, kind=Kind.FILE, size=len(content), mode=mode), (content,)


def link(name: str, target: str, kind: Kind = Kind.SYMLINK) -> Entry:
    return Member(name=name, kind=kind, link=target, mode=0o777), ()


def folder(name: str, mode: int = 0o755) -> Entry:
    return Member(name=name, kind=Kind.FOLDER, mode=mode), ()


def chunks(*entries: Entry, size: int = 1000) -> Iterator[bytes]:
    """An archive in chunks that begin and end anywhere."""
    whole = b"".join(archive_chunks(entries))
    return (whole[start : start + size] for start in range(0, len(whole), size))


def test_files_links_and_folders_are_unpacked_without_set_id_bits_and_devices(tmp_path: Path) -> None:
    entries = (
        folder("./tmp", 0o1777),
        file("usr/bin/su", b"x" * 5000, 0o4711),
        file("usr/secret", mode=0),
        link("usr/bin/same", "usr/bin/su", Kind.HARD_LINK),
        link("etc/outside", "../../../../etc/passwd"),
        (Member(name="dev/sda", kind=Kind.BLOCK_DEVICE), ()),
        (Member(name="dev/null", kind=Kind.CHARACTER_DEVICE), ()),
        (Member(name="run/pipe", kind=Kind.FIFO), ()),
    )
    unpack_root(chunks(*entries), tmp_path, None)
    modes = {
        str(path.relative_to(tmp_path)): path.lstat().st_mode & 0o7777
        for path in tmp_path.rglob("*")
        if not path.is_symlink()
    }
    assert modes == {
        **dict.fromkeys(("usr", "usr/bin", "etc", "tmp"), 0o755),
        **dict.fromkeys(("usr/bin/su", "usr/bin/same"), 0o711),
        "usr/secret": 0o400,
    }
    assert (tmp_path / "usr/bin/su").read_bytes() == b"x" * 5000
    assert (tmp_path / "etc/outside").readlink() == Path("../../../../etc/passwd")


@pytest.mark.parametrize(
    "entries",
    [
        (file("../outside"),),
        (file("/outside"),),
        (file("a/../../outside"),),
        (link("hard", "../outside", Kind.HARD_LINK),),
        (link("up", ".."), file("up/outside")),
        (link("absolute", "/tmp"), file("absolute/outside")),
        (link("file", "../outside"), link("hard", "file/x", Kind.HARD_LINK)),
        (file("file"), file("file/below")),
    ],
)
def test_nothing_is_written_outside_of_the_folder(tmp_path: Path, entries: tuple[Entry, ...]) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with pytest.raises(BadRequestError):
        unpack_root(chunks(*entries), root, None)
    assert [path.name for path in tmp_path.iterdir()] == ["root"]
    assert not Path("/outside").exists()
    assert not Path("/tmp/outside").exists()


def test_a_link_that_is_replaced_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    root = tmp_path / "root"
    root.mkdir()
    unpack_root(chunks(link("file", str(target)), file("file", b"new")), root, None)
    assert target.read_text() == "untouched"
    assert (root / "file").read_bytes() == b"new"


def test_an_archive_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    whole = b"".join(chunks(file("a", b"x" * 4000)))
    with pytest.raises(BadRequestError, match="is not a whole tar archive"):
        unpack_root([whole[:700]], tmp_path, None)


def test_files_of_root_are_given_away(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")
    entries = (folder("a"), file("a/b"), link("a/c", "/etc/passwd"), file("new/d"))
    unpack_root(chunks(*entries), tmp_path, (1234, 1235))
    owners = {path.name: (path.lstat().st_uid, path.lstat().st_gid) for path in tmp_path.rglob("*")}
    assert owners == dict.fromkeys(("a", "b", "c", "d"), (1234, 1235)) | {"new": (0, 0)}
    assert Path("/etc/passwd").stat().st_uid == 0
