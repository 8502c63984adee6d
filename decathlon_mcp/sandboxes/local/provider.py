"""Opens sandboxes that are ordinary processes of this machine, for the starter suite and trusted tasks.

Nothing is isolated: what runs inside can read and write whatever this user can, and reach the network.
Requires Linux (/proc).

Decided 2026-11-21: the limits of a spec are not enforced. The limits that an ordinary process can have
(RLIMIT_AS, RLIMIT_NPROC) do not mean what a container's limits mean.
"""

from __future__ import annotations

import logging
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Self

from anyio import to_thread
from decathlon_sandbox import wire

from decathlon_mcp.errors import ImageError
from decathlon_mcp.sandboxes.base import Finding, Isolation, LimitName, SandboxSpec, finding
from decathlon_mcp.sandboxes.local.environment import LocalEnvironment
from decathlon_mcp.sandboxes.local.first_process import FirstProcess, Launch
from decathlon_mcp.sandboxes.local.process_provider import ProcessProvider
from decathlon_mcp.sandboxes.local.resources import LEADER_FILE, ProcessResources, write_process
from decathlon_mcp.sandboxes.local.sandbox import LocalSandbox
from decathlon_mcp.telemetry.logs import fields

LOCAL = "local"
FREE_BYTES = 1 << 30

_log = logging.getLogger(__name__)


class LocalResources(ProcessResources):
    """What one local sandbox occupies: processes, and a folder with the suite's and one for /tmp."""

    SUBFOLDERS = ("root", "tmp")


class LocalProvider(ProcessProvider[LocalResources, LocalSandbox]):
    """Opens sandboxes as folders `<folder>/<name>/root`, each with a first process."""

    name = LOCAL
    isolation: Isolation = "none"
    unlimited: tuple[LimitName, ...] = ()  # `isolation` says it

    def __init__(self, owner: str, folder: Path, *, why: str | None = None, at_once: int = 4) -> None:
        """`why`: the reason that there is no isolation, for the log."""
        super().__init__(owner, folder, at_once=at_once)
        self._why = why
        self._environment = LocalEnvironment()

    async def __aenter__(self) -> Self:
        _log.warning(
            "The local provider isolates nothing: what runs in a sandbox can do whatever this user can",
            extra=fields(folder=str(self._folder), why=self._why or "--isolation none"),
        )
        return await super().__aenter__()

    @property
    def _reason(self) -> str:
        return f" ({self._why})" if self._why else ""

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return PurePosixPath(self._folder / spec.name / "root")

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return True

    async def environment(self, image: str | None) -> str | None:
        return await self._environment.identity()

    def _resources(self, owner: str, name: str) -> LocalResources:
        return LocalResources(owner, name, self._folder / name, label=self.label(owner))

    def _start(self, spec: SandboxSpec, resources: LocalResources) -> None:
        folder = resources.folder
        launch = Launch(
            command=spec.command,
            cwd=folder / "root",
            environment=_environment(folder, resources.marker),
            survives=spec.survives,
        )
        try:
            resources.process = FirstProcess.start(launch, folder)
        except OSError as error:
            raise ImageError(
                f"this machine has no {spec.command[0]} on its PATH: {error.strerror}"
            ) from error
        if resources.process.id is not None:
            write_process(folder / LEADER_FILE, resources.process.id)

    async def _opened(
        self, spec: SandboxSpec, resources: LocalResources, *, paused: bool, taken_back: bool
    ) -> LocalSandbox:
        return LocalSandbox(spec, resources, self._signaller, paused=paused)

    async def check(self, image: str | None) -> list[Finding]:
        return await to_thread.run_sync(self._check)

    def _check(self) -> list[Finding]:
        python = shutil.which("python3", path=str(Path(sys.executable).parent))
        return [
            finding("isolation", True, f"none: sandboxes are processes of this user{self._reason}"),
            finding(
                "/proc",
                Path("/proc/self/environ").exists(),
                "shows which processes belong to a sandbox",
                "the local provider requires Linux with /proc mounted; --provider docker does not",
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


def _environment(folder: Path, marker: str) -> Mapping[str, str]:
    """The server's own variables without its settings; temporary files go to the sandbox's folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    # `python3` is the server's own Python. Not resolved: a virtual environment is recognized by the path.
    python_folder = str(Path(sys.executable).parent)
    return {
        **inherited,
        "PATH": os.pathsep.join((python_folder, inherited.get("PATH", os.defpath))),
        "TMPDIR": str(folder / "tmp"),
        wire.SANDBOX_VARIABLE: marker,
    }
