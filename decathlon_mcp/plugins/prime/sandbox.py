"""One sandbox of Prime's service: its creation, its files, its first process's stream, its end."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
from anyio import CancelScope
from anyio.abc import ByteStream

from decathlon_mcp.archives import packing
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
from decathlon_mcp.plugins.inside_archives import program_inside
from decathlon_mcp.plugins.prime.prime_sdk import ENDED, Sdk
from decathlon_mcp.sandboxes.base import (
    CAUSE_SECONDS,
    OUT_OF_MEMORY,
    SandboxSpec,
    check_folder,
)
from decathlon_mcp.sandboxes.streams import EndedStream, LogTail
from decathlon_mcp.types import JsonObject, as_object

if TYPE_CHECKING:
    from prime_sandboxes import AsyncSandboxClient, CommandResponse

PROGRAM, FOLDER = "/tmp/decathlon.py", "/tmp/decathlon"
"""`inside.py`, and the folder of its files and of archives on their way. The first process has a /tmp of its
own."""
PYTHON = "python3 -I -S"
PART_BYTES = 8 << 20
"""The SDK holds each part in memory."""
TRANSFER_SECONDS = 300
"""For one part of an archive, at 28 KiB/s or more."""
COMMAND_SECONDS = 600
"""For unpacking, the longest command."""
ATTACH_SECONDS = 20.0
"""From the request to the first line of an attachment, which may wait for the previous one's input."""
RETRY_SECONDS = (0.2, 1.0, 5.0)
"""For commands, and the first attachment. The connection to the driver repeats later attachments."""
STATE_SECONDS = 5.0
"""Limit on `Sandbox.is_running`, and on removing parts that go with the sandbox anyway."""

T = TypeVar("T")


class PrimeSandbox:
    """See `base.Sandbox`. `id` is the service's.

    The first process has named pipes inside as its standard streams. A process of the service's carries them,
    the attachment. If its stream is cut, `reopen` makes another attachment, which ends it.
    """

    image_digest: str | None = None  # the service does not say

    def __init__(self, sdk: Sdk, client: AsyncSandboxClient, spec: SandboxSpec, sandbox_id: str) -> None:
        self.id = sandbox_id
        self.spec = spec
        self._sdk = sdk
        self._client = client
        self._log_tail = LogTail()
        self._closed = False
        self._paused = False
        self._attachment: AttachmentStream | None = None
        self._end: JsonObject | None = None
        """How the first process has ended, once that is known."""

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

    @property
    def stream(self) -> ByteStream:
        return self._attachment or EndedStream()

    @property
    def log_tail(self) -> str:
        return str(self._log_tail)

    async def start(self) -> None:
        """Start the first process. Raises ImageError, ProviderUnavailableError."""
        program = program_inside("decathlon_mcp.plugins.prime").encode()
        spec, limits = self.spec, self.spec.limits
        memory = limits.memory_mib
        config = {
            "command": spec.command,
            "root": str(spec.root),
            "survives": spec.survives,
            "scratch_mib": min(limits.scratch_mib, memory // 2) if memory else limits.scratch_mib,
        }
        with self._sdk.errors(opening=True):
            await self._client.upload_bytes(self.id, PROGRAM, program, "inside.py", TRANSFER_SECONDS)
        reply = await self._execute(_command("start", json.dumps(config)), opening=True)
        if reply.strip() != "ready":
            raise ImageError(
                f"the image {spec.image} cannot run the first process ({reply.strip()[:300]}); it needs "
                "Python 3.10 or later as python3, and root"
            )
        await _retried(self._attach)

    async def reattach(self) -> None:
        """Continue what another server has started. Raises SandboxLostError, ProviderUnavailableError."""
        await self._attach()

    async def reopen(self) -> None:
        self._check_open()
        if self._attachment is not None:
            async with self._attachment.sending:
                pass  # what is being sent still arrives
            await self._attachment.aclose()
        await self._attach()
        if self._paused:
            raise SandboxLostError("the sandbox is paused")

    async def _attach(self) -> None:
        """Replace the attachment; there is none for a paused sandbox.

        Raises SandboxLostError if the first process has ended, and ProviderUnavailableError.
        """
        attachment: AttachmentStream | None = None
        try:
            with anyio.fail_after(ATTACH_SECONDS):
                command = _command("attach", str(int(self.spec.survives)))
                with self._sdk.errors():
                    process = await self._client.open_process(self.id, f"exec {command}")
                ends_input = not self.spec.survives
                attachment = AttachmentStream(self._sdk, process, self._log_tail, ends_input=ends_input)
                self._learn(_decoded(await attachment.receive_line()))
            self._check_running()
            if not self._paused:
                self._attachment, attachment = attachment, None
        except (anyio.EndOfStream, ProviderUnavailableError, TimeoutError) as error:
            if await self._is_gone():
                raise SandboxLostError("the sandbox is gone") from error
            raise ProviderUnavailableError("Prime has cut a stream while it was opened") from error
        finally:
            if attachment is not None:
                await attachment.release()

    async def release(self) -> None:
        """Drop the connection to the service. From now on, methods raise SandboxLostError."""
        self._closed = True
        if self._attachment is not None:
            await self._attachment.release()

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        check_folder(folder)
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
        reply = _decoded(await self._execute(_command("unpack", prefix, str(folder))))
        if error := reply.get("error"):
            await self._discard(prefix)
            raise BadRequestError(f"cannot unpack into {folder}: {str(error)[:1000]}")

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        check_folder(folder)
        self._check_open()
        prefix = f"{FOLDER}/out-{secrets.token_hex(8)}"
        # Archives end with some kilobytes of zeros, which do not count.
        limit = str(limit_bytes + (1 << 14))
        part = archive.with_name(f"{archive.name}.part")
        try:
            limits = limit, str(packing.MAX_ENTRIES), str(packing.MAX_NAME_BYTES)
            reply = _decoded(await self._execute(_command("pack", prefix, str(folder), *limits)))
            count = _number_of_parts(reply, limit_bytes)
            with self._sdk.errors():
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
        """Remove parts, which otherwise go with the sandbox."""
        with anyio.move_on_after(STATE_SECONDS, shield=True), suppress(DecathlonError):
            await self._execute(f"rm -f {prefix}-*")

    async def pause(self) -> None:
        self._check_open()
        # SIGKILL to the first process of a PID namespace: nothing inside outlives it, and nothing can begin
        # meanwhile.
        self._learn(_decoded(await self._execute(_command("pause"))))

    async def cause_of_end(self) -> str | None:
        if self._end is None and self._attachment is not None and self._attachment.ended:
            with anyio.move_on_after(CAUSE_SECONDS):
                await self._ask()
        return self._cause

    async def is_running(self) -> bool:
        with anyio.move_on_after(STATE_SECONDS):
            return await self._ask() and self._end is None and not self._paused
        return False

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")

    def _check_running(self) -> None:
        if self._end is not None and not self._paused:
            cause = self._cause
            raise SandboxLostError(
                f"the sandbox's first process has ended ({cause or 'nothing says how'})", cause=cause
            )

    @property
    def _cause(self) -> str | None:
        end = self._end or {}
        if end.get("oom"):
            return OUT_OF_MEMORY
        return f"exit code {end['code']}" if "code" in end else None

    def _learn(self, state: JsonObject) -> None:
        """Remember what `inside.py` reported of the first process."""
        self._end, self._paused = as_object(state.get("end")), state.get("paused") is True

    async def _ask(self) -> bool:
        """Whether the state of the first process could be learned."""
        try:
            self._learn(_decoded(await self._execute(_command("status"))))
        except DecathlonError:
            return False
        return True

    async def _execute(self, command: str, *, opening: bool = False) -> str:
        """What a command prints. It may run more than once."""

        async def execute() -> CommandResponse:
            self._check_open()
            with self._sdk.errors(opening=opening):
                return await self._client.execute_command(self.id, command, timeout=COMMAND_SECONDS)

        try:
            with anyio.fail_after(COMMAND_SECONDS):
                result = await _retried(execute)
        except TimeoutError:
            raise ProviderUnavailableError(
                f"a command in the sandbox took over {COMMAND_SECONDS} s"
            ) from None
        if result.exit_code == 127:
            raise ImageError(f"the image {self.spec.image} has no python3 on its PATH")
        if result.exit_code != 0 and not result.stdout:
            raise ProviderUnavailableError(f"a command in the sandbox failed: {result.stderr[-500:]}")
        return result.stdout

    async def _is_gone(self) -> bool:
        try:
            with self._sdk.errors():
                return (await self._client.get(self.id)).status in ENDED
        except SandboxLostError:
            return True
        except DecathlonError:
            return False


async def _retried(attempt: Callable[[], Awaitable[T]]) -> T:
    """What `attempt` returns; it is made again after ProviderUnavailableError."""
    for seconds in RETRY_SECONDS:
        try:
            return await attempt()
        except ProviderUnavailableError:
            await anyio.sleep(seconds)
    return await attempt()


def _command(*arguments: str) -> str:
    return f"{PYTHON} {PROGRAM} {shlex.join(arguments)}"


def _decoded(reply: str | bytes) -> JsonObject:
    try:
        return as_object(json.loads(reply)) or {}
    except ValueError:
        raise ProviderUnavailableError(f"the sandbox did not answer: {reply[-300:]!r}") from None


def _number_of_parts(reply: JsonObject, limit_bytes: int) -> int:
    """How many parts have been packed. Raises LimitExceededError, ProviderUnavailableError."""
    if too_large := reply.get("tooLarge"):
        raise _limit_exceeded(limit_bytes, f": {str(too_large)[:200]}")
    count = reply.get("parts")
    if not isinstance(count, int) or not 0 <= count <= limit_bytes // PART_BYTES + 2:
        raise ProviderUnavailableError("the sandbox did not pack its files")
    return count


def _limit_exceeded(limit_bytes: int, why: str = "") -> LimitExceededError:
    return LimitExceededError(
        f"the files in the sandbox exceed a limit, {limit_bytes} bytes or another one{why}",
        budget="files",
        limitBytes=limit_bytes,
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


WRITE_BYTES = 1 << 18
"""Longest input of one request."""
SEND_SECONDS = 12.0
"""For one request. A driver that has not taken a message for 30 s is blamed for it: before that, a stream to
a service that does not answer breaks, and is opened again.
"""
MAX_UNREAD_BYTES = 64 << 20
"""The SDK reads without limit. A stream with more is cut: a sandbox out of control could send anything."""
CLOSE_SECONDS = 5.0


class AttachmentStream(ByteStream):
    """One attachment. It ends with the first process, or when the service cuts the stream.

    What is being sent at a cut still arrives, if the service takes it: wait for `sending` before another
    attachment is opened. `ends_input`: the input of the first process ends with this stream. stderr goes to
    `log_tail`.
    """

    def __init__(self, sdk: Sdk, process: Any, log_tail: LogTail, *, ends_input: bool) -> None:
        self.ended = False
        """Whether everything has been received that this attachment will deliver."""
        self.sending = anyio.Lock()
        self._sdk = sdk
        self._process = process
        self._ends_input = ends_input
        self._closed = False
        self._received = b""
        self._unread_bytes = 0
        # The SDK would attach again five times, and the output of the meantime would be missing without a
        # sign. Here, a stream that was cut ends. Its transport is not closed then, for what is being sent.
        process._reconnect = None
        self._transport, process._transport = process._transport, None
        process.stderr.feed = log_tail.add
        self._queue_output, process.stdout.feed = process.stdout.feed, self._feed

    def _feed(self, data: bytes) -> None:
        self._unread_bytes += len(data)
        if self._unread_bytes > MAX_UNREAD_BYTES:
            raise OverflowError(f"more than {MAX_UNREAD_BYTES} bytes have not been read")
        self._queue_output(data)

    async def receive_line(self) -> bytes:
        """The first line. Raises EndOfStream."""
        line = b""
        while b"\n" not in line:
            line += await self.receive()
        line, _, self._received = line.partition(b"\n")
        return line

    async def receive(self, max_bytes: int = 65536) -> bytes:
        while not (self._received or self.ended or self._closed):
            try:
                self._received = await anext(self._process.stdout)
                self._unread_bytes -= len(self._received)
            except Exception:  # noqa: BLE001  (the SDK fails in many ways when a stream is cut)
                self.ended = True
        if self._closed:
            raise anyio.ClosedResourceError
        if not self._received:
            raise anyio.EndOfStream
        data, self._received = self._received[:max_bytes], self._received[max_bytes:]
        return data

    async def send(self, item: bytes) -> None:
        async with self.sending:
            for start in range(0, len(item), WRITE_BYTES):
                if self._closed:
                    raise anyio.ClosedResourceError
                try:
                    with anyio.fail_after(SEND_SECONDS), self._sdk.errors():
                        await self._process.write_stdin(item[start : start + WRITE_BYTES])
                except (DecathlonError, TimeoutError) as error:
                    raise anyio.BrokenResourceError from error

    async def send_eof(self) -> None:
        if self._ends_input and not self._closed:
            with anyio.move_on_after(CLOSE_SECONDS, shield=True):
                with suppress(DecathlonError), self._sdk.errors():  # it ends with the sandbox
                    await self._process.terminate()

    async def aclose(self) -> None:
        await self.send_eof()
        await self.release()

    async def release(self) -> None:
        """Drop the connection to the service. The process inside goes on until the next attachment."""
        if not self._closed:
            self._closed = True
            self._process._pump_task.cancel()  # ends what waits in `receive`
            if self._transport is not None:
                with CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                    await self._transport.aclose()
