"""The stream of a first process, over attachments that may be cut: nothing of it is lost or doubled.

`keeper.py` is the other end and describes the messages. Each attachment is a process in the sandbox, whose
stdin and stdout the service carries; when it is cut, another one is opened, as often as needed.
"""

from __future__ import annotations

import json
import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from typing import cast

import anyio
from anyio import CancelScope
from anyio.abc import ByteStream

from decathlon_mcp.errors import DecathlonError, SandboxLostError
from decathlon_mcp.sandboxes.base import OUT_OF_MEMORY
from decathlon_mcp.sandboxes.prime.sdk import LiveProcess
from decathlon_mcp.sandboxes.streams import LogTail
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import as_object

HEADER = struct.Struct(">cQI")
UNKNOWN = (1 << 64) - 1
BUFFER_BYTES = 1 << 20
"""Sent and not acknowledged, and received and not read: each at most about this much."""
WRITE_BYTES = 1 << 18
"""Of one request to the service."""
ACKNOWLEDGE_BYTES = 1 << 16
HEARTBEAT_SECONDS = 15.0
SILENT_SECONDS = 120.0
"""Without a heartbeat for this long, a first process that does not survive gets the end of its stdin."""
RETRY_SECONDS = (0.05, 0.2, 0.5, 1.0, 2.0, 5.0)
RECONNECT_SECONDS = 120.0
"""Time without an attachment after which a sandbox counts as lost."""
CLOSE_SECONDS = 6.0
MAX_MESSAGE_BYTES = 4 << 20

_log = logging.getLogger(__name__)


class Connection:
    """One first process. `run` keeps it attached; `receive` and `send` work across attachments.

    `attach` opens an attachment. `is_gone` says whether the sandbox has ended for good.
    """

    def __init__(
        self,
        name: str,
        attach: Callable[[], Awaitable[LiveProcess]],
        is_gone: Callable[[], Awaitable[bool]],
        *,
        fresh: bool,
    ) -> None:
        self.name = name
        self.log_tail = LogTail()
        self.exit: dict[str, object] | None = None
        """How the first process ended, once all that it wrote has been received."""
        self.lost = False
        self.attachments = 0
        self._attach = attach
        self._is_gone = is_gone
        self._received = 0 if fresh else UNKNOWN
        self._acknowledged = 0
        self._unread = bytearray()
        self._incoming = bytearray()
        self._sent: deque[tuple[int, int, bytes]] = deque()
        self._sent_bytes = 0
        self._offset: int | None = 0 if fresh else None
        self._next = 0
        self._greeted = False
        self._changed = anyio.Event()
        self._scope = CancelScope()
        self.stopped = anyio.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing more will be received."""
        return self.exit is not None or self.lost

    @property
    def cause(self) -> str | None:
        if self.exit is None:
            return None
        return OUT_OF_MEMORY if self.exit.get("oom") else f"exit code {self.exit.get('code')}"

    def stop(self) -> None:
        """End `run`."""
        self._scope.cancel()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    async def receive(self, max_bytes: int, is_closed: Callable[[], bool]) -> bytes:
        """The next bytes of stdout. Raises EndOfStream, ClosedResourceError."""
        while not is_closed():
            if self._unread:
                data = bytes(self._unread[:max_bytes])
                del self._unread[: len(data)]
                self._notify()  # there may be space to acknowledge more
                await anyio.lowlevel.cancel_shielded_checkpoint()
                return data
            if self.ended:
                raise anyio.EndOfStream
            await self._changed.wait()
        raise anyio.ClosedResourceError

    async def send(self, data: bytes, is_closed: Callable[[], bool]) -> None:
        """Send to stdin. Returns when it is on its way, which survives a cut."""
        for start in range(0, len(data), WRITE_BYTES):
            while self._offset is None or self._sent_bytes >= BUFFER_BYTES:
                if is_closed():
                    raise anyio.ClosedResourceError
                if self.ended:
                    raise anyio.BrokenResourceError
                await self._changed.wait()
            if self.ended:
                raise anyio.BrokenResourceError
            self._queue(b"D", data[start : start + WRITE_BYTES])
        await anyio.lowlevel.checkpoint()

    def send_eof(self) -> None:
        if not self.ended and self._offset is not None:
            self._queue(b"E", b"")

    def _queue(self, kind: bytes, payload: bytes) -> None:
        assert self._offset is not None
        size = 1 if kind == b"E" else len(payload)
        self._sent.append((self._offset, size, HEADER.pack(kind, self._offset, len(payload)) + payload))
        self._offset += size
        self._sent_bytes += size
        self._notify()

    def discard_unread(self) -> None:
        """Drop what nobody has read, for a new stream."""
        self._unread.clear()
        self._notify()

    def notify(self) -> None:
        """Wake all that wait, since a stream was closed."""
        self._notify()

    async def run(self) -> None:
        """Stay attached until the first process ends, the sandbox is gone, or `stop`."""
        try:
            with self._scope:
                await self._run()
        finally:
            if self.exit is None:
                self.lost = True
            self.stopped.set()
            self._notify()

    async def _run(self) -> None:
        since, failures = anyio.current_time(), 0
        while not self.ended:
            try:
                if await self._serve_one():
                    since, failures = anyio.current_time(), 0
            except SandboxLostError:
                return
            except DecathlonError as error:
                _log.warning("A sandbox is detached", extra=fields(sandbox=self.name, why=error.message))
            if self.ended:
                return
            if anyio.current_time() - since > RECONNECT_SECONDS or await self._is_gone():
                return
            await anyio.sleep(RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)])
            failures += 1

    async def _serve_one(self) -> bool:
        """Use one attachment until it is cut; whether it worked at all."""
        process = await self._attach()
        self.attachments += 1
        self._incoming.clear()
        self._greeted = False
        self._next = 0
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._write, process, tasks.cancel_scope)
                await self._read(process)
                tasks.cancel_scope.cancel()
        finally:
            with CancelScope(shield=True), anyio.move_on_after(CLOSE_SECONDS):
                await _close(process)
        return self._greeted

    async def _read(self, process: LiveProcess) -> None:
        # The SDK fails with errors of many kinds when a stream is cut; all mean the same here.
        try:
            async for data in process.stdout:
                self._incoming += data
                self._handle()
                if self.exit is not None:
                    return
        except Exception as error:  # noqa: BLE001
            _log.debug("An attachment was cut", extra=fields(sandbox=self.name, why=str(error)[:300]))

    async def _write(self, process: LiveProcess, scope: CancelScope) -> None:
        try:
            await process.write_stdin(HEADER.pack(b"A", self._received, 0))
            while True:
                data = self._due()
                if data:
                    await process.write_stdin(data)
                    continue
                with anyio.move_on_after(HEARTBEAT_SECONDS) as waiting:
                    await self._changed.wait()
                if waiting.cancelled_caught and self._greeted:
                    await process.write_stdin(HEADER.pack(b"K", self._received, 0))
        except Exception as error:  # noqa: BLE001
            _log.debug("An attachment was cut", extra=fields(sandbox=self.name, why=str(error)[:300]))
            scope.cancel()

    def _due(self) -> bytes:
        """Messages to send now: an acknowledgement, and input not yet sent over this attachment."""
        if not self._greeted:
            return b""
        data = bytearray()
        has_space = len(self._unread) < BUFFER_BYTES
        if has_space and self._received - self._acknowledged >= ACKNOWLEDGE_BYTES:
            self._acknowledged = self._received
            data += HEADER.pack(b"K", self._received, 0)
        for offset, size, message in self._sent:
            if len(data) >= WRITE_BYTES:
                break
            if offset >= self._next:
                data += message
                self._next = offset + size
        return bytes(data)

    def _handle(self) -> None:
        while len(self._incoming) >= HEADER.size:
            kind, offset, length = cast("tuple[bytes, int, int]", HEADER.unpack_from(self._incoming))
            if length > MAX_MESSAGE_BYTES or kind not in (b"A", b"K", b"O", b"L", b"X"):
                raise ValueError("the keeper does not keep to its protocol")
            if len(self._incoming) < HEADER.size + length:
                return
            payload = bytes(self._incoming[HEADER.size : HEADER.size + length])
            del self._incoming[: HEADER.size + length]
            if kind == b"A":
                self._greet(offset)
            elif kind == b"K":
                self._forget_sent(offset)
            else:
                self._deliver(kind, offset, payload)
        self._notify()

    def _greet(self, offset: int) -> None:
        if self._offset is None:
            self._offset = offset
        self._forget_sent(offset)
        self._next = offset
        self._greeted = True

    def _forget_sent(self, offset: int) -> None:
        while self._sent and self._sent[0][0] + self._sent[0][1] <= offset:
            self._sent_bytes -= self._sent.popleft()[1]

    def _deliver(self, kind: bytes, offset: int, payload: bytes) -> None:
        size = 1 if kind == b"X" else len(payload)
        if self._received == UNKNOWN:
            self._received = self._acknowledged = offset
        if offset + size <= self._received:
            return  # sent again after a cut
        if offset > self._received:
            raise ValueError("the keeper left something out")
        payload = payload[self._received - offset :]
        self._received = offset + size
        if kind == b"O":
            self._unread += payload
        elif kind == b"L":
            self.log_tail.add(payload)
        else:
            self.exit = as_object(json.loads(payload)) or {}


async def _close(process: LiveProcess) -> None:
    try:
        await process.kill()
        await process.aclose()
    except Exception as error:  # noqa: BLE001  (it ends with its sandbox anyway)
        _log.debug("An attachment was not closed", extra=fields(why=str(error)[:300]))


class KeptStream(ByteStream):
    """One use of a connection. `keeps`: the first process goes on after `send_eof`."""

    def __init__(self, connection: Connection, *, keeps: bool) -> None:
        self._connection = connection
        self._keeps = keeps
        self._closed = False

    async def receive(self, max_bytes: int = 65536) -> bytes:
        return await self._connection.receive(max_bytes, lambda: self._closed)

    async def send(self, item: bytes) -> None:
        if self._closed:
            raise anyio.ClosedResourceError
        await self._connection.send(item, lambda: self._closed)

    async def send_eof(self) -> None:
        if not self._keeps:
            self._connection.send_eof()

    async def aclose(self) -> None:
        if not self._closed:
            self._closed = True
            if not self._keeps:
                self._connection.send_eof()
            self._connection.notify()
