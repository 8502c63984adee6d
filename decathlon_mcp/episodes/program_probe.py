"""Checks which programs of a suite's MCP servers are missing where its tasks would run."""

from __future__ import annotations

import secrets

import anyio

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import parse_missing_programs, probe_command
from decathlon_mcp.driver_client.archives import put_archive
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import DecathlonError

PROBE_SECONDS = 20.0


async def probe_programs(sandbox_factory: SandboxFactory, catalogue: Catalogue) -> str | None:
    """Run the suite's probe in a sandbox without a network and record the programs that are missing.

    Returns None, or the reason why the probe failed. After a failure no program counts as missing.
    """
    with anyio.move_on_after(PROBE_SECONDS):
        try:
            await _probe(sandbox_factory, catalogue)
        except DecathlonError as error:
            return error.message
        return None
    return f"it took longer than {PROBE_SECONDS:g} s"


async def _probe(sandbox_factory: SandboxFactory, catalogue: Catalogue) -> None:
    async with sandbox_factory.open(f"look-{secrets.token_hex(6)}", "none") as (sandbox, driver):
        await put_archive(sandbox, driver, sandbox.root, sandbox_factory.common)
        result = await driver.run(
            probe_command(sandbox_factory.suite, root=sandbox.root),
            cwd=str(sandbox.root),
            timeout_seconds=PROBE_SECONDS,
        )
    where = (
        f"looked for in the image {sandbox_factory.image}"
        if sandbox_factory.image
        else "looked for on this machine"
    )
    catalogue.record_missing_programs(
        sandbox_factory.suite,
        parse_missing_programs(result.stdout, f"{where}; install it there, or name another with --image"),
    )
