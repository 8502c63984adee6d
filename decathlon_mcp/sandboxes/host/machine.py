"""What the sandboxes of one provider have in common: bubblewrap, control groups, a network, and files."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from pathlib import Path

from decathlon_mcp.errors import ImageError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.cgroups import Hierarchies
from decathlon_mcp.sandboxes.host.command import find_program
from decathlon_mcp.sandboxes.host.host_files import HostFiles
from decathlon_mcp.sandboxes.host.image_folder import UNPACK, ImageFolder
from decathlon_mcp.sandboxes.host.mounts import RootFiles
from decathlon_mcp.sandboxes.host.network import OwnNetwork


class Machine:
    """What sandboxes need of this machine, looked for when the first of them needs it.

    `kernel`: the name of their own kernel, with which they need an image. `image`: the folder of the image
    that a spec may name by its digest too. `hidden`: see `HostFiles`. `why_shared`: why sandboxes with a
    network share this machine's; None if they have one of their own.
    """

    def __init__(
        self,
        *,
        kernel: str | None = None,
        image: Path | None = None,
        hidden: Collection[Path] = (),
        why_shared: str | None = None,
    ) -> None:
        self.why_shared = why_shared
        self._kernel = kernel
        self._image = image
        self.hidden = tuple(hidden)
        self._images: dict[str, ImageFolder] = {}

    @cached_property
    def program(self) -> str:
        """The path of bwrap. Raises ProviderUnavailableError."""
        return find_program()

    @cached_property
    def hierarchies(self) -> Hierarchies:
        return Hierarchies.of_this_process()

    @cached_property
    def network(self) -> OwnNetwork | None:
        """How sandboxes get a network of their own; None if they do not. Raises ProviderUnavailableError."""
        return OwnNetwork.of_this_machine() if self.why_shared is None else None

    @cached_property
    def host_files(self) -> HostFiles:
        """This machine's files for sandboxes without a network. Blocks. Raises ProviderUnavailableError."""
        return HostFiles.of_this_server(self.hidden)

    @cached_property
    def _host_files_with_network(self) -> HostFiles:
        return self.host_files.with_network(None if self.network is None else self.network.nameserver)

    def files(self, spec: SandboxSpec) -> RootFiles:
        """What a sandbox starts with. Raises ImageError, ProviderUnavailableError."""
        if spec.image is not None or self._kernel is not None:
            return self.image(spec.image)
        return self.host_files if spec.network == "none" else self._host_files_with_network

    def image(self, name: str | None) -> ImageFolder:
        """The image in this folder, or with this digest. Raises ImageError, also if none is named."""
        if name is None:
            raise ImageError(f"sandboxes with the kernel {self._kernel} need an unpacked image: {UNPACK}")
        if name not in self._images:
            self._images[name] = self._read_image(name)
        return self._images[name]

    def _read_image(self, name: str) -> ImageFolder:
        if not name.startswith("sha256:"):
            return ImageFolder.read(Path(name).expanduser().absolute())
        image = None if self._image is None else ImageFolder.read(self._image)
        if image is None or image.digest != name:
            raise ImageError(f"image {name} is not the one in {self._image}", image=name)
        return image
