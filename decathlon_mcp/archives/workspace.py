"""What crosses from the agent's sandbox to the grader's: the workspace, as data, and what lies inside it.

The archive was written by whoever is inside the sandbox. It is rewritten header by header and never unpacked
on the host. What does not belong (links that lead out, devices, names that climb) is left out and reported,
not an error: an attempt is graded on its honest part.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from decathlon_mcp.archives import tar

MAX_NAME_BYTES = 2048
MAX_PART_BYTES = 255
MAX_REPORTED = 100
MAX_TIME = (1 << 33) - 1
_COPY_BYTES = 1 << 20
_KEPT = (tar.FILE, tar.FOLDER, tar.SYMLINK, tar.HARD_LINK)
_NOT_FILES = {
    tar.CHARACTER: "a device",
    tar.BLOCK_DEVICE: "a device",
    tar.FIFO: "a FIFO",
    tar.SPARSE: "a sparse file",
}


def clean_workspace(
    archive: Path, into: Path, *, prefix: str, limit_bytes: int, limit_members: int
) -> list[str]:
    """Rewrite the plain tar `archive`, of a stranger, to the tar `into`, whose members stand below `prefix`.

    Kept are regular files, folders, symlinks that stay inside and hard links to files that were kept; of what
    is there twice, the first. `limit_bytes` is for all bodies together, `limit_members` for all members,
    the refused ones too. Owners become root, set-id bits go, what is kept is readable.

    Returns one line for each thing that was refused or changed, at most `MAX_REPORTED` and a last one that
    counts the others.
    """
    with archive.open("rb", _COPY_BYTES) as source, into.open("wb", _COPY_BYTES) as sink:
        cleaner = _Cleaner(source, sink, prefix.strip("/").encode(), limit_bytes, limit_members)
        try:
            for member in tar.read_members(source):
                cleaner.take(member)
        except tar.BrokenTarError as error:
            cleaner.report(f"{error}: the rest was left out")
        except _FullError:
            cleaner.report(f"more than {limit_members} members: the rest was left out")
        sink.write(tar.END)
    return cleaner.reports()


class _RefusedError(Exception):
    """This member does not cross."""


class _FullError(Exception):
    """No further member crosses."""


class _Cleaner:
    """Knows what was kept: hashes of the names, so that memory is bounded by their number, and the kinds."""

    def __init__(
        self, source: BinaryIO, sink: BinaryIO, prefix: bytes, limit_bytes: int, limit_members: int
    ) -> None:
        self._source, self._sink = source, sink
        self._prefix = prefix
        self._bytes_left, self._members_left = limit_bytes, limit_members
        self._kinds: dict[bytes, bytes] = {}
        self._reports: list[str] = []
        self._unreported = 0
        if prefix:
            self._write(b"", tar.FOLDER, mode=0o755)

    def take(self, member: tar.Member) -> None:
        """Keep one member, or report why not."""
        self._count()
        try:
            self._take(member)
        except _RefusedError as refusal:
            self.report(f"{_shown(member.name.removeprefix(b'./'))}: {refusal}")

    def report(self, line: str) -> None:
        if len(self._reports) < MAX_REPORTED:
            self._reports.append(line)
        else:
            self._unreported += 1

    def reports(self) -> list[str]:
        return self._reports + ([f"and {self._unreported} more"] if self._unreported else [])

    def _take(self, member: tar.Member) -> None:
        if member.overlong:
            raise _RefusedError("its name is too long")
        if member.kind not in _KEPT:
            raise _RefusedError(_NOT_FILES.get(member.kind, "of an unknown kind"))
        name = b"/".join(_parts(member.name))
        if not name:
            return
        self._make_parents(name)
        known = self._kinds.get(_key(name))
        if known == member.kind == tar.FOLDER:
            return
        if known is not None:
            raise _RefusedError("something of that name came before it")
        match member.kind:
            case tar.FILE:
                self._keep_file(name, member)
            case tar.FOLDER:
                self._write(name, tar.FOLDER, mode=member.mode | 0o755, mtime=member.mtime)
            case tar.SYMLINK:
                target = _inner_target(member.link, depth=name.count(b"/"))
                self._write(name, tar.SYMLINK, mode=0o777, mtime=member.mtime, link=target)
            case _:
                self._keep_hard_link(name, member)

    def _keep_file(self, name: bytes, member: tar.Member) -> None:
        if member.size > self._bytes_left:
            raise _RefusedError(f"too large ({member.size} bytes, {self._bytes_left} left)")
        if member.mode & 0o6000:
            self.report(f"{_shown(name)}: set-id bits were taken away")
        self._bytes_left -= member.size
        self._write(name, tar.FILE, mode=member.mode | 0o644, mtime=member.mtime, size=member.size)
        self._source.seek(member.offset)
        for start in range(0, member.size, _COPY_BYTES):
            part = min(_COPY_BYTES, member.size - start)
            self._sink.write(self._source.read(part).ljust(part, b"\0"))
        self._sink.write(tar.padding(member.size))

    def _keep_hard_link(self, name: bytes, member: tar.Member) -> None:
        target = b"/".join(_parts(member.link))
        if self._kinds.get(_key(target)) != tar.FILE:
            raise _RefusedError(f"a hard link to {_shown(member.link)}, which is no file of the workspace")
        self._write(name, tar.HARD_LINK, mode=0o644, mtime=member.mtime, link=self._placed(target))
        self._kinds[_key(name)] = tar.FILE

    def _make_parents(self, name: bytes) -> None:
        """Every folder above `name` is one that was kept; those that the archive does not name are made."""
        missing: list[bytes] = []
        parent = name.rpartition(b"/")[0]
        while parent and (kind := self._kinds.get(_key(parent))) != tar.FOLDER:
            if kind is not None:
                raise _RefusedError(f"below {_shown(parent)}, which is no folder")
            missing.append(parent)
            parent = parent.rpartition(b"/")[0]
        for folder in reversed(missing):
            self._count()
            self._write(folder, tar.FOLDER, mode=0o755)

    def _count(self) -> None:
        if not self._members_left:
            raise _FullError
        self._members_left -= 1

    def _write(
        self, name: bytes, kind: bytes, *, mode: int, mtime: int = 0, size: int = 0, link: bytes = b""
    ) -> None:
        self._kinds[_key(name)] = kind
        self._sink.write(
            tar.header(
                self._placed(name),
                kind,
                size=size,
                mode=mode & 0o777,
                mtime=min(mtime, MAX_TIME),
                link=link,
            )
        )

    def _placed(self, name: bytes) -> bytes:
        return b"/".join(part for part in (self._prefix, name) if part)


def _parts(name: bytes) -> list[bytes]:
    """The parts of a relative name that does not climb."""
    if name.startswith(b"/"):
        raise _RefusedError("an absolute path")
    if len(name) > MAX_NAME_BYTES:
        raise _RefusedError("its name is too long")
    if b"\0" in name:
        raise _RefusedError("a name with a zero byte")
    parts = [part for part in name.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise _RefusedError("a path with ..")
    if any(len(part) > MAX_PART_BYTES for part in parts):
        raise _RefusedError("its name is too long")
    return parts


def _inner_target(target: bytes, *, depth: int) -> bytes:
    """A symlink's target that cannot lead out: some `..`, no more than there are folders above, then names.

    A `..` after a name could climb out of a folder that another link led to, so there is none. What stands
    above the link are folders (`_make_parents`), so the leading ones mean what they say.
    """
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    climbs = 0
    while climbs < len(parts) and parts[climbs] == b"..":
        climbs += 1
    if target.startswith(b"/") or climbs > depth or b".." in parts[climbs:]:
        raise _RefusedError(f"a link that leads out, to {_shown(target)}")
    if not target or len(target) > MAX_NAME_BYTES or b"\0" in target:
        raise _RefusedError("a link to nowhere")
    return b"/".join(parts) or b"."


def _key(name: bytes) -> bytes:
    return blake2b(name, digest_size=16).digest()


def _shown(name: bytes) -> str:
    """A name fit for one line of a report."""
    return repr(name[:200].decode("utf-8", "backslashreplace"))[1:-1]
