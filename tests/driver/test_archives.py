"""`unpack` and `pack`: archives of the server, and of what a sandbox has."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox import archives, wire
from decathlon_sandbox.driver_requests import RequestError


def member(name: str, kind: bytes = tarfile.REGTYPE, *, body: bytes = b"", **fields: Any) -> bytes:
    """One member of a tar, with its body."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(body)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + body + bytes(-len(body) % 512)


def archive(*members: bytes) -> bytes:
    return b"".join(members) + bytes(1024)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def unpack(folder: Path, *members: bytes) -> None:
    archives.unpack(str(folder), base64.b64encode(archive(*members)).decode())


FILE = member("good", body=b"1")
REFUSED = {
    "absolute name": archive(FILE, member("/outside/file", body=b"1")),
    "name with ..": archive(FILE, member("a/../../outside/file", body=b"1")),
    "not normalized": archive(FILE, member("a//b")),
    "hard link out": archive(member("link", tarfile.LNKTYPE, linkname="../outside/secret")),
    "long name out": archive(
        member("@", tarfile.GNUTYPE_LONGNAME, body=b"../" * 50 + b"outside/file\0"), FILE
    ),
    "no end": FILE,
    "no tar": b"x" * 4096,
}


@pytest.mark.parametrize("case", REFUSED)
def test_no_archive_leads_out_of_its_folder(case: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("untouched")
    with pytest.raises(ValueError):
        archives.unpack(str(tmp_path / "inside"), base64.b64encode(REFUSED[case]).decode())
    assert names(outside) == ["secret"]
    assert names(tmp_path) in (["outside"], ["inside", "outside"])


@pytest.mark.parametrize("target", ["..", "../outside", "absolute"])
def test_no_link_of_the_archive_is_written_through(tmp_path: Path, target: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = member("way", tarfile.SYMTYPE, linkname=str(outside) if target == "absolute" else target)
    for below in (member("way/file", body=b"1"), member("way/folder", tarfile.DIRTYPE)):
        with pytest.raises(OSError):
            unpack(tmp_path / "inside", link, below)
    # The link is replaced and not followed.
    unpack(tmp_path / "inside", link, member("way", body=b"new"))
    assert (tmp_path / "inside/way").read_text() == "new"
    assert list(outside.iterdir()) == []
    assert names(tmp_path) == ["inside", "outside"]


def test_hard_link_to_a_link_gives_a_link(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("untouched")
    inside = tmp_path / "inside"
    link = member("link", tarfile.SYMTYPE, linkname="../secret")
    unpack(inside, link, member("hard", tarfile.LNKTYPE, linkname="link"))
    assert (inside / "hard").is_symlink()
    up = member("up", tarfile.SYMTYPE, linkname="..")
    with pytest.raises(OSError):
        unpack(inside, up, member("stolen", tarfile.LNKTYPE, linkname="up/secret"))
    assert not (inside / "stolen").exists()


def test_the_last_of_several_members_with_one_name_stays(tmp_path: Path) -> None:
    unpack(
        tmp_path,
        member("a", body=b"1"),
        member("b", tarfile.LNKTYPE, linkname="a"),
        member("a", body=b"2"),
        member("folder", tarfile.DIRTYPE, mode=0o700),
        member("folder/", tarfile.DIRTYPE, mode=0o750),
    )
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("2", "1")
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750
    for kinds in ((tarfile.DIRTYPE, tarfile.REGTYPE), (tarfile.REGTYPE, tarfile.DIRTYPE)):
        with pytest.raises(OSError):
            unpack(tmp_path / kinds[0].decode(), *(member("a", kind) for kind in kinds))


def test_set_id_bits_and_owners_of_an_archive_do_not_count(tmp_path: Path) -> None:
    unpack(tmp_path, member("run", body=b"1", mode=0o6755, uid=12345, gid=12345))
    status = (tmp_path / "run").stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o755, os.geteuid())


NAMES = (b"/".join([b"d" * 200] * 10), b"e" * 100, b"\xff\xfe", b"a\nb")
"""A long one, one of a header's length, one that is no text, one with a line feed."""


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:5])
def test_any_name_that_linux_takes_survives(name: bytes, tmp_path: Path) -> None:
    path = os.fsdecode(name)
    sent, received = tmp_path / "from", tmp_path / "to"
    (sent / path).parent.mkdir(parents=True)
    (sent / path).write_bytes(b"1")
    (sent / "link").symlink_to(path)
    packed = archives.pack(str(sent), 100_000)
    with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as tar:
        assert path in tar.getnames()
    archives.unpack(str(received), packed)
    assert (received / path).read_bytes() == b"1"
    assert os.fspath((received / "link").readlink()) == path


def test_what_is_longer_than_allowed_is_not_packed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(512))
    assert len(base64.b64decode(archives.pack(str(tmp_path), 2048))) == 2048
    with pytest.raises(RequestError, match="larger than 2047 bytes") as error:
        archives.pack(str(tmp_path), 2047)
    assert error.value.code == wire.TOO_LONG
