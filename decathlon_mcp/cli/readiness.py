"""Readiness of this machine: one list of checks for `doctor`, `serve`, `regrade` and `tasks --check`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.sandboxes.base import Finding
from decathlon_mcp.sandboxes.machine_limits import check_kernel_limits
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.cli")


async def check_readiness(
    catalogue: Catalogue, factories: Mapping[str, SandboxFactory], max_sandboxes: int
) -> AsyncGenerator[Finding]:
    """Check the machine and the providers of these sandboxes, and what plug-ins check. Never raises.

    A provider takes at most 3 s. `factories`: by the name of their suite.
    """
    yield check_kernel_limits(max_sandboxes)
    can_open: dict[tuple[str, str | None], bool] = {}
    for factory in factories.values():
        place = (factory.provider.name, factory.image)
        if place not in can_open:
            results = await factory.provider.check(factory.image)
            can_open[place] = all(result.ok or not result.required for result in results)
            for result in results:
                yield replace(result, what=f"{factory.provider.name} {result.what}")
    openable = {name for name, factory in factories.items() if can_open[factory.provider.name, factory.image]}
    for part in (part for plugin in plugins() for part in plugin.readiness):
        async with aclosing(load(part)(catalogue, factories, openable)) as results:
            async for result in results:
                yield result


async def require_ready(registry: EpisodeRegistry, max_sandboxes: int, *, continues: bool = False) -> None:
    """Log what is wrong on this machine.

    Raises ProviderUnavailableError if no server can work here, unless the server `continues` in any case.
    """
    factories = {suite.name: registry.factory(suite.name) for suite in registry.catalogue.suites}
    async with aclosing(check_readiness(registry.catalogue, factories, max_sandboxes)) as results:
        async for result in results:
            if result.required and not (result.ok or continues):
                raise ProviderUnavailableError(result.sentence)
            if result.is_problem:
                values = fields(what=result.what, why=result.detail, cure=result.cure)
                log.warning("this machine has a problem", extra=values)
