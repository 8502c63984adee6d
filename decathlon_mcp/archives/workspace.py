"""Filters the archive of an agent's workspace before it goes into the grader's sandbox.

The archive comes from a sandbox that the agent controlled. It is rewritten header by header and never
unpacked on the host. Members that are not allowed (links that lead out, devices, names with "..") are left
out and reported. They are not an error: the attempt is graded on the rest. Repositories lose what makes
version control systems run programs or leave the workspace (`repositories.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from msgspec.structs import replace

from decathlon_mcp.archives.reading import ArchiveReader, Body, BrokenArchiveError, Kind, Member
from decathlon_mcp.archives.repositories import GITFILE, Reduce, Repositories, leads_out, marks_repository
from decathlon_mcp.archives.writing import Entry, StreamedArchive, encoded

MAX_NAME_BYTES = 2048
MAX_PART_BYTES = 255
MAX_REPORTED, MAX_REPORTED_CHARACTERS = 100, 16 << 10
"""Longest list of refusals and all of its text, so that an agent cannot fill the verdict."""
MAX_LINK_BYTES = 16 << 20
"""Symlinks whose targets are remembered for their other names; further symlinks lose other names."""
_LINK_COST = 100
"""Bytes that a remembered target takes besides itself."""
MAX_KEYS_REPORTED = 10
"""How many of the settings that were removed from one file a report names."""
_TOP = PurePosixPath("/")
_ALLOWED = (Kind.FILE, Kind.FOLDER, Kind.SYMLINK, Kind.HARD_LINK)
_REFUSED = {
    Kind.CHARACTER_DEVICE: "a device",
    Kind.BLOCK_DEVICE: "a device",
    Kind.FIFO: "a FIFO",
    Kind.SPARSE_FILE: "a sparse file",
}


@dataclass(slots=True)
class CleanWorkspace:
    """The plain tar `archive` as it goes into a grader's sandbox, its members placed below `prefix`.

    Allowed are regular files, folders, symlinks that stay inside, and hard links to what is allowed; of two
    members with one name, the first. A link to an absolute path in the workspace becomes relative.
    `limit_bytes` bounds all bodies together, `limit_members` the number of members, also of refused members.
    Owners become root, set-id bits are removed, everything becomes readable. `root`: the folder in sandboxes
    that `prefix` is relative to; by default the topmost folder. `location`: where the workspace was in the
    agent's sandbox; by default at `prefix` too.

    Nothing is written: the archive is filtered while it is read.
    """

    archive: Path
    prefix: str
    limit_bytes: int
    limit_members: int
    root: PurePosixPath = _TOP
    location: PurePosixPath | None = None
    _last: _Filter | None = None

    @property
    def refused(self) -> list[str]:
        """One line for each member that was refused or changed when the archive was read last.

        At most `MAX_REPORTED` with `MAX_REPORTED_CHARACTERS`, and a last line with the number of the others.
        """
        return [] if self._last is None else self._last.reports()

    def streamed(self) -> StreamedArchive:
        """The filtered archive. Reading it blocks."""
        return StreamedArchive(self.entries, self.archive.stat().st_size)

    def entries(self) -> Iterator[Entry]:
        """The allowed members, in order, below `prefix`, which is the first."""
        with self.archive.open("rb") as file:
            self._last = _Filter(file, self)
            yield from self._last.entries()


class _RefusedError(Exception):
    """This member is left out."""


class _TooManyError(Exception):
    """All further members are left out."""


class _Filter:
    """Yields the allowed entries of an archive, in order."""

    def __init__(self, file: BinaryIO, clean: CleanWorkspace) -> None:
        place = clean.root / clean.prefix
        # A repository is known by its other members, which may come after its configuration.
        names = _names(ArchiveReader.of_file(file), clean.limit_members)
        self._repositories = Repositories(names, place)
        self._location = clean.location or place
        self._link_targets: dict[bytes, str] = {}
        """Of symlinks, as the archive has them."""
        self._remaining_link_bytes = MAX_LINK_BYTES
        self._reader = ArchiveReader.of_file(file)
        self._prefix = clean.prefix
        self._limit_members = self._remaining_members = clean.limit_members
        self._remaining_bytes = clean.limit_bytes
        # By hashes of the names, so that memory is bounded by their number and not by their length.
        self._kinds: dict[bytes, Kind] = {}
        self._folder = ""
        """The previous member's folder, most often the next member's too."""
        self._reports: list[str] = []
        self._remaining_characters = MAX_REPORTED_CHARACTERS
        self._unreported = 0

    def entries(self) -> Iterator[Entry]:
        if self._prefix:
            yield self._entry("", Kind.FOLDER, mode=0o755)
        try:
            for member in self._reader:
                self._count_member()
                try:
                    yield from self._filtered(member)
                except _RefusedError as refusal:
                    self._report(f"{_printable(member.name.removeprefix('./'))}: {refusal}")
        except BrokenArchiveError as error:
            self._report(f"{error}: the rest was left out")
        except _TooManyError:
            self._report(f"more than {self._limit_members} members: the rest was left out")

    def reports(self) -> list[str]:
        return self._reports + ([f"and {self._unreported} more"] if self._unreported else [])

    def _report(self, line: str) -> None:
        if len(self._reports) < MAX_REPORTED and len(line) <= self._remaining_characters:
            self._remaining_characters -= len(line)
            self._reports.append(line)
        else:
            self._unreported += 1

    def _filtered(self, member: Member) -> Iterator[Entry]:
        """The member, after the parents that the archive does not name. Raises _RefusedError."""
        if member.name_unreadable:
            raise _RefusedError("its name is too long")
        if member.kind not in _ALLOWED:
            raise _RefusedError(_REFUSED.get(member.kind, "of an unknown kind"))
        name = _normalized(member.name)
        if not name:
            return
        yield from self._missing_parents(name)
        key = _key(name)
        existing = self._kinds.get(key)
        if existing is member.kind is Kind.FOLDER:
            return
        if existing is not None:
            raise _RefusedError("something of that name came before it")
        if member.kind is Kind.HARD_LINK:
            member = self._as_symlink(member)
        if member.kind is Kind.SYMLINK:
            self._remember(key, member.link)
            member = replace(member, link=_relative(member.link, self._location, name.count("/")))
        link = member.link if member.kind in (Kind.SYMLINK, Kind.HARD_LINK) else None
        treatment = self._repositories.treatment(name, link)
        if treatment.refused and member.kind is not Kind.FOLDER:
            raise _RefusedError(treatment.refused)
        match member.kind:
            case Kind.FILE if treatment.reduce is not None:
                yield self._reduced_file(name, member, treatment.reduce)
            case Kind.FILE if self._reader.head(len(GITFILE)) == GITFILE:
                yield self._reduced_file(name, member, self._repositories.reduce_gitfile)
            case Kind.FILE:
                if not treatment.executable and member.mode & 0o111:
                    if not name.endswith(".sample"):
                        self._report(f"{_printable(name)}: a hook, which is not executable any more")
                    member = replace(member, mode=member.mode & ~0o111)
                yield self._file(name, member)
            case Kind.FOLDER:
                yield self._entry(name, Kind.FOLDER, mode=member.mode | 0o755, mtime=member.mtime)
            case Kind.SYMLINK:
                target = _inner_target(member.link, depth=name.count("/"))
                yield self._entry(name, Kind.SYMLINK, mode=0o777, mtime=member.mtime, link=target)
            case _:
                yield self._hard_link(name, member)
        # Only now is it known that the member is there.
        self._kinds[key] = Kind.FILE if member.kind is Kind.HARD_LINK else member.kind

    def _file(self, name: str, member: Member, body: Body | None = None) -> Entry:
        if member.size > self._remaining_bytes:
            raise _RefusedError(f"too large ({member.size} bytes, {self._remaining_bytes} left)")
        if member.mode & 0o6000:
            self._report(f"{_printable(name)}: set-id bits were taken away")
        self._remaining_bytes -= member.size
        return self._entry(
            name,
            Kind.FILE,
            mode=member.mode | 0o644,
            mtime=member.mtime,
            size=member.size,
            body=self._reader.body() if body is None else body,
        )

    def _reduced_file(self, name: str, member: Member, reduce: Reduce) -> Entry:
        if not self._repositories.spend(member.size):
            self._report(f"{_printable(name)}: emptied, it is too large for a configuration")
            return self._file(name, replace(member, size=0), ())
        content, removed = reduce(b"".join(self._reader.body()), name)
        if removed:
            more = f" and {len(removed) - MAX_KEYS_REPORTED} more" if len(removed) > MAX_KEYS_REPORTED else ""
            keys = ", ".join(_printable(key) for key in removed[:MAX_KEYS_REPORTED])
            self._report(f"{_printable(name)}: removed {keys}{more}")
        return self._file(name, replace(member, size=len(content)), (content,))

    def _as_symlink(self, member: Member) -> Member:
        """A hard link to a symlink as a symlink: engines pack a symlink's further names as hard links."""
        target = self._link_targets.get(_key(_normalized(member.link)))
        return member if target is None else replace(member, kind=Kind.SYMLINK, link=target)

    def _remember(self, key: bytes, target: str) -> None:
        self._remaining_link_bytes -= len(target) + _LINK_COST
        if self._remaining_link_bytes >= 0:
            self._link_targets[key] = target

    def _hard_link(self, name: str, member: Member) -> Entry:
        target = _normalized(member.link)
        if self._kinds.get(_key(target)) is not Kind.FILE:
            raise _RefusedError(
                f"a hard link to {_printable(member.link)}, which is no file of the workspace"
            )
        return self._entry(name, Kind.HARD_LINK, mode=0o644, mtime=member.mtime, link=self._placed(target))

    def _missing_parents(self, name: str) -> Iterator[Entry]:
        """Folders above `name` that are not in the archive. Raises _RefusedError below a file or a link."""
        folder = parent = name.rpartition("/")[0]
        if folder == self._folder:
            return
        missing: list[str] = []
        while parent and (kind := self._kinds.get(_key(parent))) is not Kind.FOLDER:
            if kind is not None:
                raise _RefusedError(f"below {_printable(parent)}, which is no folder")
            missing.append(parent)
            parent = parent.rpartition("/")[0]
        for parent in reversed(missing):
            self._count_member()
            yield self._entry(parent, Kind.FOLDER, mode=0o755)
            self._kinds[_key(parent)] = Kind.FOLDER
        self._folder = folder

    def _count_member(self) -> None:
        if not self._remaining_members:
            raise _TooManyError
        self._remaining_members -= 1

    def _entry(
        self,
        name: str,
        kind: Kind,
        *,
        mode: int,
        mtime: int = 0,
        size: int = 0,
        link: str = "",
        body: Body = (),
    ) -> Entry:
        placed = self._placed(name)
        return Member(name=placed, kind=kind, mode=mode & 0o777, mtime=mtime, size=size, link=link), body

    def _placed(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix and name else self._prefix or name


def _names(reader: ArchiveReader, limit: int) -> Iterator[str]:
    """The normalized names that mark repositories, of the first `limit` members.

    Only up to where the archive is broken.
    """
    try:
        for member in islice(reader, limit):
            if marks_repository(member.name):
                with suppress(_RefusedError):
                    yield _normalized(member.name)
    except BrokenArchiveError:
        return


def _normalized(name: str) -> str:
    """A relative name without "..", empty parts and ".". Raises _RefusedError."""
    if name.startswith("/"):
        raise _RefusedError("an absolute path")
    # A character has at most four bytes.
    is_short = len(name) <= MAX_PART_BYTES // 4
    if not is_short and len(encoded(name)) > MAX_NAME_BYTES:
        raise _RefusedError("its name is too long")
    if "\0" in name:
        raise _RefusedError("a name with a zero byte")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise _RefusedError("a path with ..")
    if not is_short and any(len(encoded(part)) > MAX_PART_BYTES for part in parts):
        raise _RefusedError("its name is too long")
    return "/".join(parts)


def _relative(target: str, workspace: PurePosixPath, depth: int) -> str:
    """The target of a symlink, relative if it is an absolute path in the workspace. `depth`: of the link."""
    if not target.startswith("/") or len(target) > MAX_NAME_BYTES:
        return target
    parts = [part for part in target.split("/") if part not in ("", ".")]
    top = workspace.parts[1:]
    if tuple(parts[: len(top)]) != top:
        return target
    return "/".join([*[".."] * depth, *parts[len(top) :]]) or "."


def _inner_target(target: str, *, depth: int) -> str:
    """The normalized target of a symlink that cannot lead out. `depth`: number of folders above the link."""
    # The folders above the link are no links themselves (`_missing_parents`).
    if not target or len(encoded(target)) > MAX_NAME_BYTES or "\0" in target:
        raise _RefusedError("a link to nowhere")
    if target.startswith("/") or leads_out(target, depth):
        raise _RefusedError(f"a link that leads out, to {_printable(target)}")
    return "/".join(part for part in target.split("/") if part not in ("", ".")) or "."


def _key(name: str) -> bytes:
    return blake2b(encoded(name), digest_size=16).digest()


def _printable(name: str) -> str:
    """A name without line breaks, cut to 200 bytes."""
    return repr(encoded(name)[:200].decode("utf-8", "backslashreplace"))[1:-1]
