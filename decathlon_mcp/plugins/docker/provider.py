"""Opens sandboxes that are containers of a Docker engine.

An image needs Python >= 3.10 as `python3` on its PATH and nothing of this project: the driver is sent over
the stream.

Decided 2026-11-21: exiting a sandbox waits until its container is gone (40 to 100 ms, bounded), so that the
number of open sandboxes is the number of containers. A caller that must not wait ends the episode in the
background.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Self

import anyio
from anyio import CancelScope, CapacityLimiter
from docker.errors import APIError, NotFound
from pydantic import BaseModel, Field

from decathlon_mcp.background import finish, run_alone, run_for_ever
from decathlon_mcp.errors import DecathlonError, ImageError, ProviderUnavailableError
from decathlon_mcp.plugins.docker.checks import check_disk, check_engine_limits, check_runtime
from decathlon_mcp.plugins.docker.container import DEFAULT_NETWORK, Container, remove_container
from decathlon_mcp.plugins.docker.engine import RESTART_SECONDS, Api, Engine, engine_message, refusal
from decathlon_mcp.plugins.docker.exit_events import (
    EXIT_EVENTS,
    LIVING_STATES,
    OWNER_LABEL,
    SANDBOX_LABEL,
    EventWatch,
)
from decathlon_mcp.plugins.docker.image import find_image, images_on_engine, install_hint
from decathlon_mcp.plugins.docker.sandbox import DockerSandbox
from decathlon_mcp.sandboxes.base import (
    CHECK_SECONDS,
    PYTHON_CURE,
    BaseProvider,
    Finding,
    Isolation,
    LimitName,
    SandboxSpec,
    check_python,
    limited_check,
    remove_all,
)
from decathlon_mcp.sandboxes.plugins import Offer, ProviderContext, ProviderPlugin
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject

REMOVE_SECONDS = 30.0
"""Limit on the time that the engine may take to remove one container, all tries together.

Time in the queue does not count: hundreds of episodes may end together.
"""
REMOVE_SILENT_SECONDS = 2.0
"""The same limit after a removal that the engine did not answer, until it answers one: a queue must end."""
REMOVE_RETRY_SECONDS = (0.2, 1.0, 5.0)

_log = logging.getLogger(__name__)


class DockerProvider(BaseProvider):
    """Opens sandboxes as containers labelled with `owner`.

    `network` is the engine's network for sandboxes with outbound access; an operator's network also resolves
    the names of the containers on it. `runtime`: the engine's runtime for them, by its name there; None for
    the engine's default. `at_once` bounds how many sandboxes are being opened, and how many removed, at the
    same time. `engine`: another than DOCKER_HOST names. `max_sandboxes`: for how many the engine must be able
    to open files.

    A subclass for an engine that differs replaces `sandbox_type`, `exit_events` and the checks.
    """

    name = "docker"
    isolation: Isolation = "container"
    unlimited: tuple[LimitName, ...] = ()
    sandbox_type: type[DockerSandbox] = DockerSandbox
    exit_events: Mapping[str, Any] = EXIT_EVENTS

    # Four at once by default: with more, each takes longer and the total stays the same.
    def __init__(
        self,
        owner: str,
        *,
        network: str = DEFAULT_NETWORK,
        runtime: str | None = None,
        at_once: int = 4,
        engine: Engine | None = None,
        max_sandboxes: int = 1,
    ) -> None:
        super().__init__(owner)
        self.network = network
        self.runtime = runtime
        self._max_sandboxes = max_sandboxes
        self.engine = engine or Engine()
        self._events = EventWatch(self.engine, self.exit_events)
        self._openings = CapacityLimiter(at_once)
        self._removals = CapacityLimiter(at_once)
        # Not the engine's own, all of which may be occupied by archives while a removal's clock runs.
        self._removal_threads = CapacityLimiter(math.inf)
        # Whether the last removal reached its time limit.
        self._silent = False

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self._tasks.start_soon(run_for_ever, self._events.run)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        with CancelScope(shield=True):
            await self.engine.aclose()

    @property
    def is_available(self) -> bool:
        return not self._events.engine_is_gone

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return self.network == "host" and spec.network != "none"

    async def environment(self, image: str | None) -> str | None:
        if image is None:
            return None
        try:
            return (await self.engine.run(lambda api: find_image(api, image))).digest
        except (ImageError, ProviderUnavailableError, APIError):
            return None

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[DockerSandbox]:
        self._check_name(spec.name)
        await self.engine.api()
        # Until then it is opened again if the engine restarts meanwhile.
        deadline = anyio.current_time() + (RESTART_SECONDS if spec.survives else 0)
        async with AsyncExitStack() as stack:
            while True:
                async with AsyncExitStack() as attempt:
                    container = Container(self._owner, spec, network=self.network, runtime=self.runtime)
                    try:
                        sandbox = await self._enter(attempt, container, container.open)
                    except ProviderUnavailableError as error:
                        # Before the attempt ends, which removes the container that it may have created.
                        await self.engine.wait_for_restart(error, deadline)
                        continue
                    await stack.enter_async_context(attempt.pop_all())
                    break
            yield sandbox

    @asynccontextmanager
    async def reattach(self, owner: str, spec: SandboxSpec) -> AsyncGenerator[DockerSandbox]:
        self._check_name(spec.name)
        container = Container(owner, spec, network=self.network, runtime=self.runtime, exists=True)

        def reattach(api: Api) -> None:
            try:
                container.reattach(api)
            except APIError as error:
                raise refusal(error) from error

        async with AsyncExitStack() as stack:
            try:
                sandbox = await self._enter(stack, container, reattach)
            except ProviderUnavailableError:
                # Whether it still runs can be asked later.
                container.leave_running = True
                raise
            yield sandbox

    async def _enter(
        self, stack: AsyncExitStack, container: Container, begin: Callable[[Api], None]
    ) -> DockerSandbox:
        """The sandbox of a container that `begin` opens or reattaches; `stack` then ends it."""
        name = container.spec.name
        sandbox: DockerSandbox | None = None

        async def close_stream() -> None:
            try:
                if sandbox is not None:
                    await sandbox.stream.aclose()
            finally:
                container.close_socket()  # cancelled between its attachment and the stream

        container_exit = stack.enter_context(self._events.following(container.owner, name))
        # The stream is closed last: its end would make the engine remove the container by itself, which
        # nobody waits for.
        stack.push_async_callback(run_alone, close_stream)
        self._open_names.add(name)
        stack.push_async_callback(self._remove, container)
        await self.engine.api()
        # An exit before the events are followed would have no cause.
        with anyio.move_on_after(1):
            await self._events.listening.wait()
        async with self._openings:
            await self.engine.run(begin)
        container_exit.started = True
        sandbox = self.sandbox_type(self.engine, container, container_exit)
        stack.callback(sandbox.mark_closed)
        return sandbox

    async def _remove(self, container: Container) -> None:
        """Remove a container, with retries, in bounded time, even if the caller is cancelled."""
        await finish(self._tasks, lambda: self._remove_with_retries(container))

    async def _remove_with_retries(self, container: Container) -> None:
        name, remaining_seconds = container.spec.name, REMOVE_SECONDS
        try:
            for pause_seconds in (*REMOVE_RETRY_SECONDS, 0):
                if container.leave_running:
                    return
                async with self._removals:
                    started_at = anyio.current_time()
                    if await self._try_to_remove(container.remove, remaining_seconds, sandbox=name):
                        return
                    remaining_seconds -= anyio.current_time() - started_at
                if remaining_seconds <= 0 or self._silent:
                    break
                await anyio.sleep(pause_seconds)
            _log.error("A container was left behind", extra=fields(sandbox=name))
        finally:
            # Also if it failed: then the next sweep tries again.
            self._open_names.discard(name)

    async def _try_to_remove(
        self, remove: Callable[[Api], None], limit_seconds: float, **described: str
    ) -> bool:
        reason = ""
        limit_seconds = min(limit_seconds, REMOVE_SILENT_SECONDS) if self._silent else limit_seconds
        with anyio.move_on_after(limit_seconds) as scope:
            try:
                await self.engine.run(remove, abandon=True, limiter=self._removal_threads)
            except APIError as error:
                reason = engine_message(error)
            except Exception as error:  # noqa: BLE001  (tried again, whatever it is)
                reason = str(error) or type(error).__name__
        self._silent = scope.cancelled_caught
        if not self._silent and not reason:
            return True
        reason = reason or f"no answer within {limit_seconds:.0f} s"
        _log.warning("A container could not be removed", extra=fields(**described, why=reason))
        return False

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        containers = await containers_of(self.engine, owner)
        spared = {*self._open_names, *keep}
        orphans = {
            str(container["Id"])
            for container in containers
            if container["Labels"].get(SANDBOX_LABEL) not in spared
        }

        async def remove(container_id: str) -> bool:
            async with self._removals:
                return await self._try_to_remove(
                    lambda api: remove_container(api, container_id), REMOVE_SECONDS, id=container_id
                )

        return await remove_all(orphans, remove)

    async def check(self, image: str | None) -> list[Finding]:
        findings: list[Finding] = []
        deadline = anyio.current_time() + CHECK_SECONDS
        try:
            with limited_check(findings):
                await self._check(image, findings)
            if image is not None and findings[-1].ok:
                findings.append(await self._check_python(image, deadline))
        except ProviderUnavailableError as error:
            findings.append(Finding("engine", False, error.message, str(error.data.get("cure", ""))))
        except (DecathlonError, APIError) as error:
            findings.append(Finding("engine", False, str(error), "see the engine's own log"))
        return findings

    async def _check(self, image: str | None, findings: list[Finding]) -> None:
        """Everything but the image's Python. The last finding is about the image, if there is one."""
        findings += await self.engine.run(self.check_engine, abandon=True)
        if self.network != DEFAULT_NETWORK:
            findings.append(await self.engine.run(self.check_network, abandon=True))
        if image is None:
            return
        try:
            facts = await self.engine.run(lambda api: find_image(api, image), abandon=True)
        except ImageError:
            findings.append(Finding("image", False, f"{image} is not on this engine", install_hint(image)))
            return
        findings.append(Finding("image", True, f"{image}, {facts.size_bytes // 1_000_000} MB"))

    def check_engine(self, api: Api) -> list[Finding]:
        """Whether the engine that answers can be used. Runs in a thread."""
        version = Finding("engine", True, f"Docker {api.version().get('Version')} at {self.engine.address}")
        facts = api.info()
        limits = check_engine_limits(self._max_sandboxes, self.engine.address)
        return [
            version,
            *([] if limits is None else [limits]),
            *check_runtime(facts, self.runtime),
            *check_disk(facts),
        ]

    def check_network(self, api: Api) -> Finding:
        """Whether there is the network for sandboxes with outbound access. Runs in a thread."""
        try:
            network = api.inspect_network(self.network)
        except NotFound:
            cure = f"docker network create {self.network}"
            return Finding("network", False, f"the engine has no network {self.network}", cure)
        return Finding("network", True, f"{self.network}, {network['Driver']}")

    async def _check_python(self, image: str, deadline: float) -> Finding:
        # Not in the scope of the other checks: a container that is not ready in time is removed first, which
        # can take longer than the rest of their time, and they have passed.
        with anyio.CancelScope(deadline=min(deadline, anyio.current_time() + 1.5)):
            try:
                return await check_python(self.open, image, PYTHON_CURE)
            except ImageError as error:
                return Finding("python3", False, error.message, PYTHON_CURE)
        return Finding("python3", True, "not checked: the engine is busy")


async def containers_of(engine: Engine, owner: str) -> list[JsonObject]:
    """The containers of all sandboxes labelled with `owner`. Raises ProviderUnavailableError."""
    filters = {"label": f"{OWNER_LABEL}={owner}"}
    try:
        return await engine.run(lambda api: api.containers(all=True, filters=filters))
    except APIError as error:
        raise ProviderUnavailableError(f"the engine refused: {engine_message(error)}") from error


class EngineInventory:
    """Containers of some engines. `providers`: of one name, one for each; they open none, and are entered."""

    def __init__(self, providers: Sequence[DockerProvider]) -> None:
        (self.name,) = {provider.name for provider in providers}
        self._providers = providers

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        return {
            str(container["Labels"].get(SANDBOX_LABEL)): container["State"] in LIVING_STATES
            for provider in self._providers
            for container in await containers_of(provider.engine, owner)
        }

    async def owners(self) -> set[str]:
        return set()  # what else is on the engine can belong to servers on other state folders

    async def remove(self, owner: str) -> None:
        for provider in self._providers:
            await provider.sweep(owner)


@asynccontextmanager
async def engine_inventory(*providers: DockerProvider) -> AsyncGenerator[EngineInventory]:
    """The containers of the engines of these providers. Raises ProviderUnavailableError if one is silent."""
    async with AsyncExitStack() as stack:
        for provider in providers:
            await stack.enter_async_context(provider)
            await provider.engine.api()
        yield EngineInventory(providers)


@asynccontextmanager
async def inventory(state: Path) -> AsyncGenerator[EngineInventory]:
    """The containers of the engine that DOCKER_HOST names."""
    async with engine_inventory(DockerProvider("gc")) as found:
        yield found


class DockerOptions(BaseModel):
    """See `ProviderPlugin.options`."""

    network: Annotated[str, Field(min_length=1)] = Field(
        DEFAULT_NETWORK,
        description="network of sandboxes with outbound access, by default a bridge network on which they "
        "cannot reach each other",
    )
    runtime: Annotated[str, Field(min_length=1)] | None = Field(
        None, description="runtime by its name in the engine, such as `runsc`, by default the engine's"
    )


def create(context: ProviderContext[DockerOptions]) -> DockerProvider:
    """The provider of one server."""
    settings = context.settings
    return DockerProvider(
        context.owner,
        network=context.options.network,
        runtime=context.options.runtime,
        at_once=context.max_opening,
        max_sandboxes=settings.max_sandboxes,
    )


def offer(context: ProviderContext[DockerOptions], image: str | None) -> Offer:
    """See `ProviderPlugin.offer`."""
    is_shared = context.options.network == "host"
    return Offer(shared_network="leave out --provider-option network=host" if is_shared else "")


PROVIDER = ProviderPlugin(
    create, inventory=inventory, options=DockerOptions, offer=offer, service_images=images_on_engine
)
