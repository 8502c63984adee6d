"""One sandbox of Prime's service: its creation, its files, its end."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path, PurePosixPath

import anyio
import anyio.to_thread
from anyio.abc import ByteStream

from decathlon_mcp.archives.unpacking import with_owner
from decathlon_mcp.archives.writing import ArchiveSource, save
from decathlon_mcp.errors import (
    BadRequestError,
    DecathlonError,
    ImageError,
    LimitExceededError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.prime.connection import SILENT_SECONDS, Connection, KeptStream
from decathlon_mcp.sandboxes.prime.sdk import ENDED, Client, LiveProcess, Sdk
from decathlon_mcp.sandboxes.streams import EndedStream
from decathlon_mcp.types import JsonObject, as_object

FOLDER = "/tmp/decathlon"
"""Of the keeper and of archives on their way. The first process has a /tmp of its own."""
PYTHON = "python3 -I -S"
PART_BYTES = 8 << 20
"""The SDK holds each part in memory."""
TRANSFER_SECONDS = 300
UNPACK_SECONDS = 600
STATE_SECONDS = 5.0
_SCRATCH = PurePosixPath("/tmp")


class PrimeSandbox:
    """See `base.Sandbox`. `id` is the service's."""

    def __init__(self, sdk: Sdk, client: Client, spec: SandboxSpec, sandbox_id: str) -> None:
        self.id = sandbox_id
        self._sdk = sdk
        self._client = client
        self._spec = spec
        self._closed = False
        self._paused = False
        self._stream: ByteStream = EndedStream()
        self.connection = Connection(spec.name, self._attach, self._is_gone, fresh=True)

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def root(self) -> PurePosixPath:
        return self._spec.root

    @property
    def stream(self) -> ByteStream:
        return self._stream

    @property
    def log_tail(self) -> str:
        return str(self.connection.log_tail)

    @property
    def image_digest(self) -> str | None:
        return None  # the service does not say

    async def start(self) -> None:
        """Start the first process. Raises ImageError, ProviderUnavailableError."""
        keeper = files("decathlon_mcp.sandboxes.prime").joinpath("keeper.py").read_bytes()
        spec, limits = self._spec, self._spec.limits
        memory = limits.memory_mib
        config = {
            "command": spec.command,
            "root": str(spec.root),
            "survives": spec.survives,
            "silent_seconds": SILENT_SECONDS,
            "scratch_mib": min(limits.scratch_mib, memory // 2) if memory else limits.scratch_mib,
        }
        with self._sdk.errors(opening=True):
            await self._execute(f"mkdir -m 700 {FOLDER}")
            path = f"{FOLDER}/keeper.py"
            await self._client.upload_bytes(self.id, path, keeper, "keeper.py", TRANSFER_SECONDS)
            reply = await self._keeper("serve", FOLDER, json.dumps(config))
        if reply.strip() != "ready":
            raise ImageError(
                f"the image {spec.image} cannot run the first process ({reply.strip()[:300]}); it needs "
                "Python 3.10 or later as python3, and root"
            )
        self._stream = KeptStream(self.connection, keeps=spec.survives)

    async def take_back(self) -> None:
        """Continue what another server has started. Raises SandboxLostError."""
        state = await self._status()
        if state.get("killed"):
            self._paused = True
            return
        if state.get("exit") is not None:
            code = (as_object(state["exit"]) or {}).get("code")
            raise SandboxLostError("the sandbox's first process has ended", cause=f"exit code {code}")
        self.connection = Connection(self._spec.name, self._attach, self._is_gone, fresh=False)
        self._stream = KeptStream(self.connection, keeps=True)

    @property
    def has_stream(self) -> bool:
        return not self._paused

    async def reopen(self) -> None:
        await self._stream.aclose()
        self._check_open()
        if self._paused:
            raise SandboxLostError("the sandbox is paused")
        if self.connection.ended:
            cause = self.connection.cause
            raise SandboxLostError(f"the sandbox's first process has ended ({cause})", cause=cause)
        self.connection.discard_unread()
        self._stream = KeptStream(self.connection, keeps=self._spec.survives)

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        _check_folder(folder)
        self._check_open()
        prefix = f"{FOLDER}/in-{secrets.token_hex(8)}"
        parts = _parts(with_owner(archive, 0, 0))
        number = 0
        with self._sdk.errors():
            while part := await anyio.to_thread.run_sync(lambda: next(parts, b"")):
                self._check_open()
                path = f"{prefix}-{number:06}"
                await self._client.upload_bytes(self.id, path, part, "part", TRANSFER_SECONDS)
                number += 1
            reply = await self._keeper("unpack", prefix, str(folder), then=f"rm -f {prefix}-*")
        if error := _decoded(reply).get("error"):
            raise BadRequestError(f"cannot unpack into {folder}: {str(error)[:1000]}")

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        _check_folder(folder)
        self._check_open()
        prefix = f"{FOLDER}/out-{secrets.token_hex(8)}"
        # Archives end with some kilobytes of zeros, which do not count.
        limit = str(limit_bytes + (1 << 14))
        part = archive.with_name(f"{archive.name}.part")
        try:
            with self._sdk.errors():
                reply = _decoded(await self._keeper("pack", prefix, str(folder), limit))
                count = _number_of_parts(reply, limit_bytes)
                await anyio.to_thread.run_sync(lambda: save((), archive))
                for number in range(count):
                    self._check_open()
                    path = f"{prefix}-{number:06}"
                    await self._client.download_file(self.id, path, str(part), TRANSFER_SECONDS)
                    await anyio.to_thread.run_sync(_append, part, archive, limit_bytes + (1 << 14))
        except BaseException:
            archive.unlink(missing_ok=True)  # noqa: ASYNC240  (without waiting: this may be cancelled)
            raise
        finally:
            part.unlink(missing_ok=True)
            await self._discard(prefix)

    async def _discard(self, prefix: str) -> None:
        with anyio.move_on_after(STATE_SECONDS, shield=True):
            try:
                with self._sdk.errors():
                    await self._execute(f"rm -f {prefix}-*")
            except DecathlonError:
                pass  # they go with the sandbox

    async def pause(self) -> None:
        self._check_open()
        with self._sdk.errors():
            # SIGKILL to the first process of a PID namespace: nothing inside outlives it, and nothing can
            # begin meanwhile.
            await self._keeper("call", FOLDER, json.dumps({"do": "kill"}))
        self._paused = True

    async def cause_of_end(self) -> str | None:
        return self.connection.cause

    async def is_running(self) -> bool:
        if self._closed or self._paused or self.connection.ended:
            return False
        with anyio.move_on_after(STATE_SECONDS):
            try:
                return (await self._status()).get("exit", "unknown") is None
            except DecathlonError:
                return False
        return False

    def mark_closed(self) -> None:
        """From now on, methods raise SandboxLostError."""
        self._closed = True
        self.connection.stop()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")

    async def _status(self) -> JsonObject:
        with self._sdk.errors():
            return _decoded(await self._keeper("call", FOLDER, json.dumps({"do": "status"})))

    async def _keeper(self, *arguments: str, then: str = "") -> str:
        command = f"{PYTHON} {FOLDER}/keeper.py {shlex.join(arguments)}"
        return await self._execute(f"{command}; {then}" if then else command)

    async def _execute(self, command: str) -> str:
        self._check_open()
        result = await self._client.execute_command(self.id, command, timeout=UNPACK_SECONDS)
        if result.exit_code == 127:
            raise ImageError(f"the image {self._spec.image} has no python3 on its PATH")
        if result.exit_code != 0 and not result.stdout:
            raise ProviderUnavailableError(f"a command in the sandbox failed: {result.stderr[-500:]}")
        return result.stdout

    async def _attach(self) -> LiveProcess:
        with self._sdk.errors():
            command = f"exec {PYTHON} {FOLDER}/keeper.py attach {FOLDER}"
            return await self._sdk.open_process(self._client, self.id, command)

    async def _is_gone(self) -> bool:
        try:
            with self._sdk.errors():
                return (await self._client.get(self.id)).status in ENDED
        except SandboxLostError:
            return True
        except DecathlonError:
            return False


def _decoded(reply: str) -> JsonObject:
    try:
        return as_object(json.loads(reply)) or {}
    except ValueError:
        raise ProviderUnavailableError(f"the sandbox did not answer: {reply[-300:]}") from None


def _number_of_parts(reply: JsonObject, limit_bytes: int) -> int:
    """How many parts the keeper has packed. Raises LimitExceededError, ProviderUnavailableError."""
    if reply.get("tooLarge"):
        raise _limit_exceeded(limit_bytes)
    count = reply.get("parts")
    if not isinstance(count, int) or not 0 <= count <= limit_bytes // PART_BYTES + 2:
        raise ProviderUnavailableError("the sandbox did not pack its files")
    return count


def _limit_exceeded(limit_bytes: int) -> LimitExceededError:
    return LimitExceededError(
        f"the files in the sandbox exceed the limit of {limit_bytes} bytes", limitBytes=limit_bytes
    )


def _parts(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """The chunks, joined to parts of `PART_BYTES`."""
    part = bytearray()
    for chunk in chunks:
        part += chunk
        while len(part) >= PART_BYTES:
            yield bytes(part[:PART_BYTES])
            del part[:PART_BYTES]
    if part:
        yield bytes(part)


def _append(part: Path, archive: Path, limit_bytes: int) -> None:
    with archive.open("ab") as out:
        if out.tell() + part.stat().st_size > limit_bytes:
            raise _limit_exceeded(limit_bytes)
        out.write(part.read_bytes())


def _check_folder(folder: PurePosixPath) -> None:
    if not folder.is_absolute() or ".." in folder.parts or folder.is_relative_to(_SCRATCH):
        raise BadRequestError(f"files are copied to and from absolute paths outside /tmp, not {folder}")
