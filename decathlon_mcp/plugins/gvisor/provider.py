"""Opens sandboxes of gVisor: each has a kernel of its own, in user space, that answers its system calls.

runsc runs in namespaces that bubblewrap creates (`command`), without a daemon and without being root. The
files are those of an unpacked image, as with bubblewrap: read-only but for the suite's root, the home of the
image's user, /tmp, /run and /var/tmp, which are in the memory of gVisor's kernel. Archives are packed and
unpacked by programs that runsc starts in the sandbox (`inside.py`), from the image's own Python.

gVisor counts processes itself. It has no limit of memory: the driver keeps one
(`decathlon_sandbox.memory`), and the control group has another one above it. A first process that is no
driver has only that one.

Decided 2026-11-26: no `runsc --rootless`, which can save a sandbox but not restore it, and no outbound
network, as with bubblewrap.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import cached_property
from pathlib import Path

import anyio
from anyio import to_thread

from decathlon_mcp.errors import ProviderUnavailableError, SandboxLostError, SnapshotError
from decathlon_mcp.plugins.gvisor import saving
from decathlon_mcp.plugins.gvisor.resources import GvisorResources
from decathlon_mcp.plugins.gvisor.sandbox import GvisorSandbox
from decathlon_mcp.sandboxes.base import Finding, LimitName, SandboxSpec, finding
from decathlon_mcp.sandboxes.bubblewrap.namespace_provider import PROBE_SECONDS, SET_UP_SECONDS
from decathlon_mcp.sandboxes.bubblewrap.plugin import image_setting
from decathlon_mcp.sandboxes.bubblewrap.provider import NO_NETWORK, BubblewrapProvider
from decathlon_mcp.sandboxes.bubblewrap.resources import BubblewrapResources
from decathlon_mcp.sandboxes.inventory import process_inventory
from decathlon_mcp.sandboxes.plugins import NoOptions, Offer, ProviderContext, ProviderPlugin
from decathlon_mcp.sandboxes.processes.table import ProcessId
from decathlon_mcp.sandboxes.snapshots import Snapshot

FOLDER = "gvisor"
"""In the state folder."""
RUNSC = "runsc"
MINIMAL_VERSION = 20240729
"""The release that was tried, and the oldest one with all options."""
INSTALL_RUNSC = (
    "install runsc of 2024-07-29 or later: apt-get install runsc on Debian 13, otherwise see "
    "https://gvisor.dev/docs/user_guide/install"
)
"""Debian 12 has runsc of 2022, without the platform systrap."""
POLL_SECONDS = 0.005
"""Between two looks at a sandbox that starts, which takes gVisor some 20 ms once its kernel runs."""


TIMER_SLACK_NS = 5_000_000
"""How late a timer of gVisor's kernel may be. With the 50 us of other processes it wakes up a thousand times
a second, also while nothing runs in it (https://github.com/google/gvisor/pull/13470), and takes 26 ms of a
core each second instead of 0.6. A sleep of 1 ms in a sandbox takes some 6 ms; calls are not slower."""
_PR_SET_TIMERSLACK, _PR_GET_TIMERSLACK = 29, 30

_libc = ctypes.CDLL(None)


class GvisorProvider(BubblewrapProvider):
    """See `BubblewrapProvider`."""

    name = "gvisor"
    snapshots = True
    _runsc: Path | None = None

    @property
    def unlimited(self) -> tuple[LimitName, ...]:
        # The driver limits the memory without control groups too.
        return tuple(name for name in self._hierarchies.unlimited if name == "cpus")

    def _resources(self, owner: str, name: str) -> GvisorResources:
        return GvisorResources(owner, name, self._folder / name)

    @asynccontextmanager
    async def open(
        self, spec: SandboxSpec, *, snapshot: Snapshot | None = None
    ) -> AsyncGenerator[GvisorSandbox]:
        """See `SnapshotProvider.open`."""
        resources = self._resources(self._owner, spec.name)
        if snapshot is not None:
            image = self._files(spec)
            await to_thread.run_sync(lambda: saving.check(snapshot, spec, image, self._version))
            resources.snapshot = snapshot
        async with self._open(spec, resources) as sandbox:
            assert isinstance(sandbox, GvisorSandbox)
            yield sandbox

    def _start(self, spec: SandboxSpec, resources: BubblewrapResources) -> None:
        assert isinstance(resources, GvisorResources)
        resources.runsc = self._find_runsc()
        with _late_timers():
            super()._start(spec, resources)

    def _find_runsc(self) -> Path:
        if self._runsc is None:
            self._runsc = find_runsc()
        return self._runsc

    @cached_property
    def _version(self) -> str:
        """What runsc says about its version. The first access blocks."""
        return runsc_version(self._find_runsc())[0]

    def _is_paused(self, resources: BubblewrapResources, leader: ProcessId) -> bool:
        assert isinstance(resources, GvisorResources)
        return resources.is_paused

    async def _opened(
        self, spec: SandboxSpec, resources: BubblewrapResources, *, paused: bool, taken_back: bool
    ) -> GvisorSandbox:
        assert isinstance(resources, GvisorResources)
        image = self._files(spec)
        is_copy = resources.snapshot is not None
        if not taken_back:
            try:
                await self._wait_until_started(spec, resources)
            except ProviderUnavailableError as error:
                if not is_copy:
                    raise
                raise _not_restored(error) from None
        sandbox = GvisorSandbox(
            spec, resources, self._signaller, image, version=lambda: self._version, paused=paused
        )
        if not (taken_back or is_copy) and image.user.user:
            await sandbox.give_home()
        return sandbox

    async def _wait_until_started(self, spec: SandboxSpec, resources: GvisorResources) -> None:
        await self._wait_until_set_up(spec, resources)
        with anyio.move_on_after(SET_UP_SECONDS):
            while not resources.has_started:  # noqa: ASYNC110  (nothing reports it)
                await anyio.sleep(POLL_SECONDS)
        if resources.snapshot is not None:
            # What is wrong with a snapshot may be seen late. If the sandbox has ended, this says why.
            with suppress(SandboxLostError):
                os.close(resources.open_root())
                return
            await self._wait_until_set_up(spec, resources)

    def _check_machine(self) -> list[Finding]:
        runsc = find_runsc()
        version, is_recent = runsc_version(runsc)
        return [
            finding("runsc", is_recent, f"{version} at {runsc}", INSTALL_RUNSC),
            *super()._check_machine(),
        ]


@contextmanager
def _late_timers() -> Generator[None]:
    """What this thread starts in the body, and all that it starts, has `TIMER_SLACK_NS`."""
    before_ns = _libc.prctl(_PR_GET_TIMERSLACK, 0, 0, 0, 0)
    _libc.prctl(_PR_SET_TIMERSLACK, TIMER_SLACK_NS, 0, 0, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_TIMERSLACK, before_ns, 0, 0, 0)


def _not_restored(error: ProviderUnavailableError) -> SnapshotError:
    failure = SnapshotError("no sandbox could be opened from the snapshot; the server's log has the reason")
    failure.__notes__ = getattr(error, "__notes__", [])
    return failure


def find_runsc() -> Path:
    """The path of runsc. Raises ProviderUnavailableError."""
    program = shutil.which(RUNSC)
    if program is None:
        raise ProviderUnavailableError(f"there is no {RUNSC} on the PATH: {INSTALL_RUNSC}")
    return Path(program).resolve()


def runsc_version(program: Path) -> tuple[str, bool]:
    """What runsc says about its version, and whether that is `MINIMAL_VERSION` or later. Blocks."""
    try:
        command = [str(program), "--version"]
        result = subprocess.run(command, capture_output=True, timeout=PROBE_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise ProviderUnavailableError(f"{program} cannot be run: {error}; {INSTALL_RUNSC}") from error
    lines = result.stdout.decode("utf-8", "replace").splitlines()
    # "runsc version release-20240729.0", or Debian's "0.0~20240729.0".
    dates = re.findall(r"\d{8}", lines[0]) if lines else []
    return lines[0] if lines else "of unknown version", bool(dates) and int(dates[0]) >= MINIMAL_VERSION


def create(context: ProviderContext[NoOptions]) -> GvisorProvider:
    """The provider of one server."""
    folder = context.settings.state / FOLDER
    return GvisorProvider(context.owner, folder, image=image_setting(context))


PROVIDER = ProviderPlugin(
    create,
    image="folder",
    inventory=process_inventory(GvisorProvider.name, {GvisorProvider: FOLDER}),
    is_remote=False,
    snapshots=True,
    offer=lambda context: Offer(without_network=NO_NETWORK.format(GvisorProvider.name)),
)
