"""One container, from before it is created until after it is removed. Everything here runs in threads."""

from __future__ import annotations

import os
import socket
import threading
from typing import Any

from docker.errors import APIError, NotFound

from decathlon_mcp.archives.archive import file_of, folders
from decathlon_mcp.errors import BadRequestError, ImageError, ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.docker.engine import Api, put_archive, said_by
from decathlon_mcp.sandboxes.docker.events import OWNER_LABEL, SANDBOX_LABEL
from decathlon_mcp.sandboxes.docker.image import Image, find_image, missing, numbers_of
from decathlon_mcp.sandboxes.docker.network import DEFAULT_NETWORK, default_network
from decathlon_mcp.types import JsonObject

GONE_SECONDS = 10.0
_CONFLICT = 409
_NOT_FOUND = 404


class Container:
    """A container of one sandbox.

    Cancelling a thread's caller does not stop the thread: so `remove` waits for an `open` that is still under
    way, and forbids a later one.
    """

    def __init__(self, owner: str, spec: SandboxSpec, *, network: str, pull: bool) -> None:
        self.owner = owner
        self.spec = spec
        self.network = "none" if spec.network == "none" else network
        self.socket: socket.socket | None = None
        self.user = (0, 0)
        self.image_digest: str | None = None
        self._pull = pull
        self._lock = threading.Lock()
        self._identity: str | None = None
        self._asked_for = False
        self._given_up = False

    @property
    def identity(self) -> str:
        if self._identity is None:
            raise SandboxLostError("there is no container")
        return self._identity

    def open(self, api: Api) -> socket.socket:
        """Create, attach, start: in this order nothing it says is lost. Gives the attached stream's socket.

        Raises ImageError, BadRequestError (name in use), ProviderUnavailableError.
        """
        if self.spec.image is None:
            raise ImageError("a sandbox of the docker provider needs an image, and none is named")
        with self._lock:
            if self._given_up:
                raise SandboxLostError("the sandbox was closed before it was open")
            image = find_image(api, self.spec.image, pull=self._pull)
            self.image_digest = image.identity
            if self.network == DEFAULT_NETWORK:
                self.network = default_network(api)
            self._create(api)
            try:
                self._prepare(api, image)
                self.socket = _attach(api, self.identity)
            except APIError as error:
                raise ProviderUnavailableError(f"the engine refused a container: {said_by(error)}") from error
            self._start(api, image)
            return self.socket

    def remove(self, api: Api) -> None:
        """Returns when it is gone, whoever removed it. Raises APIError when the engine refuses."""
        with self._lock:
            self._given_up = True
            for identity in self._known(api):
                remove_container(api, identity)

    def _known(self, api: Api) -> list[str]:
        if self._identity is not None:
            return [self._identity]
        if not self._asked_for:
            return []
        # Nobody knows what became of the request: the labels do.
        labels = [f"{OWNER_LABEL}={self.owner}", f"{SANDBOX_LABEL}={self.spec.name}"]
        return [str(found["Id"]) for found in api.containers(all=True, filters={"label": labels})]

    def _create(self, api: Api) -> None:
        self._asked_for = True
        try:
            made = api.create_container_from_config(
                _config(self.owner, self.spec, self.network), f"decathlon-{self.spec.name}"
            )
        except APIError as error:
            self._asked_for = False
            if error.status_code == _CONFLICT:
                raise BadRequestError(
                    f"there is a container named decathlon-{self.spec.name} already"
                ) from error
            if error.status_code == _NOT_FOUND:
                raise missing(str(self.spec.image)) from error
            raise ProviderUnavailableError(f"the engine made no container: {said_by(error)}") from error
        self._identity = str(made["Id"])

    def _prepare(self, api: Api, image: Image) -> None:
        self.user = numbers_of(api, self.identity, image)
        root = self.spec.root
        if not image.is_roots and root.name:
            # A working folder that the engine has made is root's.
            put_archive(api, self.identity, str(root.parent), folders([root.name], *self.user))
        if not image.is_roots and self.spec.network == "none":
            # The engine writes none without a network, and the driver may not: `localhost` would be no name.
            put_archive(api, self.identity, "/etc", file_of("hosts", b"127.0.0.1\tlocalhost\n"))

    def _start(self, api: Api, image: Image) -> None:
        try:
            api.start(self.identity)
        except APIError as error:
            said, program = said_by(error), self.spec.command[0]
            if "executable file not found" in said or "no such file or directory" in said:
                raise ImageError(
                    f"image {image.name} has no {program} on its PATH", image=image.name
                ) from error
            if "exec format error" in said:
                raise ImageError(
                    f"image {image.name} is made for another machine", image=image.name
                ) from error
            raise ProviderUnavailableError(f"the engine did not start a container: {said}") from error


def remove_container(api: Api, identity: str) -> None:
    """Forced, with its volumes; that it is gone or going is success, and waited for."""
    try:
        api.remove_container(identity, v=True, force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != _CONFLICT or "already in progress" not in said_by(error):
            raise
        try:
            api.wait(identity, GONE_SECONDS, "removed")
        except NotFound:
            return


def _attach(api: Api, identity: str) -> socket.socket:
    """The attached stream by a descriptor of ours: the SDK's wrapper keeps it open when it is closed."""
    wrapper: Any = api.attach_socket(identity, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    number = os.dup(wrapper.fileno())
    wrapper._response.close()
    wrapper.close()
    attached = socket.socket(fileno=number)
    attached.setblocking(False)
    return attached


def _config(owner: str, spec: SandboxSpec, network: str) -> JsonObject:
    """What the engine is asked for (Docker Engine API, "Create a container").

    The first process is the entry point, whatever the image has for one. `StdinOnce`: the server's death is
    the end of its input. `AutoRemove`: and with its end the container goes.
    """
    limits = spec.limits
    memory = None if limits.memory_mib is None else limits.memory_mib << 20
    # What lies there is memory: full, it must not be the end of all that runs.
    scratch = min(limits.scratch_mib, limits.memory_mib // 2) if limits.memory_mib else limits.scratch_mib
    return {
        "Image": spec.image,
        "Entrypoint": list(spec.command),
        "Cmd": [],
        "Env": [f"{name}={value}" for name, value in spec.environment],
        "Labels": {OWNER_LABEL: owner, SANDBOX_LABEL: spec.name},
        "WorkingDir": str(spec.root),
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        # More than a mode of none: the engine's network layer is not even asked, which halves the start.
        "NetworkDisabled": network == "none",
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": {
            "AutoRemove": True,
            "Init": False,
            "LogConfig": {"Type": "none", "Config": {}},
            "NetworkMode": network,
            "CapDrop": ["ALL"],
            "SecurityOpt": ["no-new-privileges:true"],
            "Tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={scratch}m"},
            **({} if memory is None else {"Memory": memory, "MemorySwap": memory}),
            **({} if limits.pids is None else {"PidsLimit": limits.pids}),
            **({} if limits.cpus is None else {"NanoCpus": int(limits.cpus * 1_000_000_000)}),
        },
    }
