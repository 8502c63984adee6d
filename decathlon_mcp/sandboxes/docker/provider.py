"""Sandboxes that are containers of a Docker engine.

What a container may do is in `docker_container`; the engine is found by DOCKER_HOST (`docker_engine`). An
image needs Python >= 3.10 as `python3` on its PATH and nothing of ours: the link sends the driver.
Decided 2026-11-21: to leave a sandbox is to wait until its container is gone (40 to 100 ms, bounded), so that
what is counted as open is what there is; whoever must not wait for that ends the episode behind his reply.
"""

from __future__ import annotations

import logging
import secrets
import shutil
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import PurePosixPath
from types import TracebackType
from typing import Self

import anyio
from anyio import CancelScope, CapacityLimiter
from anyio.abc import TaskGroup
from docker.errors import APIError, NotFound

from decathlon_mcp.errors import BadRequestError, DecathlonError, ImageError, ProviderUnavailableError
from decathlon_mcp.sandboxes.base import Finding, Isolation, Limits, SandboxSpec, finding
from decathlon_mcp.sandboxes.docker.container import DEFAULT_NETWORK, Container, remove_container
from decathlon_mcp.sandboxes.docker.engine import Api, Engine, said_by
from decathlon_mcp.sandboxes.docker.events import OWNER_LABEL, SANDBOX_LABEL, EventWatch
from decathlon_mcp.sandboxes.docker.image import find_image, how_to_get
from decathlon_mcp.sandboxes.docker.sandbox import DockerSandbox
from decathlon_mcp.sandboxes.docker.stream import AttachedStream
from decathlon_mcp.sandboxes.socket_stream import SocketStream
from decathlon_mcp.telemetry.logs import fields

REMOVE_SECONDS = 30.0
TURN_SECONDS = 2.0
"""More, for each removal that is ahead: hundreds of episodes may end together, and a paused one ends by no
other way."""
RETRIES_SECONDS = (0.2, 1.0, 5.0)
LISTEN_SECONDS = 1.0
CHECK_SECONDS = 2.8
TRIAL_SECONDS = 1.5
FREE_BYTES = 2 << 30
_TRIAL = "import json, subprocess, selectors, sys; sys.exit(sys.version_info < (3, 10))"

_log = logging.getLogger(__name__)


class DockerProvider:
    """Opens sandboxes as containers labelled with `owner`.

    `network`, a name of the engine's, is what sandboxes with a network are in: one that an operator makes
    resolves the names of the containers beside them.
    `pull`: an image that is missing is fetched, else that is an ImageError. `at_once` bounds how many are
    being opened, and how many removed, at the same time: past four, each only becomes slower.
    """

    name = "docker"
    isolation: Isolation = "container"

    def __init__(
        self, owner: str, *, network: str = DEFAULT_NETWORK, pull: bool = False, at_once: int = 4
    ) -> None:
        self._owner = owner
        self._network = network
        self._pull = pull
        self._engine = Engine()
        self._events = EventWatch(self._engine, owner)
        self._opening = CapacityLimiter(at_once)
        self._removing = CapacityLimiter(at_once)
        self._names: set[str] = set()
        self._tasks: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        self._tasks.start_soon(self._events.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tasks is not None
        self._tasks.cancel_scope.cancel()
        # Told of no error: a task group would wrap what is not its own.
        await self._tasks.__aexit__(None, None, None)
        with CancelScope(shield=True):
            await self._engine.aclose()

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return spec.root

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return self._network == "host" and spec.network != "none"

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[DockerSandbox]:
        if spec.name in self._names:
            raise BadRequestError(f"there is a sandbox named {spec.name} already")
        await self._engine.api()
        with anyio.move_on_after(LISTEN_SECONDS):
            await self._events.listening.wait()
        container = Container(self._owner, spec, network=self._network, pull=self._pull)
        streams: list[AttachedStream] = []

        async def hang_up() -> None:
            for stream in streams:
                await stream.aclose()
            if container.socket is not None:
                container.socket.close()

        async with AsyncExitStack() as stack:
            container_exit = stack.enter_context(self._events.following(spec.name))
            # Last of all: the line's end would have the container removed behind our back.
            stack.push_async_callback(hang_up)
            stack.push_async_callback(self._remove, container)
            self._names.add(spec.name)
            async with self._opening:
                attached = await self._engine.run(container.open)
            streams.append(AttachedStream(SocketStream(attached)))
            sandbox = DockerSandbox(self._engine, container, streams[0], container_exit)
            stack.callback(sandbox.close)
            yield sandbox

    async def _remove(self, container: Container) -> None:
        """Bounded, tried again, never raising: whatever ended the sandbox is the better error."""
        ahead = self._removing.statistics().tasks_waiting
        with anyio.move_on_after(REMOVE_SECONDS + ahead * TURN_SECONDS, shield=True):
            for pause in (*RETRIES_SECONDS, 0):
                try:
                    async with self._removing:
                        await self._engine.run(container.remove, abandon=True)
                except (APIError, ProviderUnavailableError) as error:
                    said = said_by(error) if isinstance(error, APIError) else error.message
                    _log.warning(
                        "A container could not be removed",
                        extra=fields(sandbox=container.spec.name, why=said),
                    )
                    await anyio.sleep(pause)
                else:
                    self._names.discard(container.spec.name)
                    return
        _log.error("A container was left behind", extra=fields(sandbox=container.spec.name))

    async def sweep(self, owner: str) -> int:
        filters = {"label": f"{OWNER_LABEL}={owner}"}
        try:
            found = await self._engine.run(lambda api: api.containers(all=True, filters=filters))
            left = [each for each in found if each["Labels"].get(SANDBOX_LABEL) not in self._names]
            async with anyio.create_task_group() as tasks:
                for each in left:
                    tasks.start_soon(self._remove_stray, str(each["Id"]))
        except APIError as error:
            raise ProviderUnavailableError(f"the engine refused: {said_by(error)}") from error
        return len(left)

    async def _remove_stray(self, identity: str) -> None:
        async with self._removing:
            try:
                await self._engine.run(lambda api: remove_container(api, identity))
            except APIError as error:
                _log.warning(
                    "A container could not be removed", extra=fields(id=identity, why=said_by(error))
                )

    async def check(self, image: str | None) -> list[Finding]:
        findings: list[Finding] = []
        with anyio.move_on_after(CHECK_SECONDS) as scope:
            try:
                await self._check(image, findings)
            except ProviderUnavailableError as error:
                findings.append(Finding("engine", False, error.message, str(error.data.get("cure", ""))))
            except (DecathlonError, APIError) as error:
                findings.append(Finding("engine", False, str(error), "see the engine's own log"))
        if scope.cancelled_caught:
            findings.append(Finding("time", False, "not all was tried within 3 s", "try again, less busy"))
        return findings

    async def _check(self, image: str | None, findings: list[Finding]) -> None:
        version = await self._engine.run(lambda api: api.version(), abandon=True)
        findings.append(finding("engine", True, f"Docker {version.get('Version')} at {self._engine.where}"))
        findings += await self._engine.run(_disk, abandon=True)
        if self._network != DEFAULT_NETWORK:
            findings.append(await self._engine.run(self._find_network, abandon=True))
        if image is None:
            return
        try:
            found = await self._engine.run(lambda api: find_image(api, image, pull=False), abandon=True)
        except ImageError:
            findings.append(Finding("image", False, f"{image} is not on this engine", how_to_get(image)))
            return
        findings.append(finding("image", True, f"{image}, {found.size_bytes // 1_000_000} MB"))
        with anyio.move_on_after(TRIAL_SECONDS) as trial:
            findings.append(await self._try_python(image))
        if trial.cancelled_caught:
            findings.append(Finding("python3", True, "not tried: the engine is busy"))

    def _find_network(self, api: Api) -> Finding:
        try:
            found = api.inspect_network(self._network)
        except NotFound:
            cure = f"docker network create {self._network}"
            return Finding("network", False, f"the engine has no network {self._network}", cure)
        return Finding("network", True, f"{self._network}, {found['Driver']}")

    async def _try_python(self, image: str) -> Finding:
        name, command = f"check-{secrets.token_hex(8)}", ("python3", "-I", "-S", "-c", _TRIAL)
        spec = SandboxSpec(name, command, PurePosixPath("/decathlon"), image, limits=Limits(memory_mib=256))
        cure = "the image needs Python 3.10 or later, whole (not python3-minimal), as python3 on its PATH"
        try:
            async with self.open(spec) as sandbox:
                with suppress(anyio.EndOfStream):
                    while True:
                        await sandbox.stream.receive()
                cause = await sandbox.cause_of_end()
        except ImageError as error:
            return Finding("python3", False, error.message, cure)
        fits = cause == "exit code 0"
        return finding("python3", fits, "3.10 or later" if fits else f"not one that fits: {cause}", cure)


def _disk(api: Api) -> list[Finding]:
    """Of an engine on this machine, how much is free where it keeps its containers."""
    try:
        free = shutil.disk_usage(str(api.info()["DockerRootDir"])).free
    except (OSError, KeyError):
        return []
    return [finding("disk", free >= FREE_BYTES, f"{free >> 20} MiB free", "free some: docker system prune")]
