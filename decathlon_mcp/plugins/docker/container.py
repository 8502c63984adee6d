"""One container, from creation to removal, and the network that containers share. Runs in threads."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, cast

from docker.errors import APIError, NotFound

from decathlon_mcp.archives.reading import Kind, Member
from decathlon_mcp.archives.writing import Entry, archive_chunks
from decathlon_mcp.errors import BadRequestError, DecathlonError, ImageError, SandboxLostError
from decathlon_mcp.plugins.docker.engine import (
    Api,
    engine_message,
    live_restore_keeps_auto_remove,
    put_archive,
    refusal,
)
from decathlon_mcp.plugins.docker.exit_events import OWNER_LABEL, SANDBOX_LABEL, cause_in
from decathlon_mcp.plugins.docker.image import (
    Image,
    find_image,
    forget_image,
    missing_image_error,
    user_ids,
)
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.types import JsonObject

REMOVED_SECONDS = 10.0
"""How long a removal that somebody else has begun may take."""
DEFAULT_NETWORK = "decathlon"
NETWORK_LABEL = "decathlon.network"

_NAMESPACE_CALLS = (
    *("clone", "mount", "pivot_root", "setdomainname", "sethostname", "setns", "umount2", "unshare"),
)
_HOSTS = b"127.0.0.1\tlocalhost\n"
_CONFLICT = 409
_NOT_FOUND = 404
_MTU_OPTION = "com.docker.network.driver.mtu"
# On Docker's own `bridge`, containers reach each other, so an agent could find other episodes' sandboxes by
# address. With `enable_icc` off, the engine's firewall drops traffic between containers.
_ISOLATING_OPTIONS = {
    "com.docker.network.bridge.enable_icc": "false",
    "com.docker.network.bridge.enable_ip_masquerade": "true",
}
_network_lock = threading.Lock()


class Container:
    """The container of one sandbox. `open` or `reattach` is called once, `remove` any number of times.

    `exists`: it was opened by another server, whose label is `owner`.
    """

    # Cancelling the task that waits for a thread does not stop the thread. So `remove` waits for an `open` in
    # progress, and forbids an `open` that has not begun yet.

    def __init__(
        self,
        owner: str,
        spec: SandboxSpec,
        *,
        network: str,
        runtime: str | None = None,
        exists: bool = False,
    ) -> None:
        self.owner = owner
        self.spec = spec
        self.network = "none" if spec.network == "none" else network
        self._runtime = runtime
        self.socket: socket.socket | None = None
        """Of the attached stream; None before it is attached, and if the container is paused."""
        self.user = (0, 0)
        self.image_digest: str | None = None
        self.leave_running = False
        """Whether it is not to be removed, since nobody knows yet whether it could be reattached."""
        self._lock = threading.Lock()
        self._id: str | None = None
        self._exists = exists
        self._requested = exists
        self._closed = False

    @property
    def name(self) -> str:
        return f"decathlon-{self.spec.name}"

    @property
    def _labels(self) -> Mapping[str, str]:
        return {OWNER_LABEL: self.owner, SANDBOX_LABEL: self.spec.name}

    @property
    def id(self) -> str:
        if self._id is None:
            raise SandboxLostError("there is no container")
        return self._id

    def open(self, api: Api) -> None:
        """Create and start the container, with its stream attached.

        Raises ImageError, BadRequestError (name in use), ProviderUnavailableError.
        """
        if self.spec.image is None:
            raise ImageError("the docker provider needs an image, and none is configured")
        with self._lock:
            if self._closed:
                raise SandboxLostError("the sandbox was closed before it was open")
            image = find_image(api, self.spec.image)
            self.image_digest = image.digest
            if self.network == DEFAULT_NETWORK:
                self.network = default_network(api)
            self._create(api, image)
            try:
                self._prepare(api, image)
            except APIError as error:
                raise refusal(error, "the engine refused a container") from error
            try:
                # Attached before it starts, so that no output is lost. Podman looks for the program here.
                self.socket = _attach(api, self.id)
                api.start(self.id)
            except APIError as error:
                raise self._not_started(error, image) from error

    def reattach(self, api: Api) -> None:
        """Continue the container that another server left, and attach its stream unless it is paused.

        Raises SandboxLostError if there is none or it has ended; APIError.
        """
        with self._lock:
            if self._closed:
                raise SandboxLostError("the sandbox was closed before it was reattached")
            facts = _inspect(api, self.name)
            if facts["Config"]["Labels"].get(OWNER_LABEL) != self.owner:
                raise SandboxLostError(f"there is no sandbox named {self.spec.name} of this owner")
            self._id = str(facts["Id"])
            _check_running(facts)
            image = find_image(api, str(facts["Image"]))
            self.image_digest = image.digest
            self.user = user_ids(api, image, self._labels)
            if not facts["State"]["Paused"]:
                self._attach(api)

    def attach(self, api: Api) -> socket.socket:
        """Attach the stream again; returns its new socket and closes the old socket.

        Raises SandboxLostError if the container has ended or is paused; APIError.
        """
        with self._lock:
            if self._closed:
                raise SandboxLostError("the sandbox has been closed")
            return self._attach(api)

    def close_socket(self) -> None:
        if self.socket is not None:
            self.socket.close()

    def _attach(self, api: Api) -> socket.socket:
        # With two attached streams, both receive everything, and what they send is interleaved.
        self.close_socket()
        try:
            self.socket = _attach(api, self.id)
        except APIError as error:
            if error.status_code == _CONFLICT and "paused" in engine_message(error):
                raise SandboxLostError("the sandbox is paused") from error
            raise
        # The engine also attaches to a container that has ended, and then the stream never ends.
        try:
            _check_running(_inspect(api, self.id))
        except BaseException:
            self.close_socket()
            raise
        return self.socket

    def remove(self, api: Api) -> None:
        """Remove the container and wait until it is gone. Raises APIError if the engine refuses."""
        with self._lock:
            self._closed = True
            for container_id in self._ids(api):
                remove_container(api, container_id)

    def _ids(self, api: Api) -> list[str]:
        if not self._requested:
            return []
        if self._id is not None and not self._exists:
            return [self._id]
        # The request to create it failed without an answer, or another server has sent it: a container may
        # exist, and one more that only showed the image's users. Both have the labels.
        labels = [f"{name}={value}" for name, value in self._labels.items()]
        return [str(container["Id"]) for container in api.containers(all=True, filters={"label": labels})]

    def _create(self, api: Api, image: Image) -> None:
        self._requested = True
        try:
            auto_remove = not self.spec.survives or live_restore_keeps_auto_remove(api)
            self.user = user_ids(api, image, self._labels)
            config = self._config(image, auto_remove=auto_remove)
            created = api.create_container_from_config(config, self.name)
        except APIError as error:
            self._requested = False
            if error.status_code == _CONFLICT:
                raise BadRequestError(f"there is already a container named {self.name}") from error
            if error.status_code == _NOT_FOUND:
                forget_image(api, image.name)
                raise missing_image_error(image.name) from error
            message = engine_message(error)
            if self._runtime is not None and "runtime" in message and self._runtime in message:
                raise refusal(error, f"the engine has no runtime {self._runtime}") from error
            raise refusal(error, "the engine created no container") from error
        self._id = str(created["Id"])

    def _config(self, image: Image, *, auto_remove: bool) -> JsonObject:
        """The body of the request (Docker Engine API, "Create a container")."""
        spec, limits = self.spec, self.spec.limits
        memory = None if limits.memory_mib is None else limits.memory_mib << 20
        # Files in /tmp count as the container's memory: at most half, or a full /tmp would kill everything.
        scratch = min(limits.scratch_mib, limits.memory_mib // 2) if limits.memory_mib else limits.scratch_mib
        return {
            # Not the name, which may have another image by now.
            "Image": image.digest,
            # The first process replaces the image's own entry point.
            "Entrypoint": list(spec.command),
            "Cmd": [],
            "Labels": self._labels,
            "WorkingDir": str(spec.root),
            "OpenStdin": True,
            # When the server dies, the attached stream closes. Then stdin ends, and the driver exits, unless
            # it is to wait for another server.
            "StdinOnce": not spec.survives,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "Tty": False,
            # Besides NetworkMode "none": the engine skips its network layer, which halves the start time.
            "NetworkDisabled": self.network == "none",
            "Healthcheck": {"Test": ["NONE"]},
            "HostConfig": {
                # A container whose driver has exited goes without a server's help. Where it cannot, the next
                # server's sweep removes it.
                "AutoRemove": auto_remove,
                "Init": False,
                "LogConfig": {"Type": "none", "Config": {}},
                "NetworkMode": self.network,
                "CapDrop": ["ALL"],
                "SecurityOpt": [
                    "no-new-privileges:true",
                    *([f"seccomp={merging_profile()}"] if spec.merge_pages else []),
                ],
                "Tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={scratch}m"},
                **({} if self._runtime is None else {"Runtime": self._runtime}),
                **({} if memory is None else {"Memory": memory, "MemorySwap": memory}),
                **({} if limits.pids is None else {"PidsLimit": limits.pids}),
                **({} if limits.cpus is None else {"NanoCpus": int(limits.cpus * 1_000_000_000)}),
            },
        }

    def _prepare(self, api: Api, image: Image) -> None:
        if image.runs_as_root:
            return
        # One archive, since each takes the engine some 40 ms.
        entries: list[Entry] = []
        if self.spec.root.name:
            # The engine creates a missing working folder as root's.
            user, group = self.user
            folder = str(self.spec.root.relative_to("/"))
            entries.append((Member(name=folder, kind=Kind.FOLDER, mode=0o755, user=user, group=group), ()))
        if self.spec.network == "none":
            # Without a network the engine writes no /etc/hosts, and the driver may not: `localhost` would not
            # resolve.
            entries.append((Member(name="etc/hosts", kind=Kind.FILE, size=len(_HOSTS)), (_HOSTS,)))
        if entries:
            put_archive(api, self.id, "/", b"".join(archive_chunks(entries)))

    def _not_started(self, error: APIError, image: Image) -> DecathlonError:
        """The error for clients if the engine does not start the container."""
        message, program = engine_message(error), self.spec.command[0]
        if "executable file not found" in message or "no such file or directory" in message:
            return ImageError(f"image {image.name} has no {program} on its PATH", image=image.name)
        if "exec format error" in message:
            return ImageError(
                f"image {image.name} is built for another processor architecture", image=image.name
            )
        if f"network {self.network} not found" in message:
            return refusal(error, f"the engine has no network {self.network}")
        return refusal(error, "the engine did not start a container")


def _inspect(api: Api, container: str) -> JsonObject:
    """What the engine knows about a container. Raises SandboxLostError if there is none."""
    try:
        return api.inspect_container(container)
    except NotFound as error:
        raise SandboxLostError("the sandbox is gone") from error


def _check_running(facts: JsonObject) -> None:
    """Raises SandboxLostError if the container has ended."""
    state: JsonObject = facts["State"]
    if not state["Running"]:
        cause = cause_in(state)
        raise SandboxLostError(f"the sandbox's first process has ended ({cause})", cause=cause)


def remove_container(api: Api, container_id: str) -> None:
    """Remove a container by force, with its volumes, and wait until it is gone. Raises APIError."""
    try:
        api.remove_container(container_id, v=True, force=True)
    except NotFound:
        return
    except APIError as error:
        if error.status_code != _CONFLICT or "already in progress" not in engine_message(error):
            raise
        try:
            api.wait(container_id, REMOVED_SECONDS, "removed")
        except NotFound:
            return


def _attach(api: Api, container_id: str) -> socket.socket:
    wrapper: Any = api.attach_socket(container_id, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
    # A duplicate of the descriptor, since the SDK's wrapper (docker 7.2) does not close the connection when
    # it is closed. Its private `_response` holds the connection too.
    descriptor = os.dup(wrapper.fileno())
    wrapper._response.close()
    wrapper.close()
    attached = socket.socket(fileno=descriptor)
    attached.setblocking(False)
    return attached


def default_network(api: Api) -> str:
    """Id of the bridge network with outbound access on which containers cannot reach each other.

    Created when it is first needed, and never removed, since several servers share it. Raises
    ProviderUnavailableError.
    """
    with _network_lock:
        try:
            return _oldest_network(api) or _create_network(api)
        except APIError as error:
            raise refusal(
                error,
                "the engine created no network for sandboxes",
                "create one and set --provider-option network=NAME",
            ) from error


def _oldest_network(api: Api) -> str | None:
    # The engine allows several networks of one name, and servers that start together may each create one.
    networks = api.networks(names=[DEFAULT_NETWORK], filters={"label": NETWORK_LABEL})
    named = [network for network in networks if network["Name"] == DEFAULT_NETWORK]
    return min(((str(network["Created"]), str(network["Id"])) for network in named), default=("", None))[1]


def _create_network(api: Api) -> str:
    created = api.create_network(
        DEFAULT_NETWORK,
        driver="bridge",
        options={**_ISOLATING_OPTIONS, **_mtu_options(api)},
        labels={NETWORK_LABEL: "1"},
    )["Id"]
    oldest = _oldest_network(api)
    if oldest is None or oldest == created:
        return str(created)
    api.remove_network(created)
    return oldest


def _mtu_options(api: Api) -> dict[str, str]:
    """The MTU of the engine's own network."""
    # A new network gets 1500 whatever the host's network has.
    try:
        bridge = api.inspect_network("bridge")
    except NotFound:
        return {}
    options = cast("JsonObject", bridge.get("Options") or {})
    mtu: Any = options.get(_MTU_OPTION)
    return {_MTU_OPTION: str(mtu)} if mtu else {}


@cache
def merging_profile() -> str:
    """The seccomp profile of sandboxes with merging as the option `seccomp=` takes it: JSON, not a path.

    It is Docker's default and one more value for personality(2), 0x40000 (ADDR_NO_RANDOMIZE), so that
    processes can have fixed addresses. An engine's default can be replaced but not extended: `seccomp.json`
    is the default of Docker Engine 28.5.2 (github.com/moby/profiles, seccomp/v0.1.0, under the Apache License
    2.0) with one rule added. The engine reduces it to the capabilities of the container, as it does with its
    own. Engines from 20.10 on read it. A newer engine's own default may refuse more: that is the price of
    merging until the copy is replaced.
    """
    text = (resources.files("decathlon_mcp.plugins.docker") / "seccomp.json").read_text("utf-8")
    # A third of the size: each request to create a container has it.
    return json.dumps(json.loads(text), separators=(",", ":"))


def nesting_profile() -> str:
    """The seccomp profile of a container in which bubblewrap makes sandboxes: Docker's, and namespaces.

    The calls that are added create nothing but what belongs to the new user namespace, in which the sandbox
    has no capability afterwards.
    """
    profile = json.loads(merging_profile())
    profile["syscalls"].append({"names": _NAMESPACE_CALLS, "action": "SCMP_ACT_ALLOW"})
    return json.dumps(profile, indent=1)
