"""`unpack` and `pack`: archives that a hostile sender made, by a real driver."""

from __future__ import annotations

import base64
import io
import os
import tarfile
from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox import wire

from tests.driver.peer import DriverPeer, WireError

pytestmark = pytest.mark.anyio

OCTAL_DIGITS = 8


def member(name: str, kind: bytes = tarfile.REGTYPE, *, body: bytes = b"", **fields: Any) -> bytes:
    """One member of a tar, with its body."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(body)
    for field, value in fields.items():
        setattr(info, field, value)
    return info.tobuf(tarfile.GNU_FORMAT) + body + bytes(-len(body) % 512)


def archive(*members: bytes) -> bytes:
    return b"".join(members) + bytes(1024)


def with_field(header: bytes, start: int, value: bytes) -> bytes:
    """A header in which these bytes are replaced, with a valid checksum."""
    changed = bytearray(header)
    changed[start : start + len(value)] = value
    changed[148:156] = b" " * OCTAL_DIGITS
    changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def step(folder: Path, data: bytes) -> dict[str, Any]:
    return {"unpack": str(folder), "tar": base64.b64encode(data).decode()}


async def unpack(peer: DriverPeer, folder: Path, *members: bytes) -> None:
    await peer.request(wire.ARRANGE, steps=[step(folder, archive(*members))])


async def refusal(peer: DriverPeer, folder: Path, data: bytes) -> WireError:
    with pytest.raises(WireError) as error:
        await peer.request(wire.ARRANGE, steps=[step(folder, data)])
    return error.value


FILE = member("good", body=b"1")
SIZE, MTIME, PAX = 124, 136, b"x"
REFUSED = {
    "absolute name": archive(FILE, member("/outside/file", body=b"1")),
    "name with ..": archive(FILE, member("a/../../outside/file", body=b"1")),
    "only ..": archive(FILE, member("..", tarfile.DIRTYPE)),
    "not normalized": archive(FILE, member("a//b")),
    "the folder itself": archive(member("./", tarfile.DIRTYPE)),
    "hard link out": archive(member("link", tarfile.LNKTYPE, linkname="../outside/secret")),
    "absolute hard link": archive(member("link", tarfile.LNKTYPE, linkname="/etc/passwd")),
    "character device": archive(FILE, member("null", tarfile.CHRTYPE, devmajor=1, devminor=3)),
    "block device": archive(FILE, member("disk", tarfile.BLKTYPE)),
    "FIFO": archive(FILE, member("fifo", tarfile.FIFOTYPE)),
    "sparse file": archive(FILE, with_field(member("s", tarfile.GNUTYPE_SPARSE), 483, b"77777777777\0")),
    "unknown kind": archive(FILE, member("what", b"Z")),
    "pax header": archive(FILE, member("p", PAX, body=b"30 path=../outside/file\n"), member("a")),
    "digits that a regular expression searches": archive(member("p", PAX, body=b"1" * 1_000_000), FILE),
    "global pax header": archive(member("g", tarfile.XGLTYPE, body=b"11 path=/a\n"), FILE),
    "negative size": archive(with_field(FILE[:512], SIZE, b"\xff" * 12)),
    "huge size": archive(with_field(FILE[:512], SIZE, b"\x80" + b"\x7f" * 11)),
    "body beyond the end": member("a", body=b"1" * 5000)[:3000],
    "size beyond the end": archive(with_field(FILE[:512], SIZE, b"00007640000\0")),
    "negative time": archive(with_field(FILE[:512], MTIME, b"\xff" * 12) + FILE[512:]),
    "distant time": archive(with_field(FILE[:512], MTIME, b"\x80" + b"\x7f" * 11) + FILE[512:]),
    "huge long name": archive(member("@", tarfile.GNUTYPE_LONGNAME, body=b"a" * 100_000), FILE),
    "long name out": archive(
        member("@", tarfile.GNUTYPE_LONGNAME, body=b"../" * 50 + b"outside/file\0"), FILE
    ),
    "long name without a member": member("@", tarfile.GNUTYPE_LONGNAME, body=b"a" * 200),
    "a thousand long names": archive(
        *(member("@", tarfile.GNUTYPE_LONGNAME, body=b"a\0") for _ in range(1_000)), FILE
    ),
    "too deep": archive(member("/".join("d" * 1_500), tarfile.DIRTYPE)),
    "no end": FILE,
    "half an end": FILE + bytes(512),
    "within a header": FILE + FILE[:100],
    "broken header in the middle": archive(FILE, b"x" * 512, FILE),
    "something after the end": archive(FILE) + FILE,
    "nothing": b"",
    "no tar": b"x" * 4096,
    "gzip": b"\x1f\x8b" + bytes(510),
    "too long": archive(member("a", body=bytes(wire.MAX_ARCHIVE_BYTES))),
}


async def test_hostile_archives_are_refused_before_anything_is_written(
    peer: DriverPeer, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("untouched")
    for case, data in REFUSED.items():
        error = await refusal(peer, tmp_path / "inside", data)
        assert (case, error.reason, error.data) == (case, "bad_params", {"step": 0})
        assert not (tmp_path / "inside").exists(), case
        assert names(outside) == ["secret"], case


@pytest.mark.parametrize("target", ["..", "../outside", "absolute"])
async def test_no_link_of_the_archive_is_written_through(
    peer: DriverPeer, tmp_path: Path, target: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    link = member("way", tarfile.SYMTYPE, linkname=str(outside) if target == "absolute" else target)
    for below in (member("way/file", body=b"1"), member("way/folder", tarfile.DIRTYPE)):
        error = await refusal(peer, tmp_path / "inside", archive(link, below))
        assert error.reason == "files"
    # The link is replaced and not followed.
    await unpack(peer, tmp_path / "inside", link, member("way", body=b"new"))
    assert (tmp_path / "inside/way").read_text() == "new"
    assert list(outside.iterdir()) == []
    assert names(tmp_path) == ["inside", "outside"]


async def test_hard_link_to_a_link_gives_a_link(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("untouched")
    await unpack(
        peer,
        tmp_path / "inside",
        member("link", tarfile.SYMTYPE, linkname="../secret"),
        member("hard", tarfile.LNKTYPE, linkname="link"),
    )
    assert (tmp_path / "inside/hard").is_symlink()
    error = await refusal(
        peer,
        tmp_path / "inside",
        archive(
            member("up", tarfile.SYMTYPE, linkname=".."),
            member("stolen", tarfile.LNKTYPE, linkname="up/secret"),
        ),
    )
    assert error.reason == "files"
    assert not (tmp_path / "inside/stolen").exists()


async def test_the_last_of_several_members_with_one_name_stays(peer: DriverPeer, tmp_path: Path) -> None:
    await unpack(
        peer,
        tmp_path,
        member("a", body=b"1"),
        member("b", tarfile.LNKTYPE, linkname="a"),
        member("a", body=b"2"),
        member("folder", tarfile.DIRTYPE, mode=0o700),
        member("folder/", tarfile.DIRTYPE, mode=0o750),
    )
    assert ((tmp_path / "a").read_text(), (tmp_path / "b").read_text()) == ("2", "1")
    assert (tmp_path / "folder").stat().st_mode & 0o777 == 0o750
    for first, second in ((tarfile.DIRTYPE, tarfile.REGTYPE), (tarfile.REGTYPE, tarfile.DIRTYPE)):
        error = await refusal(peer, tmp_path / "other", archive(member("a", first), member("a", second)))
        assert error.reason == "files"
        (tmp_path / "other/a").rmdir() if first == tarfile.DIRTYPE else (tmp_path / "other/a").unlink()


async def test_set_id_bits_and_owners_of_an_archive_do_not_count(peer: DriverPeer, tmp_path: Path) -> None:
    await unpack(peer, tmp_path, member("run", body=b"1", mode=0o6755, uid=12345, gid=12345))
    status = (tmp_path / "run").stat()
    assert (status.st_mode & 0o7777, status.st_uid) == (0o755, os.geteuid())


async def test_base64_that_is_none_is_refused(peer: DriverPeer, tmp_path: Path) -> None:
    with pytest.raises(WireError, match="`tar` must be base64") as error:
        await peer.request(wire.ARRANGE, steps=[{"unpack": str(tmp_path), "tar": "a"}])
    assert error.value.reason == "bad_params"


NAMES = (b"/".join([b"d" * 200] * 10), b"e" * 100, b"\xff\xfe", b"a\nb")
"""A long one, one of a header's length, one that is no text, one with a line feed."""


async def test_any_name_that_linux_takes_survives(peer: DriverPeer, tmp_path: Path) -> None:
    for number, name in enumerate(NAMES):
        path = os.fsdecode(name)
        sent, received = tmp_path / f"from{number}", tmp_path / f"to{number}"
        (sent / path).parent.mkdir(parents=True)
        (sent / path).write_bytes(b"1")
        (sent / "link").symlink_to(path)
        packed = (await peer.request(wire.PACK, folder=str(sent), max_bytes=100_000))["tar"]
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(packed))) as tar:
            assert path in tar.getnames()
        await peer.request(wire.ARRANGE, steps=[{"unpack": str(received), "tar": packed}])
        assert (received / path).read_bytes() == b"1"
        assert os.fspath((received / "link").readlink()) == path


async def test_what_is_longer_than_allowed_is_not_packed(peer: DriverPeer, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(512))
    whole = await peer.request(wire.PACK, folder=str(tmp_path), max_bytes=2048)
    assert len(base64.b64decode(whole["tar"])) == 2048
    with pytest.raises(WireError, match="larger than 2047 bytes") as error:
        await peer.request(wire.PACK, folder=str(tmp_path), max_bytes=2047)
    assert error.value.reason == "too_long"
