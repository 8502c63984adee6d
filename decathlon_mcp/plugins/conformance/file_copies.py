"""Checks of files that are copied into a sandbox and out of it, also where processes have replaced the path.

What an agent does to its own folder is the agent's doing: whatever `lstat`, `readlink`, `open` or an engine
answers about it, there is no folder, and that is no failure of the provider.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping

from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.writing import Entry
from decathlon_mcp.errors import BadRequestError, LimitExceededError
from decathlon_mcp.plugins.conformance.target import (
    Probe,
    ProviderUnderTest,
    download,
    file_entry,
    link_entry,
    pack,
    raises,
    read_archive,
    receive_line,
    registered,
)

_LONGEST_PART, _LONGEST_PATH = 255, 4095
_DEEP = "/".join(["d" * 200] * 20)
LINK_TARGETS: Mapping[str, str] = {
    "nothing": "absent",
    "below-nothing": "absent/absent/absent",
    "absolute-nothing": "/absent/absent",
    "a-file": "file",
    "below-a-file": "file/absent",
    "a-file-as-a-folder": "file/",
    "an-overlong-part": "x" * (_LONGEST_PART + 1),
    "below-an-overlong-part": "x" * (_LONGEST_PART + 1) + "/absent",
    "an-absolute-overlong-part": "/" + "x" * (_LONGEST_PART + 1),
    "the-longest-part": "x" * _LONGEST_PART,
    "the-longest-path": "x/" * (_LONGEST_PATH // 2) + "x",
    "the-longest-path-of-overlong-parts": ("x" * 1000 + "/") * 4,
    "bytes-that-are-no-text": "\udcff\udcfe\x01\x1b[2J",
    "a-line-break": "absent\nabsent\r",
    "backslashes-and-escapes": "\\\\absent\\..\\%s%n%2e%2e%00$(id)*?[",
    "an-engines-message": "no such container: no space left on device",
    "a-device": "/dev/null/absent",
    "an-endless-device": "/dev/zero",
    "the-program-of-a-process": "/proc/self/exe",
    "a-descriptor": "/proc/self/fd/0",
    "a-descriptor-of-a-pipe": "/proc/1/fd/1",
    "a-missing-descriptor": "/proc/self/fd/999999",
    "a-missing-process": "/proc/999999999/cwd",
    "the-memory-of-a-process": "/proc/self/mem",
}
"""Targets of symbolic links that lead to no folder; `file` is a file next to the link."""
STATES: Mapping[str, str] = {
    "nothing": "",
    "file": "open(name, 'w').close()",
    "file-without-permissions": "os.close(os.open(name, os.O_CREAT, 0))",
    "sparse-terabyte": "with open(name, 'w') as sparse: sparse.truncate(1 << 40)",
    "fifo": "os.mkfifo(name)",
    "socket": "socket.socket(socket.AF_UNIX).bind(name)",
    "device": "make_node(name, stat.S_IFCHR)",
    "block-device": "make_node(name, stat.S_IFBLK)",
    "white-out": "os.mknod(name, stat.S_IFCHR | 0o600, 0)",
    "link-to-itself": "os.symlink(name, name)",
    "link-below-itself": "os.symlink(name + '/absent', name)",
    "links-in-a-circle": "os.symlink(name + '2', name); os.symlink(name, name + '2')",
    "links-through-links": "chain(name, 300, 'absent')",
    "more-links-than-the-kernel-follows": "chain(name, 300, 'file')",
    "link-to-a-fifo": "os.mkfifo(name + '2'); os.symlink(name + '2', name)",
    "link-to-a-socket": "socket.socket(socket.AF_UNIX).bind(name + '2'); os.symlink(name + '2', name)",
    "link-through-a-closed-folder": "os.mkdir(name + '2', 0); os.symlink(name + '2/absent', name)",
    "links-to-a-path-longer-than-the-longest": f"deep(name, {_DEEP!r})",
}
"""Python statements that make `name`, in the current folder, something else than a folder or a link of
`LINK_TARGETS`."""
MAKE_STATES = """
import contextlib, os, socket, stat

def make_node(name, kind):
    with contextlib.suppress(PermissionError):  # then nothing is there
        os.mknod(name, kind | 0o600, os.makedev(1, 3))

def chain(name, count, end):
    os.symlink(name + "0", name)
    for number in range(count):
        os.symlink(f"{name}{number + 1}" if number + 1 < count else end, f"{name}{number}")

def deep(name, path):
    here = os.getcwd()
    os.symlink(f"{path}/link", name)
    for target in (f"{path}/absent", None):
        os.makedirs(path)
        os.chdir(path)
        if target:
            os.symlink(target, "link")
    os.chdir(here)

def make(name, state):
    os.path.lexists("file") or open("file", "w").close()
    with contextlib.suppress(PermissionError):
        exec(state)
"""
"""Functions for `STATES`; `make(name, state)` brings `name`, in the current folder, into a state."""
_MAKE_ALL = """
import json, sys
root, states = os.getcwd(), json.loads(sys.stdin.readline())
for state, code in states.items():
    for part in ("folder", "parent"):
        os.makedirs(f"{state}/{part}")
        os.chdir(f"{state}/{part}")
        make(part, code)
        os.chdir(root)
print("made", flush=True)
sys.stdin.read()
"""
"""First process that makes `STATE/folder/folder` and `STATE/parent/parent` for every state."""
_REPLACE_ROOT = """
import os, sys
root = os.getcwd()
try:
    os.chdir("/")
    os.rename(root, root + "2")
except OSError:  # it is a mount, or nothing beside it may be changed
    print("refused", flush=True)
else:
    os.symlink(os.path.basename(root), root)
    print("replaced", flush=True)
    sys.stdin.readline()
    os.unlink(root)
    os.rename(root + "2", root)
    print("restored", flush=True)
sys.stdin.read()
"""
"""First process that replaces the suite's folder by a link to itself until it reads a line."""
_WORK = {"report": b"work", "below/report": b"more work"}


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
    """Members of `get`'s archive are named from the folder on."""
    archive = target.scratch / "out.tar"
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root / "a", pack(file_entry("b/c")))
        await sandbox.get(sandbox.root / "a", archive, 1 << 20)
    names = {member.name.removeprefix("./").rstrip("/") for member, _ in read_archive(archive)}
    assert names - {"", "."} == {"b", "b/c"}


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


@registered("commands", seconds=120)
async def replaced_folder_gives_an_empty_archive(target: ProviderUnderTest) -> None:
    """`get` of a path that is no folder, or has none above it, gives an archive without members."""
    archive = target.scratch / "out.tar"
    async with target.provider.open(target.python_spec(MAKE_STATES + _MAKE_ALL)) as sandbox:
        work = sandbox.root / "work"
        await sandbox.put(work, pack(*(file_entry(name, content) for name, content in _WORK.items())))
        await sandbox.stream.send(json.dumps(STATES).encode() + b"\n")
        assert await receive_line(sandbox) == "made"
        await sandbox.pause()
        for state in STATES:
            for path in ("folder/folder", "parent/parent/folder"):
                listing = await download(sandbox, sandbox.root / state / path, archive)
                assert not listing, f"{state}/{path} has {sorted(listing)}"
        listing = await download(sandbox, work, archive)
        assert {name: listing[name][1] for name in _WORK} == _WORK


@registered("commands")
async def replaced_root_gives_an_empty_archive(target: ProviderUnderTest) -> None:
    """`get` and `put` treat a root that became a link to itself as any folder that is none."""
    archive = target.scratch / "out.tar"
    async with target.provider.open(target.python_spec(_REPLACE_ROOT)) as sandbox:
        if await receive_line(sandbox) == "refused":
            return
        with raises(BadRequestError, "cannot unpack"):
            await sandbox.put(sandbox.root, pack(file_entry("report")))
        assert not await download(sandbox, sandbox.root, archive)
        assert not await download(sandbox, sandbox.root / "folder", archive)
        await sandbox.stream.send(b"restore\n")
        assert await receive_line(sandbox) == "restored"
        await sandbox.put(sandbox.root, pack(file_entry("report")))
        assert "report" in await download(sandbox, sandbox.root, archive)


@registered(seconds=60)
async def link_that_leads_to_no_folder_is_none(target: ProviderUnderTest) -> None:
    """`get` of such a link, or of a path below it, gives an archive without members; `put` refuses it."""
    archive = target.scratch / "out.tar"
    links = [link_entry(name, link) for name, link in LINK_TARGETS.items()]
    work = [file_entry(f"work/{name}", content) for name, content in _WORK.items()]
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file"), *links, *work))
        for name in LINK_TARGETS:
            for path in (sandbox.root / name, sandbox.root / name / "folder"):
                listing = await download(sandbox, path, archive)
                assert not listing, f"{path} has {sorted(listing)}"
            with raises(BadRequestError, "cannot unpack"):
                await sandbox.put(sandbox.root / name, pack(file_entry("report")))
        listing = await download(sandbox, sandbox.root / "work", archive)
        assert {name: listing[name][1] for name in _WORK} == _WORK
