"""Archives to and from a sandbox: small ones over the driver's connection, others by the provider.

A container engine needs some 40 ms of CPU time for an archive of any size, as it starts a process that enters
the container's file system. The driver is there already.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

import anyio.to_thread

from decathlon_mcp.archives.reading import BLOCK_BYTES, Kind, Member
from decathlon_mcp.archives.unpacking import checked_entries, open_archive
from decathlon_mcp.archives.writing import (
    ArchiveSource,
    Entry,
    archive_chunks,
    archive_size,
    clamped_mtime,
    save,
)
from decathlon_mcp.driver_client.driver import DriverClient, PackResult
from decathlon_mcp.errors import DriverError
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.types import JsonObject

SENT_BYTES = 1 << 20
"""Longest archive that goes over the connection: some 5 ms. Its members are decoded in one piece, and what
is sent is kept in memory until the driver acknowledges it."""

_KINDS = {
    Kind.FILE: "file",
    Kind.FOLDER: "folder",
    Kind.SYMLINK: "symlink",
    Kind.HARD_LINK: "hard_link",
}
_KINDS_BY_NAME = {name: kind for kind, name in _KINDS.items()}


async def put_archive(
    sandbox: Sandbox,
    driver: DriverClient,
    folder: PurePosixPath,
    archive: ArchiveSource,
    *,
    before: Sequence[JsonObject] = (),
    after: Sequence[JsonObject] = (),
) -> None:
    """As `Sandbox.put`, with steps of `DriverClient.arrange` before and after it, in one request if possible.

    Only while nothing of an agent can have run in the sandbox: the driver is believed. Raises what both
    raise.
    """
    step = await anyio.to_thread.run_sync(_unpack_step, folder, archive)
    if step is not None:
        try:
            await driver.arrange(*before, step, *after)
        except DriverError as error:
            about = error.data.get("about", {})
            if error.data.get("reason") != "files" or about.get("step") != len(before):
                raise
            # The provider may do what the driver's user may not, or else knows which error it is.
        else:
            return
    elif before:
        await driver.arrange(*before)
    await sandbox.put(folder, archive)
    if after:
        await driver.arrange(*after)


async def get_archive(
    sandbox: Sandbox, driver: DriverClient, folder: PurePosixPath, archive: Path, limit_bytes: int
) -> None:
    """As `Sandbox.get`, except that member names have no "./".

    Only while nothing of an agent can have run in the sandbox: what the driver sends decides what is in the
    archive. Raises what both raise.
    """
    try:
        packed = await driver.pack(str(folder), max_bytes=min(limit_bytes, SENT_BYTES))
    except DriverError as error:
        # Too large, or not for the driver: files that its user may not read, FIFOs, hard links.
        if error.data.get("reason") not in ("files", "too_long"):
            raise
        await sandbox.get(folder, archive, limit_bytes)
    else:
        await anyio.to_thread.run_sync(lambda: save(archive_chunks(_entries(packed)), archive))


def _entries(packed: PackResult) -> Iterator[Entry]:
    try:
        bodies = memoryview(base64.b64decode(packed.data, validate=True))
        for packed_member in packed.members:
            kind = _KINDS_BY_NAME[packed_member.kind]
            member = Member(
                name=_from_characters(packed_member.name),
                kind=kind,
                size=packed_member.size if kind is Kind.FILE else 0,
                mode=packed_member.mode,
                mtime=packed_member.mtime,
                link=_from_characters(packed_member.link),
            )
            # A body that is missing is filled with zeros.
            yield member, (bytes(bodies[: member.size]),)
            bodies = bodies[member.size :]
    except ValueError as error:
        raise DriverError(f"the driver sent an invalid archive: {error}", reason="invalid_reply") from None


def _unpack_step(folder: PurePosixPath, archive: ArchiveSource) -> JsonObject | None:
    """The step of `arrange` that unpacks an archive; None for one that is too large. Blocks.

    Raises BadRequestError.
    """
    if archive_size(archive) > SENT_BYTES:
        return None
    members: list[JsonObject] = []
    bodies: list[bytes] = []
    with open_archive(archive) as reader:
        remaining_bytes = SENT_BYTES
        for member, body in checked_entries(reader):
            remaining_bytes -= BLOCK_BYTES + member.size + len(member.name) + len(member.link)
            if remaining_bytes < 0:
                return None
            members.append(_encode(member))
            if member.kind is Kind.FILE:
                bodies.append(b"".join(body)[: member.size].ljust(member.size, b"\0"))
    data = base64.b64encode(b"".join(bodies)).decode()
    return {"unpack": str(folder), "members": members, "data": data}


def _encode(member: Member) -> JsonObject:
    encoded: JsonObject = {
        "name": _to_characters(member.name),
        "kind": _KINDS[member.kind],
        "mode": member.mode,
        "mtime": clamped_mtime(member.mtime),
    }
    if member.kind is Kind.FILE:
        encoded["size"] = member.size
    elif member.kind is not Kind.FOLDER:
        encoded["link"] = _to_characters(member.link)
    return encoded


def _to_characters(path: str) -> str:
    return path.encode("utf-8", "surrogateescape").decode("latin-1")


def _from_characters(path: str) -> str:
    return path.encode("latin-1").decode("utf-8", "surrogateescape")
