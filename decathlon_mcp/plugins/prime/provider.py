"""Opens sandboxes that are virtual machines of Prime Intellect's service, through its SDK.

The first process runs in a PID namespace inside the machine (`inside.py`), so that an agent cannot end it and
be taken for a failure of the service. Files go in and out in parts, and streams that were cut are reopened.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Collection
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Self

import anyio
import anyio.to_thread
from anyio import CancelScope, CapacityLimiter
from pydantic import BaseModel, Field

from decathlon_mcp.background import finish
from decathlon_mcp.errors import (
    DecathlonError,
    ImageError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.plugins.prime.prime_sdk import ENDED, Sdk
from decathlon_mcp.plugins.prime.sandbox import PrimeSandbox
from decathlon_mcp.sandboxes.base import (
    CHECK_SECONDS,
    BaseProvider,
    Finding,
    Isolation,
    LimitName,
    SandboxSpec,
    check_swept,
    finding,
)
from decathlon_mcp.sandboxes.plugins import ProviderContext, ProviderPlugin, provider_folder
from decathlon_mcp.telemetry.logs import fields

if TYPE_CHECKING:
    from prime_sandboxes import AsyncSandboxClient
    from prime_sandboxes import Sandbox as Facts

OWNER_LABEL, SANDBOX_LABEL = "decathlon-owner", "decathlon-sandbox"
PAGE = 100
MAX_PAGES = 100
BULK = 100
"""Sandboxes of one request, as many as the service takes."""
LIST_SECONDS = 30.0
"""How long a list of sandboxes may take that nobody waits for in an episode."""
REMOVE_SECONDS = 60.0
"""Limit on all tries to remove one sandbox. A sweep tries again."""
REMOVE_RETRY_SECONDS = (0.2, 1.0, 5.0, 10.0)
SEAL_SECONDS = 30.0
"""How long the service may take to apply the rule that a sandbox has no network."""
REOPEN_SECONDS = 120
"""Time without a stream after which a sandbox counts as lost, and its driver ends."""

_log = logging.getLogger(__name__)


class PrimeOptions(BaseModel):
    """See `ProviderPlugin.options`."""

    per_minute: Annotated[
        float,
        Field(ge=1, le=6000, description="largest number of sandboxes created in a minute, by default 60"),
    ] = 60
    lifetime_minutes: Annotated[
        int, Field(ge=1, le=24 * 60, description="age at which the service removes a sandbox, by default 360")
    ] = 360
    disk_gib: Annotated[
        float, Field(ge=1, le=1000, description="size of each sandbox's disk, by default 10")
    ] = 10
    region: Annotated[
        str | None, Field(description="where sandboxes run, by default the service's choice")
    ] = None


class PrimeProvider(BaseProvider):
    """Opens sandboxes labelled with `owner`. `folder` holds the SDK's file of tokens.

    The service removes every sandbox at its lifetime, also if no server is left. `per_minute` bounds the
    creations: above its own limit the service refuses, and the SDK waits without a sign.
    """

    name = "prime"
    isolation: Isolation = "container"
    unlimited: tuple[LimitName, ...] = ("pids",)

    def __init__(self, owner: str, folder: Path, options: PrimeOptions, *, at_once: int = 4) -> None:
        super().__init__(owner)
        self._folder = folder
        self._sdk = Sdk()
        self._options = options
        self._client: AsyncSandboxClient | None = None
        self._openings = CapacityLimiter(at_once)
        self._pause_seconds = 60 / options.per_minute
        self._next_creation = 0.0

    async def __aenter__(self) -> Self:
        await anyio.to_thread.run_sync(self._create_folder)
        self._client = self._sdk.client(self._folder / f"{self._owner}.json")
        return await super().__aenter__()

    def _create_folder(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = self._folder / f"{self._owner}.json"
        # The SDK writes tokens into it, readable by everybody if it creates it itself.
        os.close(os.open(file, os.O_CREAT | os.O_WRONLY, 0o600))
        file.write_text("{}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await super().__aexit__(kind, error, trace)
        with CancelScope(shield=True):
            await self.client.aclose()
            (self._folder / f"{self._owner}.json").unlink(missing_ok=True)

    @property
    def client(self) -> AsyncSandboxClient:
        assert self._client is not None, "the provider has not been entered"
        return self._client

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        return False

    async def environment(self, image: str | None) -> str | None:
        return None  # the service does not say which image a name is

    @asynccontextmanager
    async def open(self, spec: SandboxSpec) -> AsyncGenerator[PrimeSandbox]:
        self._check_name(spec.name)
        if spec.image is None:
            raise ImageError("the prime provider needs an image, and none is configured")
        creation: asyncio.Task[PrimeSandbox] | None = None
        self._open_names.add(spec.name)
        try:
            async with self._openings:
                await self._wait_for_turn()
                # A task of its own: a request that is cancelled may have created a sandbox.
                creation = asyncio.create_task(self._create(spec))
                sandbox = await asyncio.shield(creation)
            with self._sdk.errors(opening=True):
                await self.client.wait_for_creation(sandbox.id)
                if spec.network == "none":
                    await self._seal(sandbox.id)
            await sandbox.start()
            yield sandbox
        finally:
            if creation is None:
                self._open_names.discard(spec.name)
            else:
                await finish(self._tasks, lambda: self._remove(self._owner, spec.name, creation=creation))

    async def _create(self, spec: SandboxSpec) -> PrimeSandbox:
        """Ask for a sandbox. Raises what `open` raises."""
        request = self._sdk.request(
            name=f"decathlon-{spec.name}",
            docker_image=spec.image,
            cpu_cores=spec.limits.cpus or 2.0,
            memory_gb=(spec.limits.memory_mib or 4096) / 1024,
            labels=_labels(self._owner, spec.name),
            network_allowlist=[] if spec.network == "none" else None,
            idempotency_key=secrets.token_hex(16),
            timeout_minutes=self._options.lifetime_minutes,
            disk_size_gb=self._options.disk_gib,
            region=self._options.region,
        )
        with self._sdk.errors(opening=True):
            return PrimeSandbox(self._sdk, self.client, spec, (await self.client.create(request)).id)

    async def _seal(self, sandbox_id: str) -> None:
        """Wait until nothing can leave the sandbox. Raises ProviderUnavailableError."""
        policy = await self.client.get_network(sandbox_id)
        if policy.policy.allowlist != []:
            policy = await self.client.set_network(sandbox_id, deny=["*"])
        with anyio.move_on_after(SEAL_SECONDS):
            while policy.policy.allowlist != [] or not policy.applied:
                await anyio.sleep(0.2)
                policy = await self.client.get_network(sandbox_id)
            return
        raise ProviderUnavailableError("Prime did not apply the rule that a sandbox has no network")

    async def _wait_for_turn(self) -> None:
        now = anyio.current_time()
        turn = max(now, self._next_creation)
        self._next_creation = turn + self._pause_seconds
        await anyio.sleep(turn - now)

    @asynccontextmanager
    async def reattach(self, owner: str, spec: SandboxSpec) -> AsyncGenerator[PrimeSandbox]:
        self._check_name(spec.name)
        self._open_names.add(spec.name)
        sandbox: PrimeSandbox | None = None
        leave_running = False
        try:
            try:
                found = await self._find(owner, spec.name)
                if not found:
                    raise SandboxLostError(f"there is no sandbox named {spec.name} of this owner")
                sandbox = PrimeSandbox(self._sdk, self.client, spec, found[0].id)
                if found[0].status in ENDED or not spec.survives:
                    raise SandboxLostError("the sandbox has ended")
                await sandbox.reattach()
            except ProviderUnavailableError:
                leave_running = True
                raise
            yield sandbox
        finally:
            if leave_running:
                self._open_names.discard(spec.name)
            else:
                await finish(self._tasks, lambda: self._remove(owner, spec.name, sandbox))

    async def _remove(
        self,
        owner: str,
        name: str,
        sandbox: PrimeSandbox | None = None,
        *,
        creation: asyncio.Task[PrimeSandbox] | None = None,
    ) -> None:
        """Remove a sandbox, in bounded time. Never raises. `creation`: the request for it."""
        reason = "no answer"
        try:
            with anyio.move_on_after(REMOVE_SECONDS):
                if creation is not None:
                    with suppress(Exception):  # which the opening has raised
                        sandbox = await asyncio.shield(creation)
                if sandbox is not None:
                    await sandbox.release()
                for seconds in (*REMOVE_RETRY_SECONDS, 0):
                    try:
                        with self._sdk.errors():
                            # If the request was not answered, nobody knows the id.
                            found = await self._find(owner, name) if sandbox is None else [sandbox]
                            for each in found:
                                await self.client.delete(each.id)
                    except SandboxLostError:
                        return
                    except Exception as error:  # noqa: BLE001  (tried again, whatever it is)
                        reason = str(error) or type(error).__name__
                    else:
                        return
                    await anyio.sleep(seconds)
            _log.error("A sandbox was left behind", extra=fields(sandbox=name, why=reason))
        finally:
            self._open_names.discard(name)

    async def _find(self, owner: str, name: str | None = None) -> list[Facts]:
        """The sandboxes with these labels that have not been removed. Raises ProviderUnavailableError."""
        wanted = set(_labels(owner, name))
        found: list[Facts] = []
        with self._sdk.errors(opening=True):
            for page in range(1, MAX_PAGES + 1):
                listing = await self.client.list(
                    labels=sorted(wanted), page=page, per_page=PAGE, exclude_terminated=True
                )
                # Compared here too: whether the service matches all labels or any of them is not documented.
                found += [facts for facts in listing.sandboxes if wanted <= set(facts.labels)]
                if not listing.has_next:
                    break
        return found

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        spared = {f"{SANDBOX_LABEL}={name}" for name in {*self._open_names, *keep}}
        doomed = [facts.id for facts in await self._find(owner) if not spared & set(facts.labels)]
        removed: set[str] = set()
        with self._sdk.errors(opening=True):
            for start in range(0, len(doomed), BULK):
                answer = await self.client.bulk_delete(doomed[start : start + BULK])
                removed.update(answer.succeeded)
        check_swept(set(doomed) - removed)
        return len(doomed)

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        """See `Inventory`."""
        with anyio.move_on_after(LIST_SECONDS):
            return {_name_of(facts): facts.status not in ENDED for facts in await self._find(owner)}
        raise ProviderUnavailableError(f"Prime did not list its sandboxes within {LIST_SECONDS:g} s")

    async def owners(self) -> set[str]:
        """See `Inventory`."""
        return set()  # the account's other sandboxes can belong to servers on other state folders

    async def remove(self, owner: str) -> None:
        """See `Inventory`."""
        await self.sweep(owner)

    async def check(self, image: str | None) -> list[Finding]:
        key = bool(self.client.client.api_key)
        cure = "set PRIME_API_KEY, or log in with `prime login`"
        findings = [finding("key", key, "configured" if key else "no API key", cure)]
        if not key:
            return findings
        address = str(self.client.client.base_url)
        with anyio.move_on_after(CHECK_SECONDS) as scope:
            try:
                with self._sdk.errors(opening=True):
                    await self.client.list(labels=[OWNER_LABEL], per_page=1, exclude_terminated=True)
            except DecathlonError as error:
                return [
                    *findings,
                    Finding("service", False, error.message, "see https://status.primeintellect.ai"),
                ]
        if scope.cancelled_caught:
            return [*findings, Finding("service", False, f"no answer from {address} within 3 s", "try again")]
        findings.append(Finding("service", True, address))
        if image is None:
            findings.append(
                Finding("image", False, "none is configured", "name one that Prime can pull: --image")
            )
        return findings


def _labels(owner: str, name: str | None = None) -> list[str]:
    labels = [f"{OWNER_LABEL}={owner}"]
    return labels if name is None else [*labels, f"{SANDBOX_LABEL}={name}"]


def _name_of(facts: Facts) -> str:
    prefix = f"{SANDBOX_LABEL}="
    return next((label.removeprefix(prefix) for label in facts.labels if label.startswith(prefix)), facts.id)


def create(context: ProviderContext[PrimeOptions]) -> PrimeProvider:
    """The provider of one server. Raises SettingsError."""
    return PrimeProvider(context.owner, context.folder, context.options, at_once=context.max_opening)


@asynccontextmanager
async def inventory(state: Path) -> AsyncGenerator[PrimeProvider]:
    """The sandboxes of the account that is configured here.

    Raises SettingsError without the SDK, ProviderUnavailableError if the service does not answer.
    """
    owner = f"gc-{os.getpid()}"
    async with PrimeProvider(owner, provider_folder(state, PrimeProvider.name), PrimeOptions()) as provider:
        await provider.sandboxes(owner)  # has none: this asks whether the service answers
        yield provider


PROVIDER = ProviderPlugin(create, options=PrimeOptions, inventory=inventory, reopen_seconds=REOPEN_SECONDS)
