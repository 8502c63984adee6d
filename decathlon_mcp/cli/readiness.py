"""Whether what a server stands on is there, before it says that it is up."""

from __future__ import annotations

import logging

from decathlon_mcp.episodes.program_probe import probe_programs
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.base import Finding
from decathlon_mcp.suites.loading import STARTER
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.cli")


async def require_ready(episodes: EpisodeRegistry) -> None:
    """Within 3 s a provider, and then what a checkout's servers lack where they would run.

    Raises ProviderUnavailableError saying what is missing and the cure.
    """
    await _require_providers(episodes)
    for suite in episodes.catalogue.suites:
        if suite.path != STARTER and (
            why := await probe_programs(episodes.sandbox_factory(suite.name), episodes.catalogue)
        ):
            log.warning("not looked for the servers' programs", extra=fields(suite=suite.name, why=why))


async def _require_providers(episodes: EpisodeRegistry) -> None:
    asked: set[tuple[str, str | None]] = set()
    for suite in episodes.catalogue.suites:
        sandbox_factory = episodes.sandbox_factory(suite.name)
        if (sandbox_factory.provider.name, sandbox_factory.image) in asked:
            continue
        asked.add((sandbox_factory.provider.name, sandbox_factory.image))
        for finding in await sandbox_factory.provider.check(sandbox_factory.image):
            if finding.ok:
                continue
            if finding.what in ("time", "disk"):
                log.warning(
                    finding.detail, extra=fields(provider=sandbox_factory.provider.name, cure=finding.cure)
                )
            else:
                raise ProviderUnavailableError(sentence(finding))


def sentence(finding: Finding) -> str:
    """What is wrong and what to do about it."""
    if not finding.cure or finding.cure in finding.detail:
        return finding.detail
    return f"{finding.detail}; {finding.cure}"
