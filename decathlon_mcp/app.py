"""From settings to a running server's inside: suites read, providers opened, episodes ready to be started."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio.to_thread

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.pass_rates import read_pass_rates
from decathlon_mcp.catalogue.requirements import HostInfo
from decathlon_mcp.episodes.registry import EpisodeRegistry, running
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.sandboxes.base import Limits, Provider
from decathlon_mcp.sandboxes.docker.provider import DEFAULT_NETWORK, DockerProvider
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from decathlon_mcp.settings import ProviderName, Settings
from decathlon_mcp.storage.instance import forget, instance_lock
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")


def provider_for(suite: Suite, settings: Settings) -> ProviderName:
    """`local` for the starter suite; for a checkout `docker`, where `local` must be asked for by name."""
    return settings.provider or ("local" if suite.profile.name == "starter" else "docker")


def read_catalogue(settings: Settings) -> Catalogue:
    """All tasks of the suites that the settings name, with what is known of their difficulty.

    Raises SuiteError, SettingsError.
    """
    suites = [load_suite(where, settings.language) for where in settings.suite]
    pass_rates = read_pass_rates(settings.results) if settings.results else None
    return Catalogue(suites, pass_rates, host=HostInfo(has_network=settings.network != "none"))


@asynccontextmanager
async def bootstrap(settings: Settings) -> AsyncGenerator[EpisodeRegistry]:
    """Everything below the edge; on exit nothing of it is left.

    Raises SuiteError, SettingsError, ProviderUnavailableError.
    """
    catalogue = await anyio.to_thread.run_sync(read_catalogue, settings)
    async with AsyncExitStack() as house:
        # The names of folders below are episodes' handles: nobody else may list them.
        for folder in (settings.state, settings.state / "episodes"):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        owner, dead = house.enter_context(instance_lock(settings.state))
        scratch = settings.state / "scratch"
        scratch.mkdir(exist_ok=True, mode=0o700)
        archives = Path(house.enter_context(tempfile.TemporaryDirectory(prefix=f"{owner}-", dir=scratch)))
        providers: dict[ProviderName, Provider] = {}
        stages: dict[str, SandboxFactory] = {}
        for suite in catalogue.suites:
            name = provider_for(suite, settings)
            if name not in providers:
                providers[name] = await _open_provider(house, name, owner, settings)
            common = archives / f"{suite.name}.tar"
            await anyio.to_thread.run_sync(suite.common_archive, common)
            stages[suite.name] = _stage(suite, providers[name], common, settings)
        await _sweep(providers, dead, settings)
        yield await house.enter_async_context(running(catalogue, stages, settings, archives))


def _stage(suite: Suite, provider: Provider, common: Path, settings: Settings) -> SandboxFactory:
    return SandboxFactory(
        suite=suite,
        provider=provider,
        image=(settings.image or suite.profile.image) if provider.name == "docker" else None,
        names=settings.names or suite.profile.names,
        network=settings.network,
        limits=Limits(memory_mib=settings.memory_mib, cpus=settings.cpus, pids=settings.pids),
        common=common,
        cuts_overlong=suite.profile.cuts_overlong
        if settings.overlong is None
        else settings.overlong == "cut",
    )


async def _open_provider(
    house: AsyncExitStack, name: ProviderName, owner: str, settings: Settings
) -> Provider:
    if name == "local":
        return await house.enter_async_context(LocalProvider(owner, settings.state / "sandboxes"))
    network = settings.docker_network or DEFAULT_NETWORK
    return await house.enter_async_context(DockerProvider(owner, network=network))


async def _sweep(providers: dict[ProviderName, Provider], dead: list[str], settings: Settings) -> None:
    for name in dead:
        left = sum([await provider.sweep(name) for provider in providers.values()])
        if left:
            log.warning("swept what a server that died had left", extra=fields(sandboxes=left))
        for archives in (settings.state / "scratch").glob(f"{name}-*"):
            await anyio.to_thread.run_sync(lambda folder=archives: shutil.rmtree(folder, ignore_errors=True))
        forget(settings.state, name)
