"""The reader of untrusted archives, and what suites and engines need of it."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from decathlon_mcp.archives.reading import (
    CHUNK_BYTES,
    MAX_EXTENDED_BYTES,
    MAX_EXTENDED_FIELDS,
    MAX_EXTENDED_HEADERS,
    ArchiveReader,
    BrokenArchiveError,
    Kind,
    Member,
    first_file,
    top_level_names,
)
from decathlon_mcp.archives.unpacking import checked_entries, unpack
from decathlon_mcp.archives.writing import StreamedArchive
from decathlon_mcp.errors import BadRequestError

ODD_NAMES = [
    "new\nline",
    "späße ☃",
    b"caf\xe9 \xff".decode("utf-8", "surrogateescape"),
    "d" * 101,
    "ü" * 120 + "/" + "y" * 250,
]


def tar_of(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.GNU_FORMAT) -> bytes:
    """An archive by the standard library, as an independent writer."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=form) as tar:
        for info, content in members:
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return packed.getvalue()


def read(archive: bytes) -> list[tuple[Member, bytes]]:
    reader = ArchiveReader.of_file(io.BytesIO(archive))
    return [(member, b"".join(reader.body())) for member in reader]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_contents_and_links_are_read(name: str, form: int) -> None:
    file, link = tarfile.TarInfo(name), tarfile.TarInfo("link")
    file.mode, file.mtime = 0o750, 1_700_000_000
    link.type, link.linkname = tarfile.SYMTYPE, name
    (member, content), (linked, _) = read(tar_of((file, b"content"), (link, b""), form=form))
    assert (member.name, member.kind, content) == (name, Kind.FILE, b"content")
    assert (member.mode, member.mtime) == (0o750, 1_700_000_000)
    assert (linked.kind, linked.link) == (Kind.SYMLINK, name)


@pytest.mark.parametrize(
    "record",
    [
        b"x path=a\n",
        b"12345678",
        b"99 path=a\n",
        b"0 path=a\n",
    ],
)
def test_malformed_record_of_an_extended_header_is_broken(record: bytes) -> None:
    header = tarfile.TarInfo("header")
    header.type = tarfile.XHDTYPE
    good = b"9 path=a\n"
    archive = tar_of((header, good), (tarfile.TarInfo("file"), b""))
    assert [member.name for member, _ in read(archive)] == ["a"]
    for body in (record, good + record, record + good):
        with pytest.raises(BrokenArchiveError, match="malformed"):
            read(tar_of((header, body), (tarfile.TarInfo("file"), b"")))


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize("keep", [100, 1500])
def test_truncated_archive_is_broken(compress: Callable[[bytes], bytes], keep: int, tmp_path: Path) -> None:
    archive = tar_of((tarfile.TarInfo("a"), b"1" * 2000))[:keep]
    with pytest.raises(BadRequestError, match="not a whole tar archive"):
        unpack(compress(archive), tmp_path / "into", below=tmp_path)


def test_damaged_header_in_the_middle_is_not_the_end() -> None:
    archive = bytearray(tar_of((tarfile.TarInfo("a"), b"1"), (tarfile.TarInfo("b"), b"2")))
    archive[1024] ^= 0xFF
    with pytest.raises(BrokenArchiveError, match="byte 1024"):
        read(bytes(archive))


@pytest.mark.parametrize("size", [b"-0000000001\0", b"0000_000017\0"])
def test_size_that_is_no_octal_number_is_none(size: bytes) -> None:
    """Python takes these for numbers, and a negative size would read the rest of the archive as a body."""
    archive = bytearray(tar_of((tarfile.TarInfo("a"), b""), (tarfile.TarInfo("b"), b"2")))
    archive[124:136] = size
    archive[148:156] = b"        "
    archive[148:156] = b"%06o\0 " % sum(archive[:512])
    (first, body), (second, _) = read(bytes(archive))
    assert (first.size, body, second.name) == (0, b"", "b")


def test_extended_header_above_the_limit_is_not_read(tmp_path: Path) -> None:
    name = "/".join(["n" * 250] * (MAX_EXTENDED_BYTES // 250 + 1))
    archive = tar_of((tarfile.TarInfo(name), b"1"), (tarfile.TarInfo("after"), b"2"))
    members = [member for member, _ in read(archive)]
    assert [member.name_unreadable for member in members] == [True, False]
    with pytest.raises(BadRequestError, match="too long"):
        unpack(archive, tmp_path / "into", below=tmp_path)


def test_number_of_extended_headers_and_their_fields_is_bounded() -> None:
    fields = {f"comment{number}": "x" for number in range(MAX_EXTENDED_FIELDS + 1)}
    info = tarfile.TarInfo("a")
    info.pax_headers = fields
    with pytest.raises(BrokenArchiveError, match="malformed"):
        read(tar_of((info, b""), form=tarfile.PAX_FORMAT))
    long_name = tar_of((tarfile.TarInfo("n" * 200), b""))[:1024]
    assert len(read(long_name * MAX_EXTENDED_HEADERS + tar_of((tarfile.TarInfo("a"), b"")))) == 1
    with pytest.raises(BrokenArchiveError, match="too many extended headers"):
        read(long_name * (MAX_EXTENDED_HEADERS + 1) + tar_of((tarfile.TarInfo("a"), b"")))


def test_sparse_file_is_refused(tmp_path: Path) -> None:
    info = tarfile.TarInfo("huge")
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(1 << 40)}
    archive = tar_of((info, b"1\n0\n1\n".ljust(512, b"\0")), form=tarfile.PAX_FORMAT)
    with pytest.raises(BadRequestError, match="no file, folder or link"):
        unpack(archive, tmp_path / "into", below=tmp_path)


def test_member_after_a_sparse_file_in_old_form_is_read() -> None:
    info = tarfile.TarInfo("huge")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(tar_of((info, b"body"))[:512])
    header[482] = 1  # a block of the map follows
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    sparse_map, body = bytes(512), b"body".ljust(512, b"\0")
    archive = bytes(header) + sparse_map + body + tar_of((tarfile.TarInfo("after"), b"1"))
    assert [(member.name, member.kind) for member, _ in read(archive)] == [
        ("huge", Kind.SPARSE_FILE),
        ("after", Kind.FILE),
    ]


def test_checked_members_are_normalized() -> None:
    folder, file, link = tarfile.TarInfo("./a"), tarfile.TarInfo("./a//./b"), tarfile.TarInfo("c")
    folder.type, file.mode, link.type, link.linkname = tarfile.DIRTYPE, 0o6755, tarfile.LNKTYPE, "./a/b"
    archive = tar_of((tarfile.TarInfo("."), b""), (folder, b""), (file, b"1"), (link, b""))
    members = [member for member, _ in checked_entries(archive)]
    assert [(member.name, member.mode) for member in members] == [("a", 0o644), ("a/b", 0o755), ("c", 0o644)]
    assert members[2].link == "a/b"


def test_streamed_archive_never_leads_above_the_folder(tmp_path: Path) -> None:
    """Its members are not checked again, but no move of the writer goes up."""
    file = Member(name="../outside/file", kind=Kind.FILE)
    for streamed in ([file], [Member(name="way", kind=Kind.SYMLINK, link=".."), file]):
        archive = StreamedArchive(lambda streamed=streamed: ((member, ()) for member in streamed), 0)
        with pytest.raises(BadRequestError, match="is no name of a folder"):
            unpack(archive, tmp_path / "into", below=tmp_path)
    assert not (tmp_path / "outside").exists()


def test_names_directly_below_the_folder(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(
        tar_of(*((tarfile.TarInfo(n), b"") for n in (".", "./a", "./b/c", "./b/d")))
    )
    assert top_level_names(tmp_path / "a.tar") == {"a", "b"}


def test_first_file_is_cut_to_the_limit_without_reading_the_rest() -> None:
    folder = tarfile.TarInfo("etc")
    folder.type = tarfile.DIRTYPE
    archive = tar_of((folder, b""), (tarfile.TarInfo("etc/passwd"), b"root" * CHUNK_BYTES))
    chunks = iter([archive[start : start + CHUNK_BYTES] for start in range(0, len(archive), CHUNK_BYTES)])
    assert first_file(chunks, 10) == b"rootrootro"
    assert list(chunks), "all of the archive was read"
    assert first_file([tar_of((folder, b""))], 10) == b""
