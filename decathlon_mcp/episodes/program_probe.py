"""A look at where a suite's tasks would run: are the programs of their MCP servers there?"""

from __future__ import annotations

import secrets

import anyio

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.catalogue.requirements import parse_missing_programs, probe_command
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import DecathlonError

LOOK_SECONDS = 20.0


async def look(sandbox_factory: SandboxFactory, catalogue: Catalogue) -> str | None:
    """Let a sandbox without a network tell which programs are not there; why it could not, if so.

    What is not known is taken to be there.
    """
    with anyio.move_on_after(LOOK_SECONDS):
        try:
            await _look(sandbox_factory, catalogue)
        except DecathlonError as error:
            return error.message
        return None
    return f"it took longer than {LOOK_SECONDS:g} s"


async def _look(sandbox_factory: SandboxFactory, catalogue: Catalogue) -> None:
    async with sandbox_factory.open(f"look-{secrets.token_hex(6)}", "none") as (sandbox, driver):
        await sandbox.put(sandbox.root, sandbox_factory.common)
        said = await driver.run(
            probe_command(sandbox_factory.suite, root=sandbox.root),
            cwd=str(sandbox.root),
            timeout_seconds=LOOK_SECONDS,
        )
    where = (
        f"looked for in the image {sandbox_factory.image}"
        if sandbox_factory.image
        else "looked for on this machine"
    )
    catalogue.record_missing_programs(
        sandbox_factory.suite,
        parse_missing_programs(said.stdout, f"{where}; install it there, or name another with --image"),
    )
