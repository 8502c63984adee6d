"""Checks of files that are copied from a path that processes inside have replaced.

What an agent does to its own folder is the agent's doing: whatever `lstat`, `readlink`, `open` or an engine
answers about it, there is no folder, and that is no failure of the provider.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.conformance.archives import download, file_entry, link_entry, pack
from decathlon_mcp.plugins.conformance.probe import raises, receive_line
from decathlon_mcp.plugins.conformance.registry import registered
from decathlon_mcp.plugins.conformance.target import ProviderUnderTest

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


@registered(seconds=120, commands=True)
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


@registered(commands=True)
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
async def link_that_leads_to_no_folder_gives_an_empty_archive(target: ProviderUnderTest) -> None:
    """`get` of a link that leads to no folder, or of a path below it, gives an archive without members."""
    archive = target.scratch / "out.tar"
    links = [link_entry(name, link) for name, link in LINK_TARGETS.items()]
    work = [file_entry(f"work/{name}", content) for name, content in _WORK.items()]
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file"), *links, *work))
        for name in LINK_TARGETS:
            for path in (sandbox.root / name, sandbox.root / name / "folder"):
                listing = await download(sandbox, path, archive)
                assert not listing, f"{path} has {sorted(listing)}"
        listing = await download(sandbox, sandbox.root / "work", archive)
        assert {name: listing[name][1] for name in _WORK} == _WORK


@registered(seconds=60)
async def link_that_leads_to_no_folder_is_not_unpacked_into(target: ProviderUnderTest) -> None:
    """`put` raises BadRequestError for a link that leads to no folder."""
    links = [link_entry(name, link) for name, link in LINK_TARGETS.items()]
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file"), *links))
        for name in LINK_TARGETS:
            with raises(BadRequestError, "cannot unpack"):
                await sandbox.put(sandbox.root / name, pack(file_entry("report")))
