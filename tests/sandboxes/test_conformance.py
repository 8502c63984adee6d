"""Every provider, the fake included, passes the conformance checks."""

from __future__ import annotations

from typing import Any

import pytest

from decathlon_mcp.errors import LimitExceededError
from decathlon_mcp.plugins.conformance import conformance
from decathlon_mcp.plugins.conformance.conformance import (
    Check,
    checks_for,
    file_copies,
    first_processes,
    opening,
    snapshots,
    survival,
)
from tests.sandboxes.conftest import Bench, fake_bench

pytestmark = pytest.mark.anyio

SLOW = {
    opening.cancelled_opening_leaves_nothing,
    opening.cancelled_task_leaves_nothing,
    survival.cancelled_reattaching_leaves_nothing,
    file_copies.ten_thousand_files_and_a_large_one_survive_a_round_trip,
    snapshots.ten_copies_and_the_original_do_not_see_each_other,
    snapshots.cancelled_saving_and_opening_leave_nothing,
    snapshots.killed_server_leaves_whole_snapshots_only,
}
OF_NETWORKS = (
    opening.cancelled_opening_leaves_nothing,
    survival.sandbox_that_was_reattached_is_removed_at_its_exit,
    survival.sandbox_that_does_not_survive_ends_with_its_server,
    survival.sweep_keeps_the_sandboxes_that_it_is_given,
)
"""A network has a process of its own, which has to be removed with the sandbox, whenever that is."""
OF_IMAGES = {opening.__name__, file_copies.__name__}
"""Modules of checks. How processes run and are reattached, an image does not change, but for their limits."""
LIMITS = (
    first_processes.memory_over_the_limit_is_the_cause_of_end,
    first_processes.number_of_processes_is_limited,
    first_processes.missing_program_is_an_error_and_leaves_nothing,
)


def quick(checks: tuple[Check, ...]) -> tuple[Check, ...]:
    """Without those that are slow, but for one that is cancelled at each moment."""
    return tuple(c for c in checks if c not in SLOW or c is opening.cancelled_opening_leaves_nothing)


PROVIDERS: dict[str, tuple[Check, ...]] = {
    "fake": quick(checks_for(runs_commands=False)),
    "plain": tuple(c for c in quick(checks_for()) if c.__module__ != file_copies.__name__),
    "image": tuple(c for c in checks_for() if c.__module__ in OF_IMAGES or c in LIMITS),
    "gvisor": checks_for(snapshots=True),
    # The slow ones are about code that it shares with images.
    "namespaces": tuple(check for check in checks_for() if check not in SLOW),
    "networked": OF_NETWORKS,
    "docker": checks_for(),
}
NEEDS_AN_ENGINE = ("image", "gvisor", "docker")
"""For those with an unpacked image, it comes from one."""


def cases() -> list[Any]:
    return [
        pytest.param(
            kind,
            check,
            id=f"{kind}-{check.__name__}",
            marks=[pytest.mark.docker] * (kind in NEEDS_AN_ENGINE) + [pytest.mark.slow] * (check in SLOW),
        )
        for kind, checks in PROVIDERS.items()
        for check in checks
    ]


@pytest.mark.parametrize(("bench", "check"), cases(), indirect=["bench"])
async def test_provider_conforms(bench: Bench, check: Check) -> None:
    await check(bench)


async def test_failed_checks_are_reported_by_name(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def passing(target: conformance.ProviderUnderTest) -> None: ...

    async def failing(target: conformance.ProviderUnderTest) -> None:
        raise LimitExceededError("too large")

    monkeypatch.setattr(conformance, "checks", {passing: (), failing: ()})
    bench = fake_bench("owner", tmp_path)
    failures = await conformance.failed_checks(bench)
    assert {name: str(error) for name, error in failures.items()} == {"failing": "too large"}
