"""Opens sandboxes in namespaces of their own with bubblewrap, without a daemon and without being root.

The root file system is a folder (`image_folder`). Inside, it is read-only; the suite's root, the home of
the image's user, /tmp, /run and /var/tmp are file systems in memory of limited size. The network has a
loopback interface and nothing else. Processes have no capabilities, no way to new ones, and a filter of
system calls (`seccomp`).

Decided 2026-11-22: a sandbox never runs as the machine's root, whose files it could then change where the
kernel asks for no capability (/proc/sys, the permissions of /dev/null). If the server is root, sandboxes run
as the owner of the image's files, or if that is root, as a user that belongs to nobody.

Decided 2026-11-22: no outbound network. In the host's network namespace a sandbox would reach the services
on the host's loopback interface, and one of its own (`network`) needs another /etc/resolv.conf than that of
the image, which may have none.
"""

from __future__ import annotations

from pathlib import Path

from anyio import to_thread

from decathlon_mcp.errors import DecathlonError, ImageError, NotRunnableError
from decathlon_mcp.sandboxes.base import PYTHON_CURE, Finding, SandboxSpec, check_python, limited_check
from decathlon_mcp.sandboxes.bubblewrap.image_folder import UNPACK, ImageFolder
from decathlon_mcp.sandboxes.bubblewrap.namespace_provider import (
    ALLOW,
    INSTALL,
    NamespaceProvider,
    lacks_namespaces,
    message_with_notes,
)
from decathlon_mcp.sandboxes.bubblewrap.resources import BubblewrapResources

NO_NETWORK = "the {} provider gives sandboxes no outbound network: use --provider docker"
OR_DOCKER = f"{INSTALL}, or use --provider docker"


class BubblewrapProvider(NamespaceProvider):
    """Opens sandboxes from a folder on this machine, which is `SandboxSpec.image`.

    A spec may name the image by its digest too, if the folder `image` is that image.
    """

    name = "bubblewrap"

    def __init__(self, owner: str, folder: Path, *, image: Path | None = None) -> None:
        super().__init__(owner, folder)
        self._image = image
        self._images: dict[str, ImageFolder] = {}

    async def environment(self, image: str | None) -> str | None:
        try:
            return None if image is None else self._image_named(image).digest
        except ImageError:
            return None

    def _start(self, spec: SandboxSpec, resources: BubblewrapResources) -> None:
        if spec.network != "none":
            raise NotRunnableError(NO_NETWORK.format(self.name))
        super()._start(spec, resources)

    def _files(self, spec: SandboxSpec) -> ImageFolder:
        return self._image_of(spec.image)

    def _image_of(self, name: str | None) -> ImageFolder:
        if name is None:
            raise ImageError(f"the {self.name} provider needs an unpacked image: {UNPACK}")
        return self._image_named(name)

    def _image_named(self, name: str) -> ImageFolder:
        files = self._images.get(name)
        if files is None:
            files = self._images[name] = self._read_image(name)
        return files

    def _read_image(self, name: str) -> ImageFolder:
        if not name.startswith("sha256:"):
            return ImageFolder.read(Path(name).expanduser().absolute())
        image = None if self._image is None else ImageFolder.read(self._image)
        if image is None or image.digest != name:
            raise ImageError(f"image {name} is not the one in {self._image}", image=name)
        return image

    async def check(self, image: str | None) -> list[Finding]:
        findings: list[Finding] = []
        with limited_check(findings):
            try:
                findings += await to_thread.run_sync(self._check_machine, abandon_on_cancel=True)
                findings += await self._check_image(image)
            except DecathlonError as error:
                findings.append(Finding("sandbox", False, message_with_notes(error), _cure_of(error)))
        return findings

    async def _check_image(self, image: str | None) -> list[Finding]:
        files = self._image_of(image)
        found = Finding("image", True, f"{files.location}, {files.digest or 'of unknown origin'}")
        return [found, await check_python(self.open, image, PYTHON_CURE)]


def _cure_of(error: DecathlonError) -> str:
    """What to do about a sandbox that could not be opened."""
    if isinstance(error, ImageError):
        return UNPACK
    message = message_with_notes(error)
    if lacks_namespaces(message):
        return ALLOW
    if "ermission denied" in message:
        return "the image's folder, and those above it, must be accessible to the owner of its files"
    # What is missing, as its error says.
    _, _, program = message.partition(": install ")
    return f"install {program}, or use --provider docker" if program else OR_DOCKER
