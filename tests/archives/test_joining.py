"""Joining the members of several archives."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path, PurePosixPath

import pytest

from decathlon_mcp.archives.unpacking import joined, selected
from decathlon_mcp.archives.writing import ArchiveSource, archive_chunks, save
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


def write(target: Path, *parts: tuple[PurePosixPath, ArchiveSource]) -> None:
    save(archive_chunks(joined(parts).entries()), target)


def test_members_follow_those_of_the_archive_below_the_prefix(tmp_path: Path) -> None:
    first = archive_of(tmp_path / "base.tar", member("utils/a.py"))
    source = archive_of(
        tmp_path / "source.tar",
        member(".", tarfile.DIRTYPE),
        member("./bin/run", mode=0o4755),
        member("./bin/again", tarfile.LNKTYPE, link="./bin/run"),
        member("./link", tarfile.SYMTYPE, link="bin/run"),
    )
    target = tmp_path / "joined.tar"
    write(target, (PurePosixPath(), first), (PREFIX, source))
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


def test_only_named_entries_are_selected(tmp_path: Path) -> None:
    source = archive_of(
        tmp_path / "source.tar", member("./pages/a"), member("./pages2"), member("./groundtruth/answer")
    )
    target = tmp_path / "joined.tar"
    write(target, (PurePosixPath("tasks"), selected(source, {"pages"})))
    with tarfile.open(target) as tar:
        assert tar.getnames() == ["tasks", "tasks/pages/a"]


def test_hard_link_to_an_entry_that_is_left_out_is_refused(tmp_path: Path) -> None:
    source = archive_of(
        tmp_path / "source.tar",
        member("./groundtruth/answer"),
        member("./pages/a", tarfile.LNKTYPE, link="./groundtruth/answer"),
    )
    with pytest.raises(BadRequestError, match="'pages/a' is the same file as 'groundtruth/answer'"):
        write(tmp_path / "joined.tar", (PurePosixPath("tasks"), selected(source, {"pages"})))


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
        write(tmp_path / "joined.tar", (PREFIX, source))
