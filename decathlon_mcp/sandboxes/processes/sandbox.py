"""One sandbox that is a process of this machine, with its descendants."""

from __future__ import annotations

import logging

import anyio
from anyio import CapacityLimiter
from anyio.abc import ByteStream

from decathlon_mcp.errors import SandboxLostError
from decathlon_mcp.sandboxes.base import CAUSE_SECONDS, SandboxSpec
from decathlon_mcp.sandboxes.processes.resources import ProcessResources
from decathlon_mcp.sandboxes.processes.signals import ProcessSignaller
from decathlon_mcp.sandboxes.streams import EndedStream
from decathlon_mcp.telemetry.logs import fields

_log = logging.getLogger(__name__)


class ProcessSandbox:
    """See `base.Sandbox`; without `root`, `put` and `get`, which depend on where its files are."""

    image_digest: str | None = None

    def __init__(
        self,
        spec: SandboxSpec,
        resources: ProcessResources,
        signaller: ProcessSignaller,
        *,
        paused: bool = False,
    ) -> None:
        assert resources.process is not None
        self.spec = spec
        self._process = resources.process
        self._resources = resources
        self._signaller = signaller
        self._threads = CapacityLimiter(4)
        self._closed = False
        self._paused = paused
        self._ended_stream = EndedStream() if paused else None

    @property
    def stream(self) -> ByteStream:
        return self._ended_stream or self._process.stream

    async def reopen(self) -> None:
        self._check_open()
        if self._paused:
            raise SandboxLostError("the sandbox is paused")
        await self._process.reopen()

    @property
    def log_tail(self) -> str:
        if not self._closed:
            self._process.read_log()
        return str(self._process.log_tail)

    async def pause(self) -> None:
        self._check_open()
        if self._process.ended.is_set():
            raise SandboxLostError("the sandbox's first process has ended")
        self._paused = True
        if not await self._stop_processes():
            _log.warning("Processes of a local sandbox did not stop", extra=fields(sandbox=self.spec.name))

    async def _stop_processes(self) -> bool:
        """Stop all processes; whether they have."""
        return await self._signaller.stop(self._resources.root_process)

    async def cause_of_end(self) -> str | None:
        if self._process.stream.ended.is_set():
            with anyio.move_on_after(CAUSE_SECONDS):
                await self._process.ended.wait()
        ended = self._process.ended.is_set()
        return self._resources.cause_of_end(self._process.exit_code) if ended else None

    async def is_running(self) -> bool:
        return not (self._closed or self._paused or self._process.ended.is_set())

    def mark_closed(self) -> None:
        """From now on, methods raise SandboxLostError."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")
