"""The part of a provider that opens sandboxes in namespaces of their own with bubblewrap."""

from __future__ import annotations

import logging
import os
import platform
import re
import shutil
import subprocess
from abc import abstractmethod
from contextlib import suppress
from functools import cached_property

import anyio

from decathlon_mcp.errors import DecathlonError, ImageError, ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.base import Finding, Isolation, LimitName, SandboxSpec, finding
from decathlon_mcp.sandboxes.bubblewrap.cgroups import Hierarchies
from decathlon_mcp.sandboxes.bubblewrap.mounts import RootFiles, writable_folders
from decathlon_mcp.sandboxes.bubblewrap.resources import (
    BubblewrapResources,
    Host,
    can_limit_processes,
    user_of,
)
from decathlon_mcp.sandboxes.bubblewrap.sandbox import BubblewrapSandbox
from decathlon_mcp.sandboxes.bubblewrap.seccomp import is_supported
from decathlon_mcp.sandboxes.processes.provider import ProcessProvider
from decathlon_mcp.sandboxes.processes.signals import SIGNAL_SECONDS
from decathlon_mcp.telemetry.logs import fields

PROGRAM = "bwrap"
MINIMAL_VERSION = (0, 7)
"""The first with `--size`."""
INSTALL = "install bubblewrap 0.7 or later (apt-get install bubblewrap)"
ALLOW = (
    "allow user namespaces: sysctl -w user.max_user_namespaces=65536 "
    "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 (those that exist)"
)
SET_UP_SECONDS = 30.0
"""How long bubblewrap may take to set up a sandbox; usually some 10 ms."""
PROBE_SECONDS = 10.0
"""Limit on programs that take 50 ms."""

_log = logging.getLogger(__name__)


class NamespaceProvider(ProcessProvider[BubblewrapResources, BubblewrapSandbox]):
    """Opens sandboxes whose files are those that `_files` names."""

    isolation: Isolation = "namespaces"
    _host: Host | None = None

    @property
    def unlimited(self) -> tuple[LimitName, ...]:
        names = self._hierarchies.unlimited
        return tuple(name for name in names if name != "pids" or not can_limit_processes())

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return spec.network != "none" and self._find_host().network is None

    @abstractmethod
    def _files(self, spec: SandboxSpec) -> RootFiles:
        """The files of a sandbox. Raises ImageError."""

    def _resources(self, owner: str, name: str) -> BubblewrapResources:
        return BubblewrapResources(owner, name, self._folder / name)

    def _start(self, spec: SandboxSpec, resources: BubblewrapResources) -> None:
        files = self._files(spec)
        if files.find_program(spec.command[0]) is None:
            where = "this machine" if files.location is None else f"image {files.location}"
            raise ImageError(f"{where} has no {spec.command[0]} on its PATH", image=str(files.location or ""))
        resources.start(spec, files, self._find_host())

    async def _opened(
        self, spec: SandboxSpec, resources: BubblewrapResources, *, paused: bool, taken_back: bool
    ) -> BubblewrapSandbox:
        files = self._files(spec)
        if not taken_back:
            await self._wait_until_set_up(spec, resources)
            if spec.network != "none":
                await self._connect(resources, user_of(files))
        return BubblewrapSandbox(
            spec,
            resources,
            self._signaller,
            folders=writable_folders(files, spec.root, spec.limits),
            image_digest=files.digest,
            user=user_of(files),
            paused=paused,
        )

    async def _wait_until_set_up(self, spec: SandboxSpec, resources: BubblewrapResources) -> None:
        process = resources.process
        assert process is not None
        with anyio.move_on_after(SET_UP_SECONDS):
            await anyio.wait_readable(resources.set_up)
            if resources.mark_set_up(spec, self._find_host().hierarchies):
                with suppress(SandboxLostError):
                    os.close(resources.open_root())
                    return
            await process.ended.wait()
        if resources.has_run:
            return
        process.read_log()
        # It names paths of this machine, which are not for clients: a note is for `doctor` alone.
        reason = str(process.log_tail)
        _log.warning("bubblewrap created no sandbox", extra=fields(sandbox=spec.name, why=reason))
        error = ProviderUnavailableError("bubblewrap created no sandbox; the server's log has its reason")
        error.add_note(reason)
        raise error

    async def _connect(self, resources: BubblewrapResources, user: tuple[int, int] | None) -> None:
        network = self._find_host().network
        if network is None:
            return
        # The first process may have ended already.
        with suppress(SandboxLostError):
            with anyio.move_on_after(SET_UP_SECONDS):
                await resources.connect(network, user)
                return
            raise ProviderUnavailableError(
                f"the network of a sandbox was not ready after {SET_UP_SECONDS:g} s"
            )

    async def _kill_processes(self, resources: BubblewrapResources) -> bool:
        process = resources.process
        if process is not None and resources.kill_first_process():
            with anyio.move_on_after(SIGNAL_SECONDS):
                await process.ended.wait()
                return True
        return await super()._kill_processes(resources)

    def _find_host(self) -> Host:
        """Raises ProviderUnavailableError if bubblewrap is not installed."""
        if self._host is None:
            self._host = Host(find_program(), self._hierarchies)
        return self._host

    @cached_property
    def _hierarchies(self) -> Hierarchies:
        return Hierarchies.of_this_process()

    def _check_machine(self) -> list[Finding]:
        host = self._find_host()
        version, is_recent = program_version(host.program)
        limits = "memory, CPUs and processes"
        if self.unlimited:
            limits = (
                f"no limit on {', '.join(self.unlimited)}: the server may not create control groups; run it "
                "as root, or with `systemd-run --user --scope`"
            )
        return [
            finding("program", is_recent, f"{version} at {host.program}", INSTALL),
            Finding("limits", True, limits),
        ]


def program_version(program: str) -> tuple[str, bool]:
    """What bubblewrap says about its version, and whether that is `MINIMAL_VERSION` or later. Blocks.

    Raises OSError, subprocess.SubprocessError.
    """
    output = subprocess.run([program, "--version"], capture_output=True, timeout=PROBE_SECONDS, check=False)
    version = output.stdout.decode("utf-8", "replace").strip()
    return version, tuple(map(int, re.findall(r"\d+", version)[:2])) >= MINIMAL_VERSION


def find_program() -> str:
    """The path of bwrap. Raises ProviderUnavailableError."""
    program = shutil.which(PROGRAM)
    if program is None:
        raise ProviderUnavailableError(f"there is no {PROGRAM} on the PATH: {INSTALL}")
    if not is_supported():
        raise ProviderUnavailableError(f"there is no filter of system calls for {platform.machine()}")
    return program


def message_with_notes(error: DecathlonError) -> str:
    """The message of an error, and what only the operator of the machine may read."""
    return ": ".join([error.message, *getattr(error, "__notes__", ())])


def lacks_namespaces(message: str) -> bool:
    """Whether bubblewrap failed with this message because the kernel refuses user namespaces."""
    # Kernels of some distributions have one of these, and containers of an engine refuse namespaces.
    return any(text in message for text in ("new namespace", "uid map", "RTM_NEWADDR"))
