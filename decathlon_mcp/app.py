"""Composition root: builds everything below the protocol from the settings.

Nothing below this module takes `Settings` but the providers' own parts (`sandboxes/plugins.py`): each part
gets the values it needs. This module must stay cheap to import: starlette and the front end take about a
second, so the command line imports them only after
`bootstrap`, and reports a missing engine without that delay.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from datetime import UTC
from pathlib import Path

import anyio
import anyio.to_thread

from decathlon_mcp.background import background_tasks, run_alone, run_for_ever
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.draws import TaskSampler
from decathlon_mcp.catalogue.pass_rates import read_pass_rates
from decathlon_mcp.catalogue.requirements import HostInfo
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.extensions import SandboxSource, create_web, suite_hooks
from decathlon_mcp.episodes.recovery import Recovery
from decathlon_mcp.episodes.registry import EpisodeRegistry, RegistryOptions
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory, open_ahead
from decathlon_mcp.episodes.specification import EpisodeLimits
from decathlon_mcp.episodes.tools.offered import ToolLists
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.events import Events, Spans
from decathlon_mcp.grading.fault import ProviderHealth
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.hooks import load, own_provider, plugins
from decathlon_mcp.sandboxes.base import Limits, Provider
from decathlon_mcp.sandboxes.machine_limits import (
    MERGING_FLOOR_MIB,
    MemoryFloor,
    max_sandboxes_beside,
    require_descriptors,
)
from decathlon_mcp.sandboxes.plugins import (
    Offer,
    ProviderPlugin,
    context_of,
    create_provider,
    default_provider,
    load_provider,
    offer_of,
    parse_options,
)
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.disk import DiskSpace, cure_of, is_full
from decathlon_mcp.storage.kept_tools import CachedLists
from decathlon_mcp.storage.lock import Server, create_state_folder, instance_lock, wait_for_stop
from decathlon_mcp.storage.store import Store
from decathlon_mcp.suites.loading import load_suite
from decathlon_mcp.suites.suite import Suite

log = logging.getLogger("decathlon.app")

STOP_SECONDS = 15.0
"""Time that a server needs to stop, beside what it waits for gradings."""


def provider_for(suite: Suite, settings: Settings) -> str:
    """The name of a suite's provider: as set, else the default of its kind."""
    is_starter = suite.profile.name == "starter"
    return settings.provider or default_provider(settings, is_starter=is_starter)


def image_for(suite: Suite, settings: Settings) -> str | None:
    """The image of a suite's sandboxes; None if its provider has none, or if no folder is configured.

    Raises SettingsError if the setting is not for the provider.
    """
    plugin = load_provider(provider_for(suite, settings))
    return plugin.image(settings, suite.profile.image, suite.profile.name == "starter")


def check_provider(settings: Settings) -> None:
    """Raises SettingsError for a provider that there is not, or for options that it does not take."""
    if settings.provider is not None:
        if settings.kernel is not None and not load_provider(settings.provider).has_kernels:
            raise SettingsError(
                f"--kernel {settings.kernel} is for --provider {own_provider()}, not {settings.provider}"
            )
        parse_options(settings.provider, settings.provider_option)
    elif settings.provider_option:
        raise SettingsError(
            f"--provider-option {settings.provider_option[0]}: name the provider that takes it: --provider"
        )


def host_info(suites: Iterable[Suite], settings: Settings) -> HostInfo:
    """What this server offers to the sandboxes of these suites. Blocks: it may ask the engine for images."""
    web = create_web(settings)
    suites = list(suites)
    names = {suite.name: provider_for(suite, settings) for suite in suites}
    kinds = {name: load_provider(name) for name in names.values()}
    offers = {
        suite.name: offer_of(names[suite.name], settings, image_for(suite, settings)) for suite in suites
    }
    without_network = {
        name: why for name, offer in offers.items() if (why := _why_no_network(offer, settings))
    }
    if settings.network == "outbound" and without_network:
        raise SettingsError(f"--network outbound: {next(iter(without_network.values()))}")
    return HostInfo(
        has_network=settings.network != "none",
        has_web=web is not None,
        missing_recording=None if web is None or web.reaches_sites else web.missing,
        recorded_launch_time=None if web is None else web.launch_time,
        without_network=without_network,
        varying_root=frozenset(name for name, offer in offers.items() if offer.varying_root),
        tool_names=settings.names,
        # Until a sandbox has been looked into: images have no other zone as a rule.
        zones={name: UTC for name, offer in offers.items() if offer.has_own_zone},
        service_images={
            suite.name: found(suite.service_images) if suite.service_images else frozenset()
            for suite in suites
            if (found := kinds[names[suite.name]].service_images) is not None
        },
    )


def _why_no_network(offer: Offer, settings: Settings) -> str:
    """Why no sandbox gets a network; empty if tasks that need a network get it."""
    if not offer.without_network and settings.tokens is None and offer.shared_network:
        return (
            "it would be this machine's own, in which an agent could reach this server, which has no tokens, "
            f"and let it evaluate guesses: {offer.shared_network}, or set --tokens"
        )
    return offer.without_network


def read_catalogue(settings: Settings) -> Catalogue:
    """Read all tasks of the suites in the settings, and their pass rates.

    Raises SuiteError, SettingsError.
    """
    return create_catalogue([load_suite(where, settings.language) for where in settings.suite], settings)


def create_catalogue(suites: Sequence[Suite], settings: Settings) -> Catalogue:
    """The tasks of these suites, their pass rates, and what this host offers. Raises as `read_catalogue`."""
    check_provider(settings)
    pass_rates = read_pass_rates(settings.results) if settings.results else None
    return Catalogue(suites, pass_rates, host=host_info(suites, settings))


@asynccontextmanager
async def bootstrap(
    settings: Settings, *, serves: bool = False, supervisor: int | None = None
) -> AsyncGenerator[EpisodeRegistry]:
    """Run a registry of episodes with its suites and providers; on exit nothing is left but the state folder.

    `serves`: this is the state folder's only `serve`; a later `serve` continues its episodes if it is killed.
    `supervisor`: the process that starts it again. Raises SuiteError, SettingsError,
    ProviderUnavailableError.
    """
    require_descriptors()
    catalogue = await anyio.to_thread.run_sync(read_catalogue, settings)
    create_state_folder(settings.state)
    names = {provider_for(suite, settings) for suite in catalogue.suites}
    kinds = {name: load_provider(name) for name in names}
    for name, kind in kinds.items():
        if kind.begin is not None:
            await anyio.to_thread.run_sync(kind.begin, context_of(name, "", settings))
    survives = serves and settings.survive_seconds > 0 and all(kind.survives for kind in kinds.values())
    server = Server.of_this_process(names, serves=serves, survives=survives, supervisor=supervisor)
    if serves:
        await wait_for_stop(settings.state, server, settings.drain_seconds + STOP_SECONDS)
    async with AsyncExitStack() as stack:
        lock = stack.enter_context(instance_lock(settings.state, server))
        database = stack.enter_context(Store.open(settings.state, lock.name))
        store = database if survives else None
        for plugin in plugins():
            if plugin.pass_rates:
                catalogue.live_rates = load(plugin.pass_rates)(database)
        reconnect = (
            ReconnectPolicy()
            if store is None
            else ReconnectPolicy.of_server(settings.survive_seconds, store.generation)
        )
        parent = settings.state / "scratch"
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"{lock.name}-", dir=parent)))
        if (web := create_web(settings)) is not None:
            await stack.enter_async_context(web.running())
        factories = await stack.enter_async_context(
            sandbox_factories(catalogue.suites, lock.name, settings, scratch)
        )
        providers = {factory.provider.name: factory.provider for factory in factories.values()}
        for name, factory in factories.items():
            tool_lists = create_tool_lists(factory, settings.state)
            factories[name] = replace(
                factory,
                reconnect=_reconnect(kinds[provider_for(factory.suite, settings)], reconnect),
                tool_lists=tool_lists,
                web=web,
            )
        registry = create_registry(
            catalogue,
            factories,
            settings,
            scratch,
            spans=await stack.enter_async_context(_spans(settings)),
            store=store,
            archive=None if survives else database,
            on_stop=lock.note_stop,
        )
        recovery = Recovery(registry, lock, [*providers.values()], scratch)
        stack.push_async_callback(run_alone, recovery.finish)
        await stack.enter_async_context(registry.running())
        await recovery.run()
        tasks = await stack.enter_async_context(background_tasks())
        tasks.start_soon(run_for_ever, recovery.reconcile)
        # Not earlier: the episodes of a dead server come first.
        tasks.start_soon(run_alone, open_ahead, registry.factories)
        tasks.start_soon(run_for_ever, database.maintain)
        for part in (part for plugin in plugins() for part in plugin.background):
            if (work := load(part)(settings, database)) is not None:
                tasks.start_soon(run_for_ever, work)
        yield registry


def _reconnect(plugin: ProviderPlugin, policy: ReconnectPolicy) -> ReconnectPolicy:
    """How connections to sandboxes of that provider continue, on a server with this setting."""
    return replace(policy, seconds=max(policy.seconds, plugin.reopen_seconds))


@asynccontextmanager
async def sandbox_factories(
    suites: Iterable[Suite], owner: str, settings: Settings, scratch: Path
) -> AsyncGenerator[dict[str, SandboxFactory]]:
    """The sandboxes of each suite, by its name, labelled with `owner`. Their archives are in `scratch`.

    Raises SettingsError.
    """
    factories: dict[str, SandboxFactory] = {}
    providers: dict[str, Provider] = {}
    health: dict[str, ProviderHealth] = {}
    async with AsyncExitStack() as stack:
        for suite in suites:
            name = provider_for(suite, settings)
            if name not in providers:
                provider = create_provider(name, owner, settings)
                providers[name] = await stack.enter_async_context(provider)
                health[name] = ProviderHealth(settings.max_sandboxes)
            common = scratch / f"{suite.name}.tar"
            await _write_common_archive(suite, common, settings.state)
            factories[suite.name] = create_sandbox_factory(
                suite, providers[name], common, settings, health[name]
            )
        yield factories


async def _write_common_archive(suite: Suite, archive: Path, state: Path) -> None:
    """Raises SettingsError if the state folder's disk is full."""
    try:
        await anyio.to_thread.run_sync(suite.common_archive, archive)
    except OSError as error:
        if not is_full(error):
            raise
        raise SettingsError(
            f"--state: {state} has no room for the files of suite {suite.name}: "
            f"{error.strerror}; {cure_of(error)}"
        ) from None


def create_sandbox_factory(
    suite: Suite,
    provider: Provider,
    common: Path,
    settings: Settings,
    health: ProviderHealth | None = None,
) -> SandboxFactory:
    """The sandboxes of one suite. `common`: the suite's common archive. `health`: of the provider.

    Raises SettingsError for a suite that needs a plug-in that is not installed.
    """
    return SandboxFactory(
        suite=suite,
        provider=provider,
        image=image_for(suite, settings),
        tool_names=settings.names or suite.profile.names,
        network=settings.network,
        limits=Limits(memory_mib=settings.memory_mib, cpus=settings.cpus, pids=settings.pids),
        common=common,
        common_digest=suite.common_digest(),
        merge_pages=settings.merge_pages,
        suite_hooks=suite_hooks(suite),
        servers=settings.servers,
        health=health or ProviderHealth(settings.max_sandboxes),
    )


def create_tool_lists(factory: SandboxFactory, state: Path) -> ToolLists:
    """The cache of tool lists of one suite."""
    return ToolLists(
        CachedLists(state),
        factory.suite,
        factory.provider,
        factory.image,
        factory.tool_names,
    )


@asynccontextmanager
async def _spans(settings: Settings) -> AsyncGenerator[Spans | None]:
    """The spans of the plug-in that has them. Raises SettingsError."""
    async with AsyncExitStack() as stack:
        made = (load(plugin.spans)(settings) for plugin in plugins() if plugin.spans)
        context = next((context for context in made if context is not None), None)
        yield None if context is None else await stack.enter_async_context(context)


def create_registry(
    catalogue: Catalogue,
    factories: Mapping[str, SandboxFactory],
    settings: Settings,
    scratch: Path,
    store: Store | None = None,
    archive: Store | None = None,
    spans: Spans | None = None,
    on_stop: Callable[[], None] = lambda: None,
) -> EpisodeRegistry:
    """A registry that is not running yet. Raises SettingsError if the signing key cannot be used."""
    limits = EpisodeLimits(
        idle_seconds=settings.idle_seconds,
        first_use_seconds=settings.first_use_seconds,
        grace_seconds=settings.grace_seconds,
        episode_seconds=settings.episode_seconds,
        servers_seconds=settings.servers_seconds,
        set_up_seconds=settings.set_up_seconds,
        evaluation_seconds=settings.evaluation_seconds,
        workspace_bytes=settings.workspace_mib << 20,
        max_calls=settings.max_calls,
    )
    found = plugins()
    listeners = [load(part)(settings, catalogue) for plugin in found for part in plugin.listeners]
    events = Events([*listeners, *([] if spans is None else [spans])])
    admission = Admission(
        max_sandboxes=settings.max_sandboxes,
        max_opening=settings.max_opening,
        max_queue=settings.max_queue,
        memory=MemoryFloor((MERGING_FLOOR_MIB if settings.merge_pages else 0) << 20),
        room=lambda: max_sandboxes_beside(events.open_connections),
    )
    options = RegistryOptions(
        reward_policy=settings.reward,
        limits=limits,
        drain_seconds=settings.drain_seconds,
        journals=settings.state / "episodes",
        scratch=scratch,
        disk=DiskSpace(settings.state, settings.min_free_mib << 20),
    )
    made = (load(plugin.sandbox_source)(settings, admission) for plugin in found if plugin.sandbox_source)
    source = next((source for source in made if source is not None), SandboxSource())
    hooks = [load(part)(settings, options, factories) for plugin in found for part in plugin.episodes]
    return EpisodeRegistry(
        catalogue,
        TaskSampler(catalogue),
        {name: replace(factory, source=source, events=events) for name, factory in factories.items()},
        admission=admission,
        source=source,
        signer=Signer.at(settings.state),
        options=replace(options, hooks=[hook for hook in hooks if hook is not None]),
        events=events,
        spans=spans,
        store=store,
        archive=archive,
        on_stop=on_stop,
    )
