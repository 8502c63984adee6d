"""Whether what a server stands on is there, before it says that it is up."""

from __future__ import annotations

import logging

from decathlon_mcp.episodes import Episodes, look
from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.observe import fields
from decathlon_mcp.providers.base import Finding
from decathlon_mcp.suites import STARTER

log = logging.getLogger("decathlon.cli")


async def require_ready(episodes: Episodes) -> None:
    """Within 3 s a provider, and then what a checkout's servers lack where they would run.

    Raises ProviderUnavailableError saying what is missing and the cure.
    """
    await _require_providers(episodes)
    for suite in episodes.catalogue.suites:
        if suite.path != STARTER and (why := await look(episodes.stage(suite.name))):
            log.warning("not looked for the servers' programs", extra=fields(suite=suite.name, why=why))


async def _require_providers(episodes: Episodes) -> None:
    asked: set[tuple[str, str | None]] = set()
    for suite in episodes.catalogue.suites:
        stage = episodes.stage(suite.name)
        if (stage.provider.name, stage.image) in asked:
            continue
        asked.add((stage.provider.name, stage.image))
        for finding in await stage.provider.check(stage.image):
            if finding.ok:
                continue
            if finding.what in ("time", "disk"):
                log.warning(finding.detail, extra=fields(provider=stage.provider.name, cure=finding.cure))
            else:
                raise ProviderUnavailableError(sentence(finding))


def sentence(finding: Finding) -> str:
    """What is wrong and what to do about it."""
    if not finding.cure or finding.cure in finding.detail:
        return finding.detail
    return f"{finding.detail}; {finding.cure}"
