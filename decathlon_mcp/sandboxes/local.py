"""Opens sandboxes that are ordinary processes of this machine, for the starter suite and trusted tasks.

Nothing is isolated: what runs inside can read and write whatever this user can, and reach the network.
Requires Linux (/proc).

Decided 2026-11-27: the first process of a sandbox is `payloads.subreaper`, and not the driver. It adopts what
a dying driver leaves, so that the processes of a sandbox are known by their ancestors alone. A control group
would say the same where the server may create one, which it may not in most containers, and they are where
this provider is used. What kills both the first process and the driver, as `pkill -9 python3` does, leaves
processes that nobody knows; it could as well have killed the server.

Decided 2026-11-21: the limits of a spec are not enforced. The limits that an ordinary process can have
(RLIMIT_AS, RLIMIT_NPROC) do not mean what a container's limits mean.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path, PurePosixPath
from subprocess import DEVNULL, SubprocessError
from typing import Self

import anyio
import anyio.to_thread
from anyio import to_thread

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.unpacking import unpack
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.errors import BadRequestError, ImageError, ProviderUnavailableError
from decathlon_mcp.payloads import source
from decathlon_mcp.sandboxes.base import Finding, Isolation, LimitName, SandboxSpec, finding
from decathlon_mcp.sandboxes.processes.first_process import FirstProcess, Launch
from decathlon_mcp.sandboxes.processes.provider import ProcessProvider
from decathlon_mcp.sandboxes.processes.resources import (
    LEADER_FILE,
    ProcessResources,
    closing_descriptor,
    write_process,
)
from decathlon_mcp.sandboxes.processes.sandbox import ProcessSandbox
from decathlon_mcp.telemetry.logs import fields

LOCAL = "local"
FREE_BYTES = 1 << 30
_FIND_FOLDERS = "import json, sys; print(json.dumps([sys.version, *filter(None, sys.path)]))"

_log = logging.getLogger(__name__)


class LocalSandbox(ProcessSandbox):
    """A sandbox without isolation. `put` and `get` accept only folders at or below its root."""

    @property
    def root(self) -> PurePosixPath:
        return PurePosixPath(self._resources.folder / "root")

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


class LocalProvider(ProcessProvider[ProcessResources, LocalSandbox]):
    """Opens sandboxes as folders `<folder>/<name>/root`, each with a first process."""

    name = LOCAL
    isolation: Isolation = "none"
    unlimited: tuple[LimitName, ...] = ()  # `isolation` says it

    def __init__(self, owner: str, folder: Path, *, why: str | None = None) -> None:
        """`why`: the reason that there is no isolation, for the log."""
        super().__init__(owner, folder)
        self._why = why
        self._environment = LocalEnvironment()

    async def __aenter__(self) -> Self:
        _log.warning(
            "The local provider isolates nothing: what runs in a sandbox can do whatever this user can",
            extra=fields(folder=str(self._folder), why=self._why or "--isolation none"),
        )
        return await super().__aenter__()

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return PurePosixPath(self._folder / spec.name / "root")

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return True

    async def environment(self, image: str | None) -> str | None:
        return await self._environment.identity()

    def _resources(self, owner: str, name: str) -> ProcessResources:
        return ProcessResources(owner, name, self._folder / name, subfolders=("root", "tmp"))

    def _start(self, spec: SandboxSpec, resources: ProcessResources) -> None:
        folder = resources.folder
        environment = _environment(folder)
        if shutil.which(spec.command[0], path=environment["PATH"]) is None:
            raise ImageError(f"this machine has no {spec.command[0]} on its PATH")
        waiting, go = os.pipe()
        with closing_descriptor(go):
            with closing_descriptor(waiting):
                program = (sys.executable, "-I", "-S", "-c", source("subreaper"), str(waiting))
                launch = Launch(
                    command=(*program, *spec.command),
                    cwd=folder / "root",
                    environment=environment,
                    survives=spec.survives,
                    descriptors=(waiting,),
                )
                try:
                    resources.process = FirstProcess.start(launch, folder)
                except OSError as error:
                    raise ProviderUnavailableError(
                        f"{sys.executable} cannot be started: {error.strerror}"
                    ) from error
            if resources.process.id is not None:
                # Before the command starts: of a server that is killed meanwhile, nothing runs that the next
                # one does not find.
                write_process(folder / LEADER_FILE, resources.process.id)
            os.write(go, b"1")

    async def _opened(
        self, spec: SandboxSpec, resources: ProcessResources, *, paused: bool, taken_back: bool
    ) -> LocalSandbox:
        return LocalSandbox(spec, resources, self._signaller, paused=paused)

    async def check(self, image: str | None) -> list[Finding]:
        return await to_thread.run_sync(self._check)

    def _check(self) -> list[Finding]:
        reason = f" ({self._why})" if self._why else ""
        python = shutil.which("python3", path=str(Path(sys.executable).parent))
        return [
            Finding("isolation", True, f"none: sandboxes are processes of this user{reason}"),
            finding(
                "/proc",
                Path("/proc/thread-self/children").exists(),
                "shows which processes belong to a sandbox",
                "the local provider requires Linux with /proc mounted, and a kernel that lists the "
                "children of a process there (CONFIG_PROC_CHILDREN); --provider docker does not",
            ),
            finding(
                "python3",
                python is not None,
                f"{python or 'none'} (Python {platform.python_version()})",
                f"there is no python3 next to {sys.executable}: run the server in a virtual environment",
            ),
            *check_folder(self._folder),
        ]


def check_folder(folder: Path) -> list[Finding]:
    """Whether the folder of the sandboxes can be used."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    return [
        finding(
            "folder",
            existing.is_dir() and os.access(existing, os.W_OK) and free >= FREE_BYTES,
            f"{folder}, {free >> 20} MiB free",
            "choose a writable folder with 1 GiB free (--state)",
        )
    ]


def _environment(folder: Path) -> Mapping[str, str]:
    """The server's own variables without its settings; temporary files go to the sandbox's folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    # `python3` is the server's own Python. Not resolved: a virtual environment is recognized by the path.
    python_folder = str(Path(sys.executable).parent)
    return {
        **inherited,
        "PATH": os.pathsep.join((python_folder, inherited.get("PATH", os.defpath))),
        "TMPDIR": str(folder / "tmp"),
    }


class LocalEnvironment:
    """Finds a text that changes when another Python is installed, or packages are.

    Programs that are no Python packages, such as those of npm, can change without it.
    """

    def __init__(self) -> None:
        self._python: Path | None = None
        self._folders: list[str] = []

    async def identity(self) -> str | None:
        """The present identity; None if there is no usable `python3`. Looks at the times of some folders."""
        program = shutil.which("python3")
        if program is None:
            return None
        python = Path(program)
        if python != self._python:
            try:
                with anyio.fail_after(10):  # starting Python takes 20 ms on an idle machine
                    result = await anyio.run_process([program, "-c", _FIND_FOLDERS], stderr=DEVNULL)
                self._folders = json.loads(result.stdout)
            except (OSError, SubprocessError, TimeoutError, ValueError):
                return None
            self._python = python
        return await anyio.to_thread.run_sync(self._digest, python)

    def _digest(self, python: Path) -> str:
        # An installation changes the time of its `site-packages`.
        times = {folder: _time_ns(Path(folder)) for folder in (str(python.resolve()), *self._folders)}
        parts = [os.environ.get("PATH"), str(python), times]
        return f"local:{sha256(json.dumps(parts).encode()).hexdigest()}"


def _time_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
