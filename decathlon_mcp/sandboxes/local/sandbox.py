"""One sandbox that is a process of this machine, with its descendants."""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

import anyio
from anyio import CapacityLimiter, to_thread
from anyio.abc import ByteStream

from decathlon_mcp.archives.unpacking import unpack
from decathlon_mcp.archives.writing import ArchiveSource, pack_folder
from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.sandboxes.base import CAUSE_SECONDS, SandboxSpec
from decathlon_mcp.sandboxes.local.process_signals import ProcessSignaller
from decathlon_mcp.sandboxes.local.resources import ProcessResources
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
        self._process_tree = resources.process_tree
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
        if not await self._signaller.stop(self._process_tree):
            _log.warning("Processes of a local sandbox did not stop", extra=fields(sandbox=self.spec.name))

    async def cause_of_end(self) -> str | None:
        if self._process.stream.ended.is_set():
            with anyio.move_on_after(CAUSE_SECONDS):
                await self._process.ended.wait()
        code = self._process.exit_code
        return None if code is None else f"exit code {code}"

    async def is_running(self) -> bool:
        return not (self._closed or self._paused or self._process.ended.is_set())

    def mark_closed(self) -> None:
        """From now on, methods raise SandboxLostError."""
        self._closed = True

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")


class LocalSandbox(ProcessSandbox):
    """A sandbox without isolation. `put` and `get` accept only folders at or below its root."""

    def __init__(
        self,
        spec: SandboxSpec,
        resources: ProcessResources,
        signaller: ProcessSignaller,
        *,
        paused: bool = False,
    ) -> None:
        super().__init__(spec, resources, signaller, paused=paused)
        self.root = PurePosixPath(resources.folder / "root")

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        target = self._host_path(folder)
        await to_thread.run_sync(
            lambda: unpack(archive, target, below=Path(self.root)),
            limiter=self._threads,
            abandon_on_cancel=True,
        )

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        source = self._host_path(folder)
        await to_thread.run_sync(
            lambda: pack_folder(source, archive, limit_bytes, below=Path(self.root)),
            limiter=self._threads,
            abandon_on_cancel=True,
        )

    def _host_path(self, folder: PurePosixPath) -> Path:
        self._check_open()
        if not folder.is_relative_to(self.root) or ".." in folder.parts:
            raise BadRequestError(f"{folder} is not below the sandbox's root, {self.root}")
        return Path(folder)
