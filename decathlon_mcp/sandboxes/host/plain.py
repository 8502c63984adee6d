"""A sandbox without isolation: an ordinary process of this machine, for the starter suite and trusted tasks.

What runs inside can read and write whatever this user can, and reach the network. Requires Linux (/proc).

Decided 2026-11-27: the first process of a sandbox is `payloads.subreaper`, and not the driver. It adopts what
a dying driver leaves, so that the processes of a sandbox are known by their ancestors alone. A control group
would say the same where the server may create one, which it may not in most containers, and they are where
there is no isolation. What kills both the first process and the driver, as `pkill -9 python3` does, leaves
processes that nobody knows; it could as well have killed the server.

Decided 2026-11-21: the limits of a spec are not enforced. The limits that an ordinary process can have
(RLIMIT_AS, RLIMIT_NPROC) do not mean what a container's limits mean.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from anyio import to_thread

from decathlon_mcp.archives.packing import pack_folder
from decathlon_mcp.archives.unpacking import unpack
from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.errors import BadRequestError, ImageError
from decathlon_mcp.payloads import source
from decathlon_mcp.sandboxes.host.first_process import Launch
from decathlon_mcp.sandboxes.host.records import closing_descriptor
from decathlon_mcp.sandboxes.host.sandbox import HostSandbox

ROOT, TEMPORARY = "root", "tmp"


class PlainSandbox(HostSandbox):
    """See `HostSandbox`. `put` and `get` accept only folders at or below its root."""

    subfolders = (ROOT, TEMPORARY)

    @property
    def root(self) -> PurePosixPath:
        return PurePosixPath(self.folder / ROOT)

    def start(self) -> None:
        environment = _environment(self.folder)
        if shutil.which(self.spec.command[0], path=environment["PATH"]) is None:
            raise ImageError(f"this machine has no {self.spec.command[0]} on its PATH")
        waiting, go = os.pipe()
        with closing_descriptor(go):
            with closing_descriptor(waiting):
                program = (sys.executable, "-I", "-S", "-c", source("subreaper"), str(waiting))
                self._launch(
                    Launch(
                        command=(*program, *self.spec.command),
                        cwd=self.folder / ROOT,
                        environment=environment,
                        survives=self.spec.survives,
                        descriptors=(waiting,),
                    )
                )
            # The command starts now: of a server that was killed before, nothing runs that the next one does
            # not find.
            os.write(go, b"1")

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


def _environment(folder: Path) -> Mapping[str, str]:
    """The server's own variables without its settings; temporary files go to the sandbox's folder."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    # `python3` is the server's own Python. Not resolved: a virtual environment is recognized by the path.
    python_folder = str(Path(sys.executable).parent)
    return {
        **inherited,
        "PATH": os.pathsep.join((python_folder, inherited.get("PATH", os.defpath))),
        "TMPDIR": str(folder / TEMPORARY),
    }
