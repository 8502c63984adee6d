"""A provider of sandboxes from scratch, to copy: `--provider box`.

Its sandbox is a process of this machine in a folder of its own, without isolation. It does not conform:
processes that leave their session outlive the sandbox.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import AsyncGenerator, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
from anyio import to_thread
from anyio.abc import Process
from anyio.streams.stapled import StapledByteStream

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.unpacking import unpack
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.errors import BadRequestError, SandboxLostError
from decathlon_mcp.hooks import Plugin
from decathlon_mcp.sandboxes.base import BaseProvider, Finding, Isolation, LimitName, SandboxSpec, finding
from decathlon_mcp.sandboxes.plugins import Offer, ProviderContext, ProviderPlugin
from decathlon_mcp.settings import Settings


class Box:
    """Implements `base.Sandbox`."""

    image_digest = None
    log_tail = ""

    def __init__(self, spec: SandboxSpec, root: str, process: Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.spec, self.root, self.process = spec, PurePosixPath(root), process
        self.stream = StapledByteStream(process.stdin, process.stdout)

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        target = self._path(folder)
        await to_thread.run_sync(lambda: unpack(archive, target, below=Path(self.root)))

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        source = self._path(folder)
        await to_thread.run_sync(lambda: pack_folder(source, archive, limit_bytes, below=Path(self.root)))

    def _path(self, folder: PurePosixPath) -> Path:
        if not folder.is_relative_to(self.root) or ".." in folder.parts:
            raise BadRequestError(f"{folder} is not below {self.root}")
        return Path(folder)

    async def pause(self) -> None:
        if await self.is_running():
            self.process.kill()  # an engine would freeze every process inside

    async def cause_of_end(self) -> str | None:
        code = self.process.returncode
        return None if code is None else f"exit code {code if code >= 0 else 128 - code}"

    async def is_running(self) -> bool:
        return self.process.returncode is None

    async def reopen(self) -> None:
        raise SandboxLostError("the process ends with its stream")


class BoxProvider(BaseProvider):
    """Implements `base.Provider`."""

    name = "box"
    isolation: Isolation = "none"
    unlimited: tuple[LimitName, ...] = ("memory", "cpus", "pids")

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[Box]:
        folder = tempfile.mkdtemp(prefix="box-")
        env = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}  # the bundled tasks' servers are there
        try:
            async with await anyio.open_process(spec.command, env=env, stderr=subprocess.DEVNULL) as process:
                try:
                    yield Box(spec, folder, process)
                finally:
                    if process.returncode is None:
                        process.kill()
        finally:
            with anyio.CancelScope(shield=True):  # a large folder keeps no other episode waiting
                await to_thread.run_sync(lambda: shutil.rmtree(folder, ignore_errors=True))

    def reattach(self, owner: str, spec: SandboxSpec) -> AbstractAsyncContextManager[Box]:
        raise SandboxLostError("the process ended with its server")

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        return 0  # an engine would find what a dead server left, by the label with its owner

    async def check(self, image: str | None) -> list[Finding]:
        return [finding("python3", shutil.which("python3") is not None, "on the PATH", "install python3")]

    async def environment(self, image: str | None) -> str | None:
        return None

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return True


def create(context: ProviderContext[Any]) -> BoxProvider:
    return BoxProvider(context.owner)


def image(settings: Settings, own: str | None, is_starter: bool) -> None:
    """Sandboxes have this machine's files."""


def offer(context: ProviderContext[Any], image: str | None) -> Offer:
    return Offer(varying_root=True, has_own_zone=False)


PROVIDER = ProviderPlugin(create, image=image, offer=offer, survives=False)
PLUGIN = Plugin(name="box", providers={"box": "box:PROVIDER"})
