"""What is run against what: every suite at every address that speaks its revision."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.conformance.suites import Package

Address = Literal["fixture", "task", "episode", "lobby"]


@dataclass(frozen=True, slots=True)
class Run:
    """One suite at one address; the `name` is what `expected.yaml` calls it.

    `scenarios` is how many there are, each of which must have left a result; `passes` is the least number of
    checks that must pass: a suite can be content with a server that does not answer.
    """

    name: str
    address: Address
    package: Package
    arguments: tuple[str, ...]
    scenarios: int
    passes: int


def runs(address: Address, passes: dict[str, int]) -> list[Run]:
    """The runs at an address, one for each revision in `passes`."""
    suites: dict[str, tuple[Package, tuple[str, ...], int]] = {
        "old": ("conformance-0.1", ("--suite", "all"), 32),
        "2025-11-25": ("conformance-0.2", ("--requirements", "2025-11-25"), 33),
        "2026-07-28": ("conformance-0.2", ("--requirements", "2026-07-28"), 50),
    }
    return [
        Run(f"{address}-{suite}", address, *suites[suite], passes=least) for suite, least in passes.items()
    ]


RUNS = (
    *runs("fixture", {"old": 32, "2025-11-25": 69, "2026-07-28": 129}),
    # A task's address has the revisions with a handshake only.
    *runs("task", {"old": 21, "2025-11-25": 58}),
    *runs("episode", {"old": 21, "2025-11-25": 58, "2026-07-28": 108}),
    *runs("lobby", {"old": 8, "2025-11-25": 42, "2026-07-28": 85}),
)
