"""Opens sandboxes in namespaces of their own with bubblewrap, without a daemon and without being root.

The root file system is a folder (`image_folder`). Inside, it is read-only; the suite's root, the home of
the image's user, /tmp, /run and /var/tmp are file systems in memory of limited size. The network has a
loopback interface and nothing else. Processes have no capabilities, no way to new ones, and a filter of
system calls (`seccomp`).

Decided 2026-11-22: a sandbox never runs as the machine's root, whose files it could then change where the
kernel asks for no capability (/proc/sys, the permissions of /dev/null). If the server is root, sandboxes run
as the owner of the image's files, or if that is root, as a user that belongs to nobody.

Decided 2026-11-22: no outbound network. In the host's network namespace a sandbox would reach the services
on the host's loopback interface, and a private one needs another program for each sandbox (pasta,
slirp4netns).
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import shutil
import subprocess
from contextlib import suppress
from functools import cached_property
from pathlib import Path, PurePosixPath

import anyio
from anyio import to_thread

from decathlon_mcp.errors import (
    DecathlonError,
    ImageError,
    NotRunnableError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.sandboxes.base import (
    Finding,
    Isolation,
    LimitName,
    Limits,
    SandboxSpec,
    finding,
)
from decathlon_mcp.sandboxes.bubblewrap.cgroups import Hierarchies
from decathlon_mcp.sandboxes.bubblewrap.command import writable_folders
from decathlon_mcp.sandboxes.bubblewrap.image_folder import SANDBOX_USER, ImageFolder
from decathlon_mcp.sandboxes.bubblewrap.resources import BubblewrapResources, Host, can_limit_processes
from decathlon_mcp.sandboxes.bubblewrap.sandbox import BubblewrapSandbox
from decathlon_mcp.sandboxes.bubblewrap.seccomp import is_supported
from decathlon_mcp.sandboxes.local.process_provider import ProcessProvider
from decathlon_mcp.sandboxes.local.process_signals import SIGNAL_SECONDS

PROGRAM = "bwrap"
MINIMAL_VERSION = (0, 7)
"""The first with `--size`."""
INSTALL = "install bubblewrap 0.7 or later (apt-get install bubblewrap), or use --provider docker"
UNPACK = "decathlon-mcp image unpack IMAGE DIR, then --image DIR"
NO_NETWORK = "the bubblewrap provider gives sandboxes no outbound network: use --provider docker"
SET_UP_SECONDS = 30.0
"""How long bubblewrap may take to set up a sandbox; usually some 10 ms."""
CHECK_SECONDS = 2.8
# The modules are those that python3-minimal lacks.
_PYTHON_CHECK = "import json, subprocess, selectors, sys; sys.exit(sys.version_info < (3, 10))"


class BubblewrapProvider(ProcessProvider[BubblewrapResources, BubblewrapSandbox]):
    """Opens sandboxes from a folder on this machine, which is `SandboxSpec.image`.

    A spec may name the image by its digest too, if the folder `image` is that image.
    """

    name = "bubblewrap"
    isolation: Isolation = "namespaces"

    def __init__(self, owner: str, folder: Path, *, image: Path | None = None, at_once: int = 4) -> None:
        super().__init__(owner, folder, at_once=at_once)
        self._image = image
        self._images: dict[str, ImageFolder] = {}
        self._host: Host | None = None

    @staticmethod
    def label(owner: str) -> str:
        return f"{owner}.bubblewrap"

    @property
    def unlimited(self) -> tuple[LimitName, ...]:
        names = self._hierarchies.unlimited
        return tuple(name for name in names if name != "pids" or not can_limit_processes())

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return spec.root

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return False

    async def environment(self, image: str | None) -> str | None:
        try:
            return None if image is None else self._image_named(image).digest
        except ImageError:
            return None

    def _resources(self, owner: str, name: str) -> BubblewrapResources:
        return BubblewrapResources(owner, name, self._folder / name, label=self.label(owner))

    def _start(self, spec: SandboxSpec, resources: BubblewrapResources) -> None:
        if spec.network != "none":
            raise NotRunnableError(NO_NETWORK)
        image = self._image_of(spec)
        if image.find_program(spec.command[0]) is None:
            raise ImageError(
                f"image {image.path} has no {spec.command[0]} on its PATH", image=str(image.path)
            )
        resources.start(spec, image, self._find_host(), user_of(image))

    async def _opened(
        self, spec: SandboxSpec, resources: BubblewrapResources, *, paused: bool, taken_back: bool
    ) -> BubblewrapSandbox:
        image = self._image_of(spec)
        if not taken_back:
            await self._wait_until_set_up(spec, resources)
        return BubblewrapSandbox(
            spec,
            resources,
            self._signaller,
            folders=writable_folders(image, spec.root, spec.limits),
            image_digest=image.digest,
            user=user_of(image),
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
        raise ProviderUnavailableError(f"bubblewrap created no sandbox: {process.log_tail or 'no answer'}")

    async def _kill_processes(self, resources: BubblewrapResources) -> bool:
        process = resources.process
        if process is not None and resources.kill_first_process():
            with anyio.move_on_after(SIGNAL_SECONDS):
                await process.ended.wait()
                return True
        return await super()._kill_processes(resources)

    def _image_of(self, spec: SandboxSpec) -> ImageFolder:
        """The folder that a spec's image names. Raises ImageError."""
        if spec.image is None:
            raise ImageError(f"the bubblewrap provider needs an unpacked image: {UNPACK}")
        return self._image_named(spec.image)

    def _image_named(self, name: str) -> ImageFolder:
        image = self._images.get(name)
        if image is None:
            image = self._images[name] = self._read_image(name)
        return image

    def _read_image(self, name: str) -> ImageFolder:
        if not name.startswith("sha256:"):
            return ImageFolder.read(Path(name).expanduser().absolute())
        image = None if self._image is None else ImageFolder.read(self._image)
        if image is None or image.digest != name:
            raise ImageError(f"image {name} is not the one in {self._image}", image=name)
        return image

    def _find_host(self) -> Host:
        """Raises ProviderUnavailableError if bubblewrap is not installed."""
        if self._host is None:
            program = shutil.which(PROGRAM)
            if program is None:
                raise ProviderUnavailableError(f"there is no {PROGRAM} on the PATH: {INSTALL}")
            if not is_supported():
                raise ProviderUnavailableError(
                    f"the bubblewrap provider has no filter of system calls for {platform.machine()}: use "
                    "--provider docker"
                )
            self._host = Host(program, self._hierarchies)
        return self._host

    @cached_property
    def _hierarchies(self) -> Hierarchies:
        return Hierarchies.of_this_process()

    async def check(self, image: str | None) -> list[Finding]:
        findings: list[Finding] = []
        with anyio.move_on_after(CHECK_SECONDS) as scope:
            try:
                findings += await to_thread.run_sync(self._check_machine, abandon_on_cancel=True)
                findings += await self._check_image(image)
            except DecathlonError as error:
                findings.append(Finding("sandbox", False, error.message, _cure_of(error)))
        if scope.cancelled_caught:
            cure = "try again when the machine is less busy"
            findings.append(Finding("time", False, "the checks did not finish within 3 s", cure))
        return findings

    def _check_machine(self) -> list[Finding]:
        host = self._find_host()
        output = subprocess.run([host.program, "--version"], capture_output=True, check=False).stdout
        version = output.decode("utf-8", "replace").strip()
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        limits = "memory, CPUs and processes"
        if self.unlimited:
            limits = (
                f"no limit on {', '.join(self.unlimited)}: the server may not create control groups; run it "
                "as root, or with `systemd-run --user --scope`"
            )
        return [
            finding("program", numbers >= MINIMAL_VERSION, f"{version} at {host.program}", INSTALL),
            Finding("limits", True, limits),
        ]

    async def _check_image(self, image: str | None) -> list[Finding]:
        """Open a sandbox of the image, with a check of its Python."""
        name, command = f"check-{secrets.token_hex(8)}", ("python3", "-I", "-S", "-c", _PYTHON_CHECK)
        spec = SandboxSpec(name, command, PurePosixPath("/decathlon"), image, limits=Limits(memory_mib=256))
        folder = self._image_of(spec)
        findings = [Finding("image", True, f"{folder.path}, {folder.digest or 'of unknown origin'}")]
        cure = "the image needs a complete Python 3.10 or later (not python3-minimal) as python3 on its PATH"
        async with self.open(spec) as sandbox:
            with suppress(anyio.EndOfStream):
                while True:
                    await sandbox.stream.receive()
            cause = await sandbox.cause_of_end()
        suitable = cause == "exit code 0"
        return [
            *findings,
            finding("python3", suitable, "3.10 or later" if suitable else f"unsuitable: {cause}", cure),
        ]


def _cure_of(error: DecathlonError) -> str:
    """What to do about a sandbox that could not be opened."""
    if isinstance(error, ImageError):
        return UNPACK
    if "new namespace" in error.message or "uid map" in error.message:
        # Kernels of some distributions have one of these, and containers of an engine refuse namespaces.
        return (
            "allow user namespaces: sysctl -w user.max_user_namespaces=65536 "
            "kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0 (those that "
            "exist)"
        )
    if "ermission denied" in error.message:
        return "the image's folder, and those above it, must be accessible to the owner of its files"
    return INSTALL


def user_of(image: ImageFolder) -> tuple[int, int] | None:
    """The user and group that sandboxes run as on this machine; None for the server's own."""
    if os.geteuid() != 0:
        return None
    user, group = image.owner
    return (user, group) if user else (SANDBOX_USER, SANDBOX_USER)
