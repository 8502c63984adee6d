"""Checks that every provider of sandboxes must pass.

Each check is a coroutine that takes a `ProviderUnderTest` and raises AssertionError, or whatever the provider
raised, if it fails. They need no test framework:

    async with provider:
        failures = await failed_checks(ProviderUnderTest(provider=provider, ...))

With pytest, one test for each check:

    @pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
    async def test_provider_conforms(check: Check, target: ProviderUnderTest) -> None:
        await check(target)

The checks run on asyncio, since one of them cancels a task the way asyncio does. Every check has a time limit
of its own (TimeoutError). All of them together take one to two minutes with containers.
"""

from __future__ import annotations

from collections.abc import Mapping

from decathlon_mcp.plugins.conformance import (
    files,
    opening,
    processes,
    snapshots,
    survival,
)
from decathlon_mcp.plugins.conformance.target import (
    PROBE_COMMAND,
    ROOT,
    Check,
    LastStep,
    ProviderUnderTest,
    checks,
    command_checks,
    snapshot_checks,
    survival_checks,
)
from decathlon_mcp.sandboxes.capabilities import snapshots_of

__all__ = [
    "ALL_CHECKS",
    "CHECKS",
    "COMMAND_CHECKS",
    "PROBE_COMMAND",
    "ROOT",
    "SNAPSHOT_CHECKS",
    "SURVIVAL_CHECKS",
    "Check",
    "LastStep",
    "ProviderUnderTest",
    "checks_for",
    "failed_checks",
    "files",
    "opening",
    "processes",
    "snapshots",
    "survival",
]

CHECKS: tuple[Check, ...] = tuple(checks)
"""Checks for every provider."""
COMMAND_CHECKS: tuple[Check, ...] = tuple(command_checks)
"""Checks for providers whose sandboxes run any command, which is all but fakes."""
ALL_CHECKS: tuple[Check, ...] = CHECKS + COMMAND_CHECKS
SNAPSHOT_CHECKS: tuple[Check, ...] = tuple(snapshot_checks)
"""Checks for providers whose sandboxes can be saved."""
SURVIVAL_CHECKS = frozenset(survival_checks)
"""Checks whose sandboxes must outlive their server."""


def checks_for(
    *, runs_commands: bool = True, survives: bool = True, snapshots: bool = False
) -> tuple[Check, ...]:
    """The checks that apply.

    `snapshots`: see `sandboxes.capabilities`; the others are fields of `ProviderUnderTest`.
    """
    return tuple(
        check
        for check in (
            *(ALL_CHECKS if runs_commands else CHECKS),
            *(SNAPSHOT_CHECKS if snapshots else ()),
        )
        if survives or check not in SURVIVAL_CHECKS
    )


async def failed_checks(target: ProviderUnderTest) -> Mapping[str, Exception]:
    """Run all checks that apply; the errors of failed checks, by name. Empty if the provider conforms."""
    failures: dict[str, Exception] = {}
    snapshots = snapshots_of(target.provider) is not None
    for check in checks_for(
        runs_commands=target.runs_commands, survives=target.survives, snapshots=snapshots
    ):
        try:
            await check(target)
        except Exception as error:  # noqa: BLE001  (reported, whatever it is)
            failures[check.__name__] = error
    return failures
