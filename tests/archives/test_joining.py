"""Appending the members of one archive to another."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.archives.unpacking import append_archive
from decathlon_mcp.archives.writing import empty_archive, save
from decathlon_mcp.errors import BadRequestError

PREFIX = PurePosixPath("dumps/workspace")


def archive_of(path: Path, *members: tarfile.TarInfo) -> Path:
    """An archive with these members; every file has the content `content`."""
    with tarfile.open(path, "w") as tar:
        for member in members:
            member.size = 7 if member.isreg() else 0
            tar.addfile(member, io.BytesIO(b"content"))
    return path


def member(name: str, kind: bytes = tarfile.REGTYPE, *, link: str = "", mode: int = 0o644) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.mode, info.mtime = kind, link, mode, 1_500_000_000
    return info


def base(folder: Path) -> Path:
    archive = folder / "base.tar"
    save(empty_archive(), archive)
    return archive


def test_members_follow_those_of_the_archive_below_the_prefix(tmp_path: Path) -> None:
    target = archive_of(tmp_path / "base.tar", member("utils/a.py"))
    source = archive_of(
        tmp_path / "source.tar",
        member(".", tarfile.DIRTYPE),
        member("./bin/run", mode=0o4755),
        member("./bin/again", tarfile.LNKTYPE, link="./bin/run"),
        member("./link", tarfile.SYMTYPE, link="bin/run"),
    )
    append_archive(target, source, PREFIX)
    with tarfile.open(target) as tar:
        assert tar.getnames() == [
            "utils/a.py",
            "dumps",
            "dumps/workspace",
            *(f"dumps/workspace/{name}" for name in ("bin/run", "bin/again", "link")),
        ]
        run = tar.getmember("dumps/workspace/bin/run")
        assert (run.mode, run.mtime) == (0o755, 1_500_000_000)
        again, link = tar.extractfile("dumps/workspace/bin/again"), tar.getmember("dumps/workspace/link")
        assert again is not None
        assert again.read() == b"content"
        assert link.linkname == "bin/run"


def test_only_named_entries_are_appended(tmp_path: Path) -> None:
    source = archive_of(
        tmp_path / "source.tar", member("./pages/a"), member("./pages2"), member("./groundtruth/answer")
    )
    target = base(tmp_path)
    append_archive(target, source, PurePosixPath("tasks"), {"pages"})
    with tarfile.open(target) as tar:
        assert tar.getnames() == ["tasks", "tasks/pages/a"]


def test_hard_link_to_an_entry_that_is_left_out_is_refused(tmp_path: Path) -> None:
    source = archive_of(
        tmp_path / "source.tar",
        member("./groundtruth/answer"),
        member("./pages/a", tarfile.LNKTYPE, link="./groundtruth/answer"),
    )
    with pytest.raises(BadRequestError, match="'pages/a' is the same file as 'groundtruth/answer'"):
        append_archive(base(tmp_path), source, PurePosixPath("tasks"), {"pages"})


@pytest.mark.parametrize(
    "refused",
    [
        member("./pipe", tarfile.FIFOTYPE),
        member("./device", tarfile.CHRTYPE),
        member("./link", tarfile.SYMTYPE, link="../../configs/key"),
        member("./../outside"),
    ],
    ids=["FIFO", "device", "link that leads out", "parent"],
)
def test_members_that_no_sandbox_unpacks_are_refused(tmp_path: Path, refused: tarfile.TarInfo) -> None:
    source = archive_of(tmp_path / "source.tar", refused)
    with pytest.raises(BadRequestError):
        append_archive(base(tmp_path), source, PREFIX)
