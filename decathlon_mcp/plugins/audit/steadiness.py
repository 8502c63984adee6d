"""Steadiness of verdicts: an attempt graded again, in another language and zone, on one processor, later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import anyio.to_thread

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.payloads import source
from decathlon_mcp.plugins.regrade.regrading import Regrader, read_kept
from decathlon_mcp.suites.suite import Suite

CLOCK_AHEAD_SECONDS = 400 * 86_400.0
SEED = "2718281828"
MAX_LINE = 200


@dataclass(frozen=True, slots=True)
class Variation:
    """One way in which a grading differs. `shim`: what `inside.py` changes, empty for nothing."""

    how: str
    shim: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def of(self, suite: Suite) -> Suite:
        """The suite with an evaluator that runs in this way."""
        if not self.shim:
            return suite
        before = ("-c", source("inside", __package__ or ""), json.dumps(dict(self.shim)))
        # Before a module's name in place of `-m`, and before the file of the rubric's harness.
        command = (*suite.profile.python, *before)
        return replace(suite, profile=replace(suite.profile, python=command, run_module=command))


VARIATIONS = (
    Variation(
        " in another language, time zone and hash seed",
        {
            "environment": {
                "LC_ALL": "tr_TR.UTF-8",
                "LANG": "tr_TR.UTF-8",
                "TZ": "Pacific/Kiritimati",
                "PYTHONHASHSEED": SEED,
            }
        },
    ),
    Variation(" on one processor", {"cpu": True}),
    Variation(" with folders in the reverse order of names", {"files": -1}),
    Variation(" with a clock that is 400 days ahead", {"seconds": CLOCK_AHEAD_SECONDS}),
    Variation(" with folders in the order of names", {"files": 1}),
)
"""Beside the attempt's own grading. They are for Python evaluators only."""
TOGETHER = Variation(
    " under other conditions, each of which alone changes nothing",
    {name: value for variation in VARIATIONS[:-1] for name, value in variation.shim.items()},
)
"""All but the last, which excludes the variation that reverses the order."""


@dataclass(frozen=True, slots=True)
class Unsteady:
    """A verdict that changed. `how`: how the attempt was graded again; `last_line`: of the evaluator's
    output then."""

    how: str
    before: str
    after: str
    last_line: str


async def find_unsteady(regrader: Regrader, folder: Path) -> Unsteady | None:
    """Grade a kept attempt as it was, and under other conditions; what gives another verdict.

    The conditions are together at first, and one by one if the verdict is another. Raises as
    `Regrader.regrade`.
    """
    kept = await anyio.to_thread.run_sync(read_kept, folder)
    before: str | None = None

    async def grade(variation: Variation) -> Unsteady | None:
        nonlocal before
        try:
            regraded = await regrader.regrade(folder, kept, variation.of)
        except OSError as error:
            raise DecathlonError(f"{error.filename or folder}: {error.strerror}") from error
        before = before or (None if regraded.before is None else _result_of(regraded.before))
        after = _result_of(regraded.after)
        if before is not None and before != after:
            return Unsteady(variation.how, before, after, _last_line(regraded.after))
        before = after
        return None

    for variation in (Variation(""), VARIATIONS[-1]):
        if (found := await grade(variation)) is not None:
            return found
    if (together := await grade(TOGETHER)) is None:
        return None
    for variation in VARIATIONS[:-1]:
        if (found := await grade(variation)) is not None:
            return found
    return together


def _last_line(verdict: Verdict) -> str:
    lines = (verdict.detail or verdict.uncaught or verdict.evaluator_output).splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")[:MAX_LINE]


def _result_of(verdict: Verdict) -> str:
    """What of a verdict must not change; metrics of the attempt itself never do."""
    if verdict.reward is None:
        return f"no verdict ({verdict.status})"
    return f"{verdict.reward:g}{'' if verdict.success else ', failed'}"
