"""Composition root: builds everything below the protocol from the settings.

Nothing below this module takes `Settings`: each part gets the values it needs. This module must stay cheap to
import: `mcp.server` and starlette take about a second, so the command line imports them only after
`bootstrap`, and reports a missing engine without that delay.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio.to_thread

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import TaskSampler
from decathlon_mcp.catalogue.pass_rates import read_pass_rates
from decathlon_mcp.catalogue.requirements import HostInfo
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.limits import EpisodeLimits
from decathlon_mcp.episodes.registry import EpisodeRegistry, RegistryOptions
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.sandboxes.base import Limits, Provider
from decathlon_mcp.sandboxes.docker.provider import DEFAULT_NETWORK, DockerProvider
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from decathlon_mcp.settings import ProviderName, Settings
from decathlon_mcp.storage.disk import DiskSpace
from decathlon_mcp.storage.instance import InstanceLock, create_state_folder, instance_lock
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")


def provider_for(suite: Suite, settings: Settings) -> ProviderName:
    """The provider of a suite: as set, else `local` for the starter suite and `docker` for a checkout."""
    return settings.provider or ("local" if suite.profile.name == "starter" else "docker")


def read_catalogue(settings: Settings) -> Catalogue:
    """Read all tasks of the suites in the settings, and their pass rates.

    Raises SuiteError, SettingsError.
    """
    suites = [load_suite(where, settings.language) for where in settings.suite]
    pass_rates = read_pass_rates(settings.results) if settings.results else None
    return Catalogue(suites, pass_rates, host=HostInfo(has_network=settings.network != "none"))


@asynccontextmanager
async def bootstrap(settings: Settings) -> AsyncGenerator[EpisodeRegistry]:
    """Run a registry of episodes with its suites and providers; on exit nothing is left but the state folder.

    Raises SuiteError, SettingsError, ProviderUnavailableError.
    """
    catalogue = await anyio.to_thread.run_sync(read_catalogue, settings)
    create_state_folder(settings.state)
    names = {provider_for(suite, settings) for suite in catalogue.suites}
    async with AsyncExitStack() as stack:
        lock = stack.enter_context(instance_lock(settings.state, names))
        parent = settings.state / "scratch"
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{lock.name}-", dir=parent)))
        factories: dict[str, SandboxFactory] = {}
        providers: dict[ProviderName, Provider] = {}
        for suite in catalogue.suites:
            name = provider_for(suite, settings)
            if name not in providers:
                providers[name] = await stack.enter_async_context(_create_provider(name, lock.name, settings))
            common = scratch / f"{suite.name}.tar"
            await anyio.to_thread.run_sync(suite.common_archive, common)
            factories[suite.name] = create_sandbox_factory(suite, providers[name], common, settings)
        await _sweep(lock, providers.values(), settings.state)
        registry = create_registry(catalogue, factories, settings, scratch)
        yield await stack.enter_async_context(registry.running())


def create_sandbox_factory(
    suite: Suite, provider: Provider, common: Path, settings: Settings
) -> SandboxFactory:
    """The sandboxes of one suite. `common`: the suite's common archive."""
    cuts_overlong = suite.profile.cuts_overlong if settings.overlong is None else settings.overlong == "cut"
    return SandboxFactory(
        suite=suite,
        provider=provider,
        image=(settings.image or suite.profile.image) if provider.name == "docker" else None,
        tool_names=settings.names or suite.profile.names,
        network=settings.network,
        limits=Limits(memory_mib=settings.memory_mib, cpus=settings.cpus, pids=settings.pids),
        common=common,
        common_digest=suite.common_digest(),
        cuts_overlong=cuts_overlong,
        reply_bytes=settings.max_reply_mib << 20,
    )


def create_registry(
    catalogue: Catalogue, factories: Mapping[str, SandboxFactory], settings: Settings, scratch: Path
) -> EpisodeRegistry:
    """A registry that is not running yet. Raises SettingsError if the signing key cannot be used."""
    limits = EpisodeLimits(
        idle_seconds=settings.idle_seconds,
        first_use_seconds=settings.first_use_seconds,
        grace_seconds=settings.grace_seconds,
        episode_seconds=settings.episode_seconds,
        servers_seconds=settings.servers_seconds,
        preprocess_seconds=settings.preprocess_seconds,
        set_up_seconds=settings.set_up_seconds,
        evaluation_seconds=settings.evaluation_seconds,
        workspace_bytes=settings.workspace_mib << 20,
        max_calls=settings.max_calls,
    )
    return EpisodeRegistry(
        catalogue,
        TaskSampler(catalogue),
        factories,
        admission=Admission(
            max_sandboxes=settings.max_sandboxes,
            max_opening=settings.max_opening,
            max_queue=settings.max_queue,
            share_per_token=settings.share_per_token,
        ),
        signer=Signer.at(settings.state),
        options=RegistryOptions(
            reward_policy=settings.reward,
            limits=limits,
            drain_seconds=settings.drain_seconds,
            journals=settings.state / "episodes",
            scratch=scratch,
            disk=DiskSpace(settings.state, settings.min_free_mib << 20),
            max_log_bytes=settings.max_log_mib << 20,
            max_sessions=settings.max_sessions,
            keeps_workspace=settings.keep == "workspace",
        ),
    )


def _create_provider(name: ProviderName, owner: str, settings: Settings) -> Provider:
    if name == "local":
        return LocalProvider(owner, settings.state / "sandboxes")
    return DockerProvider(owner, network=settings.docker_network or DEFAULT_NETWORK)


async def _sweep(lock: InstanceLock, providers: Collection[Provider], state: Path) -> None:
    """Remove the sandboxes and archives of the dead servers that this server has taken over."""
    for owner in lock.dead:
        count = sum([await provider.sweep(owner) for provider in providers])
        if count:
            log.warning("removed the sandboxes of a server that died", extra=fields(sandboxes=count))
        for scratch in (state / "scratch").glob(f"{owner}-*"):
            await anyio.to_thread.run_sync(lambda folder=scratch: shutil.rmtree(folder, ignore_errors=True))
        lock.forget(owner)
