"""Checks of files that are copied into a sandbox and out of it."""

from __future__ import annotations

import gzip

from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.writing import Entry
from decathlon_mcp.errors import BadRequestError, LimitExceededError
from decathlon_mcp.plugins.conformance.archives import download, file_entry, link_entry, pack, read_archive
from decathlon_mcp.plugins.conformance.probe import Probe, raises
from decathlon_mcp.plugins.conformance.registry import registered
from decathlon_mcp.plugins.conformance.target import ProviderUnderTest


@registered()
async def files_survive_a_round_trip(target: ProviderUnderTest) -> None:
    """Names of any bytes and length, contents, modes and links come out of `get` as they went into `put`."""
    long_name = "/".join(["x" * 120] * 3)
    files = {
        "new\nline": b"1",
        "späße ☃": b"2",
        "bytes \udcff\udcfe": b"3",
        "deep/er/file": b"4" * 1000,
        long_name: b"5",
    }
    links = {"link": "deep/er/file", "dangling": "/no/such/thing", "deep/er/up": "../../empty"}
    archive = pack(
        *(file_entry(name, content, mode=0o755) for name, content in files.items()),
        (Member(name="empty", kind=Kind.FOLDER, mode=0o755), ()),
        *(link_entry(name, link) for name, link in links.items()),
    )
    async with target.provider.open(target.new_spec()) as sandbox:
        folder = sandbox.root / "new" / "with space"
        await sandbox.put(folder, archive)
        listing = await download(sandbox, folder, target.scratch / "out.tar")
    received = {name: content for name, (member, content) in listing.items() if member.kind is Kind.FILE}
    assert received == files
    assert {listing[name][0].mode & 0o777 for name in files} == {0o755}
    assert {name: member.link for name, (member, _) in listing.items() if member.link} == links
    folders = {name for name, (member, _) in listing.items() if member.kind is Kind.FOLDER}
    assert {"empty", "deep", "deep/er"} <= folders


@registered()
async def member_names_are_relative_to_the_folder(target: ProviderUnderTest) -> None:
    """Members of `get`'s archive are named "." and "./..." from the folder on."""
    archive = target.scratch / "out.tar"
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root / "a", pack(file_entry("b/c")))
        await sandbox.get(sandbox.root / "a", archive, 1 << 20)
    assert sorted(member.name.rstrip("/") for member, _ in read_archive(archive)) == [".", "./b", "./b/c"]


@registered()
async def unpacked_files_belong_to_the_first_process(target: ProviderUnderTest) -> None:
    """The first process may write to a file that the archive assigned to another user."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("folder/file", b"old", mode=0o600)))
        await Probe(sandbox).write(sandbox.root / "folder" / "file", "new")
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
    assert listing["folder/file"][1] == b"new"


@registered()
async def archive_may_be_a_compressed_file(target: ProviderUnderTest) -> None:
    """`put` takes a path as well as bytes, and gzip as well as a plain tar."""
    archive = target.scratch / "in.tar.gz"
    archive.write_bytes(gzip.compress(pack(file_entry("a", b"1"))))
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, archive)
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
    assert listing["a"][1] == b"1"


@registered()
async def unpacking_replaces_existing_files(target: ProviderUnderTest) -> None:
    """A later `put` replaces files and links of the same names."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("a", b"1"), link_entry("b", "a")))
        await sandbox.put(sandbox.root, pack(file_entry("a", b"2"), file_entry("b", b"3")))
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
    assert (listing["a"][1], listing["b"][1]) == (b"2", b"3")


@registered()
async def dangerous_members_are_refused(target: ProviderUnderTest) -> None:
    """`put` refuses members and links that lead out of the folder, and anything but files and links."""
    dangerous: tuple[tuple[Entry, str], ...] = (
        (file_entry("../outside"), "outside"),
        (file_entry("a/../../outside"), "outside"),
        (file_entry("/etc/outside"), "outside"),
        (link_entry("hard", "../../etc/passwd", Kind.HARD_LINK), "outside"),
        (link_entry("a/soft", "../../outside"), "outside"),
        ((Member(name="device", kind=Kind.CHARACTER_DEVICE), ()), "no file"),
        ((Member(name="pipe", kind=Kind.FIFO), ()), "no file"),
    )
    async with target.provider.open(target.new_spec()) as sandbox:
        for entry, message in dangerous:
            with raises(BadRequestError, message):
                await sandbox.put(sandbox.root, pack(entry))


@registered()
async def files_and_folders_never_replace_each_other(target: ProviderUnderTest) -> None:
    """`put` refuses a folder where a file is, and a file where a folder is."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file"), file_entry("folder/x")))
        for folder, name in (("file", "x"), ("file/below", "x"), ("", "file/x"), ("", "folder")):
            with raises(BadRequestError, "cannot unpack"):
                await sandbox.put(sandbox.root / folder, pack(file_entry(name)))


@registered()
async def broken_archives_are_refused(target: ProviderUnderTest) -> None:
    """`put` refuses an archive that is cut short, empty or no archive."""
    whole = pack(file_entry("a", b"1" * 100_000))
    async with target.provider.open(target.new_spec()) as sandbox:
        for broken in (b"no archive", whole[:50_000], b"", gzip.compress(whole)[:100]):
            with raises(BadRequestError, "not a whole tar archive"):
                await sandbox.put(sandbox.root, broken)


@registered()
async def missing_folder_gives_an_empty_archive(target: ProviderUnderTest) -> None:
    """`get` of a folder that does not exist, or is a file, gives an archive without members."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file")))
        assert await download(sandbox, sandbox.root / "not" / "here", target.scratch / "out.tar") == {}
        assert await download(sandbox, sandbox.root / "file", target.scratch / "out.tar") == {}


@registered()
async def download_above_the_limit_is_refused(target: ProviderUnderTest) -> None:
    """`get` raises LimitExceededError above its limit and leaves no archive; below it, it works."""
    archive = target.scratch / "limited.tar"
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file", b"1" * 3_000_000)))
        with raises(LimitExceededError):
            await sandbox.get(sandbox.root, archive, 1_000_000)
        assert not archive.exists()
        await sandbox.get(sandbox.root, archive, 4_000_000)


@registered(seconds=60)
async def ten_thousand_files_and_a_large_one_survive_a_round_trip(target: ProviderUnderTest) -> None:
    """10,000 small files and one of 64 MiB go in and come out."""
    small = [file_entry(f"many/{number // 100}/{number}", b"x" * 100) for number in range(10_000)]
    large = bytes(range(256)) * (1 << 18)
    archive = target.scratch / "in.tar"
    archive.write_bytes(pack(*small, file_entry("large", large)))
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, archive)
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
    assert listing["large"][1] == large
    files = [name for name, (member, _) in listing.items() if member.kind is Kind.FILE]
    assert sum(name.startswith("many/") for name in files) == len(small)
