"""Measured quantities, each next to its floor, and their JSON form in `benchmarks/results`."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

Unit = Literal["µs", "ms", "s", "/s", "KiB", "MiB", ""]
"""`/s` is a rate, and the empty unit a count or a ratio."""

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a figure's ratio to its floor, or on the figure itself if it has no floor."""

    kind: Literal["at most", "at least"]
    bound: float

    def is_met_by(self, value: float) -> bool:
        return value <= self.bound if self.kind == "at most" else value >= self.bound

    def __str__(self) -> str:
        return f"{'≤' if self.kind == 'at most' else '≥'} {self.bound:g}"


@dataclass(frozen=True, slots=True)
class Spread:
    """One value per repeat."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def range(self) -> tuple[float, float]:
        return min(self.values), max(self.values)


@dataclass(frozen=True, slots=True)
class Floor:
    """What a figure is compared with: the same work done with less, in the same repeats and the same unit."""

    name: str
    measured: Spread


@dataclass(frozen=True, slots=True)
class Figure:
    """A quantity, measured once per repeat.

    `size`: number of concurrent episodes or sessions. `plot`: name of the plot that shows this figure against
    its size.
    """

    name: str
    unit: Unit
    measured: Spread
    floor: Floor | None = None
    target: Target | None = None
    size: int | None = None
    plot: str | None = None

    @property
    def ratio(self) -> Spread | None:
        """The figure in units of its floor, repeat by repeat. None without a floor or if that is zero."""
        if self.floor is None or not all(self.floor.measured.values):
            return None
        pairs = zip(self.measured.values, self.floor.measured.values, strict=True)
        return Spread(tuple(value / floor for value, floor in pairs))

    @property
    def meets_target(self) -> bool | None:
        """By the median. None without a target or anything to compare with it."""
        compared = self.measured if self.floor is None else self.ratio
        if self.target is None or compared is None:
            return None
        return self.target.is_met_by(compared.median)


class Figures:
    """Collects the values of repeats. A figure is identified by its name and size."""

    def __init__(self) -> None:
        self._figures: dict[tuple[str, int | None], Figure] = {}

    def add(
        self,
        name: str,
        unit: Unit,
        value: float,
        *,
        floor: tuple[str, float] | None = None,
        target: Target | None = None,
        size: int | None = None,
        plot: str | None = None,
    ) -> None:
        """Add the value of one repeat, and that of its floor by name."""
        before = self._figures.get((name, size))
        earlier = before.measured.values if before else ()
        earlier_floor = before.floor.measured.values if before and before.floor else ()
        self._figures[name, size] = Figure(
            name,
            unit,
            Spread((*earlier, value)),
            None if floor is None else Floor(floor[0], Spread((*earlier_floor, floor[1]))),
            target,
            size,
            plot,
        )

    def all(self) -> tuple[Figure, ...]:
        """In the order in which they were added first."""
        return tuple(self._figures.values())


@dataclass(frozen=True, slots=True)
class SectionResult:
    """What one section measured, on which machine, and what it left behind.

    `skipped`: what was not measured, with the reason. `remaining`: the number of containers, processes and
    files that remain of each kind after the section has closed everything.
    """

    section: str
    machine: dict[str, str]
    seconds: float
    figures: tuple[Figure, ...]
    remaining: dict[str, int]
    errors: tuple[str, ...] = ()
    skipped: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def failed(self) -> bool:
        return bool(self.errors) or any(self.remaining.values())


_JSON = TypeAdapter(SectionResult)


def write(result: SectionResult, folder: Path = RESULTS) -> None:
    """Replace the section's file."""
    folder.mkdir(exist_ok=True)
    text = _JSON.dump_json(_rounded(result), indent=1, exclude_defaults=True)
    (folder / f"{result.section}.json").write_bytes(text + b"\n")


def read(sections: Iterable[str], folder: Path = RESULTS) -> Sequence[SectionResult]:
    """The results of those sections that have a file, in the order of `sections`."""
    files = [folder / f"{section}.json" for section in sections]
    return [_JSON.validate_json(file.read_bytes()) for file in files if file.exists()]


def _rounded(result: SectionResult) -> SectionResult:
    """Values with five significant digits, so that files and their differences stay readable."""

    def spread(of: Spread) -> Spread:
        return Spread(tuple(float(f"{value:.5g}") for value in of.values))

    figures = tuple(
        Figure(
            one.name,
            one.unit,
            spread(one.measured),
            one.floor and Floor(one.floor.name, spread(one.floor.measured)),
            one.target,
            one.size,
            one.plot,
        )
        for one in result.figures
    )
    return SectionResult(
        result.section,
        result.machine,
        round(result.seconds, 1),
        figures,
        result.remaining,
        result.errors,
        result.skipped,
    )
