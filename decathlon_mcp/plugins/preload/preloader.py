"""A process that has imported libraries, from which servers are forked (`inside`)."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from typing import Any, Self

import anyio
from anyio import CancelScope, to_thread
from decathlon_sandbox.seccomp_filters import first_process_filter

from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.preload.forkable_programs import COMPARED_NAMES, COMPARED_PREFIXES, Program
from decathlon_mcp.sandboxes.host.command import as_user, user_of
from decathlon_mcp.sandboxes.host.mounts import RootFiles, view_launcher
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.sandbox_folder import closing_descriptor
from decathlon_mcp.sandboxes.host.seccomp import compile_filter

START_SECONDS = 60.0
"""How long the imports may take; usually one second."""
REPORT_BYTES = 1 << 16
_NAMESPACES = {"user": 0x10000000, "pid": 0x20000000, "mnt": 0x20000, "ipc": 0x08000000, "uts": 0x04000000}
_SHARED_NAMESPACES = {"net": 0x40000000, "cgroup": 0x02000000}
"""Flags of setns(2) for namespaces that a sandbox may have in common with this process."""


class PreloaderError(Exception):
    """A process to fork from could not be started, or has ended."""


class Preloader:
    """Runs as the user of sandboxes on this machine, outside of them. It ends with this server.

    Nothing but this server has the other end of its socket.
    """

    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, streams: list[int]) -> None:
        self._process = process
        self._control = control
        self._streams = streams

    @classmethod
    def start(
        cls,
        program: Program,
        files: RootFiles,
        libraries: Sequence[str],
        *,
        reads: Sequence[str] = (),
        checks: bool = False,
        report: int = -1,
    ) -> Self:
        """Start it, without waiting.

        `checks`: it only checks the libraries. `report`: a descriptor that gets the names of modules that
        forks import.

        Raises OSError, ProviderUnavailableError.
        """
        with ExitStack() as stack:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(theirs.close)
            archive = os.memfd_create("preloader")
            stack.callback(os.close, archive)
            path = f"/proc/self/fd/{archive}"
            config: dict[str, Any] = {
                "path": path,
                "control": theirs.fileno(),
                "parent": os.getpid(),
                "libraries": list(libraries),
                "reads": list(reads),
                "checks": checks,
                "report": report,
                "variables": [name for name, _ in program.variables],
                "replaced": list(program.replaced),
                "script": program.script,
                "program": program.name,
                "filters": [compile_filter(), first_process_filter()],
                "merged filters": [compile_filter(fixed_addresses=True), first_process_filter()],
                "compared": (COMPARED_PREFIXES, COMPARED_NAMES),
            }
            os.write(archive, _archive(config))
            # A server has pipes there too, by which an interpreter decides how it buffers.
            pipes = [os.pipe(), os.pipe()]
            for descriptor in (pipes[0][0], pipes[1][1]):
                stack.callback(os.close, descriptor)
            process = subprocess.Popen(
                [*view_launcher(files.reached), *as_user(user_of(files)), *program.command],
                stdin=pipes[0][0],
                stdout=pipes[1][1],
                stderr=pipes[1][1],
                cwd="/",
                env={**dict(program.variables), "PYTHONPATH": path},
                pass_fds=[theirs.fileno(), archive, *([report] if report >= 0 else [])],
                start_new_session=True,
            )
        ours.setblocking(False)
        os.set_blocking(pipes[1][0], False)
        return cls(process, ours, [pipes[0][1], pipes[1][0]])

    @property
    def pid(self) -> int:
        return self._process.pid

    async def reply(self) -> bytes:
        """Its message, once it has imported. Raises PreloaderError."""
        with anyio.move_on_after(START_SECONDS):
            await anyio.wait_readable(self._control)
            if reply := self._control.recv(REPORT_BYTES):
                return reply
        output = b""
        with suppress(OSError):
            output = os.read(self._streams[1], 4096)
        raise PreloaderError(f"it ended: {output.decode('utf-8', 'replace').strip()[-500:]}")

    async def wait_until_ready(self) -> None:
        """Raises PreloaderError."""
        reply = await self.reply()
        if reply != b"ready":
            raise PreloaderError(reply.decode("utf-8", "replace"))

    async def checked(self) -> tuple[Mapping[str, str], Sequence[str]]:
        """Libraries that no fork may have, with the reasons, and names of variables that the others read."""
        reply = json.loads(await self.reply())
        return reply["unsafe"], reply["reads"]

    async def wait_until_ended(self) -> None:
        await anyio.wait_readable(self._control)

    async def fork_into(self, sandbox: NamespaceSandbox, channel: int) -> None:
        """Let a fork enter a sandbox. `channel`: the fork's, which tells the driver what becomes of it.

        Returns when the preloader has closed it: for the last one who does, that may take long.

        Raises OSError if that is not possible any more.
        """
        leader = sandbox.leader
        if leader is None:
            raise ProcessLookupError("the sandbox has ended")
        with ExitStack() as stack:
            process = stack.enter_context(leader.opened())
            flags = sum(_NAMESPACES.values())
            for name, flag in _SHARED_NAMESPACES.items():
                theirs, own = (os.readlink(f"/proc/{pid}/ns/{name}") for pid in (leader.pid, os.getpid()))  # noqa: PTH115  (does not wait)
                flags += flag if theirs != own else 0
            groups = [
                stack.enter_context(closing_descriptor(os.open(file, os.O_WRONLY | os.O_CLOEXEC)))
                for file in sandbox.group.process_files
            ]
            message = f"{flags} {leader.pid} {int(sandbox.spec.merge_pages)}".encode()
            receipt, end = os.pipe()
            stack.callback(os.close, receipt)
            with closing_descriptor(end):
                while True:
                    try:
                        socket.send_fds(self._control, [message], [channel, process, end, *groups])
                    except BlockingIOError:
                        await anyio.wait_writable(self._control)
                    else:
                        break
            await anyio.wait_readable(receipt)

    async def close(self) -> None:
        """End it."""
        self._control.close()
        for stream in self._streams:
            os.close(stream)
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        with CancelScope(shield=True):
            await to_thread.run_sync(self._process.wait)


def _archive(config: Mapping[str, Any]) -> bytes:
    """A folder of Python's path with the payload as `sitecustomize`."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        text = source("inside", __package__)
        future = "from __future__ import annotations\n"
        code = text.replace(future, f"{future}\nCONFIG = {config!r}\n", 1)
        archive.writestr("sitecustomize.py", code)
        if config["checks"]:
            archive.writestr("inside_checks.py", source("inside_checks", __package__))
    return content.getvalue()
