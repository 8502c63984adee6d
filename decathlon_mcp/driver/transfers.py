"""Archives to and from a sandbox: small over the driver's connection, large by the provider.

A container engine needs some 40 ms of CPU time for an archive of any size, as it starts a process that enters
the container's file system. The driver is there already, but takes twice as long for a large archive
(2026-11-27, Docker: 1 GiB of raw bytes on the driver's stream 6.0 s, by the engine 3.0 s; 100,000 small files
55 s and 17 s), so both ways stay.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path, PurePosixPath

import anyio.to_thread
import msgspec
from decathlon_sandbox import wire

from decathlon_mcp.archives.reading import ArchiveReader, BrokenArchiveError
from decathlon_mcp.archives.unpacking import checked_entries
from decathlon_mcp.archives.writing import ArchiveSource, archive_chunks, archive_size, save
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.errors import DriverError
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.types import JsonObject

SENT_BYTES = 1 << 20
"""Longest archive that goes over the connection: some 5 ms. What is sent is kept in memory until the driver
acknowledges it."""


class _Packed(msgspec.Struct):
    tar: bytes


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
    """As `Sandbox.get`, only while nothing of an agent can have run in the sandbox.

    What the driver sends decides what is in the archive. Raises what both raise.
    """
    try:
        params = {"folder": str(folder), "max_bytes": min(limit_bytes, SENT_BYTES)}
        packed = await driver.request(wire.PACK, params, kind=_Packed)
    except DriverError as error:
        # Too large, or not for the driver: files that its user may not read, FIFOs, hard links.
        if error.data.get("reason") not in ("files", "too_long"):
            raise
        await sandbox.get(folder, archive, limit_bytes)
    else:
        await anyio.to_thread.run_sync(_save, packed.tar, archive)


def _save(packed: bytes, archive: Path) -> None:
    try:
        for _ in ArchiveReader.of_file(BytesIO(packed)):
            pass
    except BrokenArchiveError as error:
        raise DriverError(f"the driver sent an invalid archive: {error}", reason="invalid_reply") from None
    save((packed,), archive)


def _unpack_step(folder: PurePosixPath, archive: ArchiveSource) -> JsonObject | None:
    """The step of `arrange` that unpacks an archive; None for a large archive. Blocks.

    Raises BadRequestError.
    """
    if archive_size(archive) > SENT_BYTES:
        return None
    plain = bytearray()
    for chunk in archive_chunks(checked_entries(archive)):
        plain += chunk
        if len(plain) > SENT_BYTES:
            return None
    return {"unpack": str(folder), "tar": base64.b64encode(plain).decode()}
