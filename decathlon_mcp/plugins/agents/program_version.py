"""Compares the version of a known agent program with the one whose own tools were checked."""

from __future__ import annotations

from collections.abc import Mapping

import anyio

from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.agents.configuration import configure
from decathlon_mcp.plugins.agents.launch import Launcher, TrustedLauncher
from decathlon_mcp.plugins.agents.presets import (
    PRESETS,
    VERSION_BYTES,
    VERSION_SECONDS,
    version_in,
)
from decathlon_mcp.plugins.agents.programs import Program

UNKNOWN = "unknown"


async def check_version(program: Program, launcher: Launcher, variables: Mapping[str, str]) -> str | None:
    """The version of a known program, asked where its attempts will run; None for another program.

    Warns of a version that was not checked, whose own tools may not all be off: in namespaces they reach
    nothing of this machine. Raises BadRequestError if they would, for a program that is trusted.
    """
    preset = PRESETS.get(program.name)
    if preset is None:
        return None
    version = await _ask(program, launcher, variables)
    if version == preset.version:
        return version
    what = f"{program.name} {version}" if version else f"{program.name}, which did not say its version,"
    checked = (
        f"its own tools were checked in {preset.version} (npm install -g {preset.package}@{preset.version})"
    )
    if isinstance(launcher, TrustedLauncher):
        raise BadRequestError(
            f"{what} may have tools of its own that act on this machine, outside of the task's sandbox: "
            f"{checked}. Install that version, or leave --trust-command out"
        )
    report(
        f"warning: {what} may offer its model tools of its own, which do not reach the task: {checked}. Look "
        "at what the model was offered before you compare rewards"
    )
    return version or UNKNOWN


async def _ask(program: Program, launcher: Launcher, variables: Mapping[str, str]) -> str | None:
    output = b""
    with anyio.move_on_after(VERSION_SECONDS), launcher.place() as place:
        configuration = configure(
            (program.command[0], "--version"),
            place.folders,
            address=place.address,
            prompt="",
            tool_seconds=VERSION_SECONDS,
            variables=variables,
        )
        async with launcher.start(place, configuration) as running:
            async for chunk in running.output:
                output += chunk
                if len(output) >= VERSION_BYTES:
                    break
    return version_in(output[:VERSION_BYTES])
