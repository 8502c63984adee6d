"""Whether this machine is ready: one list for `doctor`, `serve`, `regrade` and `tasks --check`."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from importlib.util import find_spec

import anyio.to_thread
from rich.text import Text

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import MissingProgram
from decathlon_mcp.cli.merging import check_merging
from decathlon_mcp.cli.packages import check_packages
from decathlon_mcp.cli.suite_probe import probe_suite
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.base import Finding, finding
from decathlon_mcp.sandboxes.kernel_limits import check_kernel_limits
from decathlon_mcp.suites.loading import STARTER
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.telemetry.logs import fields

STARTER_SERVERS = {"excel": "excel_mcp", "git": "mcp_server_git"}
"""Modules of the extra `starter` by the names of the MCP servers that need them."""
STARTER_CURE = "in the clone: pip install '.[server,starter]', which also brings the `mcp` that they need"

log = logging.getLogger("decathlon.cli")


async def check_readiness(
    catalogue: Catalogue, factories: Mapping[str, SandboxFactory], max_sandboxes: int
) -> AsyncGenerator[Finding]:
    """Check the machine, the providers of these sandboxes, and the suites inside of them. Never raises.

    A provider takes at most 3 s, a suite usually a second. The programs that a suite's sandboxes lack are
    recorded in the catalogue.
    """
    yield check_kernel_limits(max_sandboxes)
    yield await anyio.to_thread.run_sync(check_packages)
    can_open: dict[tuple[str, str | None], bool] = {}
    for factory in factories.values():
        place = (factory.provider.name, factory.image)
        if place not in can_open:
            results = await _check_provider(factory)
            can_open[place] = all(result.ok or not result.required for result in results)
            for result in results:
                yield replace(result, what=f"{factory.provider.name} {result.what}")
        if factory.suite.path != STARTER:
            async for result in probe_suite(factory, catalogue, can_open=can_open[place]):
                yield result
        elif factory.image is None:  # the tasks' servers are this machine's programs
            yield _check_starter_servers(factory.suite, catalogue)


async def _check_provider(factory: SandboxFactory) -> list[Finding]:
    findings = await factory.provider.check(factory.image)
    if factory.dense and all(result.ok for result in findings):
        findings += await check_merging(factory.provider, factory.image, factory.suite.profile.root)
    return findings


def _check_starter_servers(suite: Suite, catalogue: Catalogue) -> Finding:
    absent = {name: module for name, module in STARTER_SERVERS.items() if find_spec(module) is None}
    # Their newest versions need mcp 2.2 and 2.3. With an older one tasks that need them cannot be started.
    programs = {
        name: MissingProgram(module, downloadable=False, cure=STARTER_CURE) for name, module in absent.items()
    }
    catalogue.record_missing_programs(suite, programs)
    return finding(
        "starter servers",
        not absent,
        f"not installed: {', '.join(absent.values())}" if absent else ", ".join(STARTER_SERVERS.values()),
        STARTER_CURE,
        required=False,
    )


async def require_ready(registry: EpisodeRegistry, max_sandboxes: int) -> None:
    """Log what is wrong on this machine; raise ProviderUnavailableError if no server can work here."""
    async with aclosing(_problems(registry, max_sandboxes)) as problems:
        async for problem in problems:
            if problem.required and not problem.ok:
                raise ProviderUnavailableError(problem.sentence)
            _log(problem)


async def log_problems(registry: EpisodeRegistry, max_sandboxes: int) -> None:
    """Log what is wrong on this machine, for a server that continues in any case."""
    async for problem in _problems(registry, max_sandboxes):
        _log(problem)


async def _problems(registry: EpisodeRegistry, max_sandboxes: int) -> AsyncGenerator[Finding]:
    factories = {suite.name: registry.factory(suite.name) for suite in registry.catalogue.suites}
    async for result in check_readiness(registry.catalogue, factories, max_sandboxes):
        if result.is_problem:
            yield result


def _log(problem: Finding) -> None:
    values = fields(what=problem.what, why=problem.detail, cure=problem.cure)
    log.warning("this machine has a problem", extra=values)


def format_finding(result: Finding) -> Text:
    """One finding for a terminal: its mark, its detail, and below it what to do."""
    first, *details = result.detail.splitlines()
    mark = ("✗   ", "bold red")
    if result.ok:
        mark = ("!   ", "bold yellow") if result.is_problem else ("ok  ", "green")
    text = Text.assemble(mark, (f"{result.what}: ", "bold"), first)
    for detail in details:
        text.append(f"\n      {detail}", "dim")
    if result.cure and result.cure not in result.detail:
        text.append(f"\n    → {result.cure}", "yellow")
    return text
