"""Registers checks, each with a time limit of its own."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from typing import Any

import anyio

from decathlon_mcp.plugins.conformance.target import ProviderUnderTest

Check = Callable[[ProviderUnderTest], Coroutine[Any, Any, None]]
"""One check."""
checks: list[Check] = []
command_checks: list[Check] = []
survival_checks: list[Check] = []
snapshot_checks: list[Check] = []


def registered(
    *, seconds: float = 30, commands: bool = False, survival: bool = False, snapshots: bool = False
) -> Callable[[Check], Check]:
    """Register a check and give it a time limit.

    `commands`: it needs a provider that runs commands. `survival`: one whose sandboxes outlive their server.
    `snapshots`: one that runs commands, and whose sandboxes can be saved.
    """

    def decorate(check: Check) -> Check:
        @wraps(check)
        async def bounded(target: ProviderUnderTest) -> None:
            with anyio.fail_after(seconds):
                await check(target)

        (snapshot_checks if snapshots else command_checks if commands else checks).append(bounded)
        if survival:
            survival_checks.append(bounded)
        return bounded

    return decorate
