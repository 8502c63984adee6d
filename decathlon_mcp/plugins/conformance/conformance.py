"""Checks that every provider of sandboxes must pass.

Each check is a coroutine that takes a `ProviderUnderTest` and raises AssertionError, or whatever the provider
raised, if it fails. They need no test framework:

    async with provider:
        failures = await failed_checks(ProviderUnderTest(provider=provider, ...))

With pytest, one test for each check:

    @pytest.mark.parametrize("check", checks_for(), ids=lambda check: check.__name__)
    async def test_provider_conforms(check: Check, target: ProviderUnderTest) -> None:
        await check(target)

The checks run on asyncio, since one of them cancels a task the way asyncio does. Every check has a time limit
of its own (TimeoutError). All of them together take one to two minutes with containers.
"""

from __future__ import annotations

from collections.abc import Mapping

from decathlon_mcp.plugins.conformance import file_copies, first_processes, opening, snapshots, survival
from decathlon_mcp.plugins.conformance.target import (
    ROOT,
    Check,
    LastStep,
    Need,
    ProviderUnderTest,
    checks,
)
from decathlon_mcp.sandboxes.capabilities import snapshots_of

__all__ = [
    "ROOT",
    "Check",
    "LastStep",
    "ProviderUnderTest",
    "checks_for",
    "failed_checks",
    "file_copies",
    "first_processes",
    "opening",
    "snapshots",
    "survival",
]


def checks_for(
    *, runs_commands: bool = True, survives: bool = True, snapshots: bool = False
) -> tuple[Check, ...]:
    """The checks that apply.

    `snapshots`: see `sandboxes.capabilities`; the others are fields of `ProviderUnderTest`.
    """
    offers: dict[Need, bool] = {"commands": runs_commands, "survival": survives, "snapshots": snapshots}
    return tuple(check for check, needs in checks.items() if all(offers[need] for need in needs))


async def failed_checks(target: ProviderUnderTest) -> Mapping[str, Exception]:
    """Run all checks that apply; the errors of failed checks, by name. Empty if the provider conforms."""
    failures: dict[str, Exception] = {}
    saves = snapshots_of(target.provider) is not None
    for check in checks_for(runs_commands=target.runs_commands, survives=target.survives, snapshots=saves):
        try:
            await check(target)
        except Exception as error:  # noqa: BLE001  (reported, whatever it is)
            failures[check.__name__] = error
    return failures
