"""Opens sandboxes that are containers of Podman, over its Docker-compatible socket.

Checked with Podman 4.3 as root. It differs from Docker, and so this from `DockerProvider`, in these points:

- stdin of a container ends when its attached stream does, whatever `StdinOnce` says: no sandbox survives its
  server.
- The filters of events know Podman's own names ("died"), and no label without a value.
- A file is packed where a folder was asked for.
- `/version` asks the machine's package manager and can take seconds, so it is not used.
- A network cannot keep its containers apart (`enable_icc`), so that each gets a network stack of its own.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path, PurePosixPath
from typing import Annotated, Any
from urllib.parse import quote, unquote

import anyio.to_thread
from pydantic import AfterValidator, BaseModel, Field

from decathlon_mcp.archives.writing import empty_archive, save
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.plugins.docker.checks import check_disk
from decathlon_mcp.plugins.docker.engine import FOLDER_BIT, Api, Engine, NoAnswerTexts, followed
from decathlon_mcp.plugins.docker.provider import DockerProvider, EngineInventory, engine_inventory
from decathlon_mcp.plugins.docker.sandbox import DockerSandbox
from decathlon_mcp.sandboxes.base import Finding, finding
from decathlon_mcp.sandboxes.plugins import Offer, ProviderContext, ProviderPlugin, provider_folder

API_VERSION = "1.41"
"""Of Docker's API; Podman 4 and 5 have it."""
OWN_STACK = "slirp4netns"
"""Network mode with a network stack in user space for each container."""


class PodmanSandbox(DockerSandbox):
    """See `base.Sandbox`."""

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        # Podman packs a file, FIFO, socket or device for `FOLDER/.` too.
        _, mode = await self.request(lambda api: followed(api, self.container_id, str(folder)))
        if mode is not None and not mode & FOLDER_BIT:
            await anyio.to_thread.run_sync(lambda: save(empty_archive(), archive))
        else:
            await super().get(folder, archive, limit_bytes)


class PodmanProvider(DockerProvider):
    """Opens sandboxes as containers of the Podman service at `socket`, labelled with `owner`."""

    name = "podman"
    sandbox_type = PodmanSandbox
    exit_events: Mapping[str, Any] = {"event": ["died"]}

    def __init__(
        self, owner: str, *, socket: str | None = None, network: str = OWN_STACK, at_once: int = 4
    ) -> None:
        address = f"unix://{socket or default_socket()}"
        engine = Engine(address, api_version=API_VERSION, no_answer=no_podman())
        super().__init__(owner, network=network, at_once=at_once, engine=engine)

    def check_engine(self, api: Api) -> list[Finding]:
        facts = api.info()
        version, cgroups = facts.get("ServerVersion"), str(facts.get("CgroupVersion"))
        rootless = any("rootless" in str(option) for option in facts.get("SecurityOptions") or ())
        return [
            Finding("engine", True, f"Podman {version} at {self.engine.address}"),
            finding(
                "limits",
                not rootless or cgroups != "1",
                f"{'rootless' if rootless else 'root'}, cgroups v{cgroups}",
                "without root, limits need cgroups v2: use root's socket (--provider-option socket=PATH)",
            ),
            *check_disk(facts, "podman"),
        ]

    def check_network(self, api: Api) -> Finding:
        if self.network.partition(":")[0] != OWN_STACK:
            return super().check_network(api)
        program = shutil.which(OWN_STACK)
        return finding(
            "network", program is not None, program or f"no {OWN_STACK} here", f"apt-get install {OWN_STACK}"
        )


def default_socket() -> str:
    """Where the Podman service of this user listens, as systemd's `podman.socket` sets it up."""
    if os.geteuid() == 0:
        return "/run/podman/podman.sock"
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.geteuid()}"
    return f"{runtime}/podman/podman.sock"


def no_podman() -> NoAnswerTexts:
    """The texts of the error if no Podman service answers this user."""
    systemctl = "systemctl" if os.geteuid() == 0 else "systemctl --user"
    other = "name another socket with --provider-option socket=PATH"
    return NoAnswerTexts(
        "no Podman service answers at",
        f"start it (`{systemctl} enable --now podman.socket`; on Debian: apt-get install podman), or {other}",
        f"this user may not use it: {other}, or run as its owner",
    )


def _check_socket(socket: str | None) -> str | None:
    if socket is not None and not Path(socket).is_absolute():
        raise ValueError("expected an absolute path")
    return socket


class PodmanOptions(BaseModel):
    """See `ProviderPlugin.options`."""

    socket: Annotated[str | None, AfterValidator(_check_socket)] = Field(
        None, description="path of the Podman service's socket, by default that of this user"
    )
    network: str = Field(
        OWN_STACK, description=f"network of sandboxes with outbound access, by default {OWN_STACK}"
    )


def create(context: ProviderContext[PodmanOptions]) -> PodmanProvider:
    """The provider of one server."""
    options = context.options
    return PodmanProvider(
        context.owner, socket=options.socket, network=options.network, at_once=context.max_opening
    )


def offer(context: ProviderContext[PodmanOptions], image: str | None) -> Offer:
    """See `ProviderPlugin.offer`."""
    network = context.options.network
    is_shared = network == "host" or "allow_host_loopback=true" in network
    return Offer(shared_network=f"leave out --provider-option network={network}" if is_shared else "")


def begin(context: ProviderContext[PodmanOptions]) -> None:
    """Note the socket for `inventory`, which gets no options: as the name of an empty file."""
    socket = str(Path(context.options.socket or default_socket()))
    try:
        context.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (context.folder / quote(socket, safe="")).touch()
    except OSError as error:
        raise SettingsError(f"--state: {context.folder} cannot be written: {error.strerror}") from None


def _noted_sockets(folder: Path) -> list[str]:
    """The sockets that servers have used. Raises SettingsError."""
    try:
        return sorted(unquote(file.name) for file in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SettingsError(f"--state: {folder} cannot be read: {error.strerror}") from None


@asynccontextmanager
async def inventory(state: Path) -> AsyncGenerator[EngineInventory]:
    """The containers of the services that servers on the state folder have used."""
    sockets = _noted_sockets(provider_folder(state, PodmanProvider.name)) or [default_socket()]
    async with engine_inventory(*(PodmanProvider("gc", socket=socket) for socket in sockets)) as found:
        yield found


PROVIDER = ProviderPlugin(
    create, options=PodmanOptions, inventory=inventory, survives=False, offer=offer, begin=begin
)
