"""Results as Markdown, for the terminal and for docs/results/performance.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from benchmarks.figures import Figure, SectionResult, Spread

DIGITS = 3
"""Significant digits of a value."""


def section(
    result: SectionResult,
    title: str,
    text: str,
    plots: Iterable[str] = (),
    common: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """One section, with its plots as Markdown images. `common`: what is known already of the machine."""
    parts = [f"## {title}", text]
    if different := {name: value for name, value in result.machine.items() if common.get(name) != value}:
        parts.append(machine_list(different))
    if result.figures:
        parts.append(figures_table(result.figures))
    parts += plots
    parts += [f"Not measured: {what} ({reason})." for what, reason in result.skipped.items()]
    parts += [f"**Failed:** {error}" for error in result.errors]
    left = ", ".join(f"{count} {kind}" for kind, count in result.remaining.items())
    parts.append(f"Left behind: {left}. It took {result.seconds:.0f} s.")
    return "\n\n".join(parts)


def machine_list(machine: Mapping[str, str]) -> str:
    return "\n".join(f"- {name}: {value}" for name, value in machine.items())


def figures_table(figures: Iterable[Figure]) -> str:
    """A row for each figure: median and range of the repeats, its floor, their ratio, and its target."""
    figures = list(figures)
    names = list(dict.fromkeys(figure.name for figure in figures))
    figures.sort(key=lambda figure: (names.index(figure.name), figure.size or 0))
    has_sizes = any(figure.size is not None for figure in figures)
    has_floors = any(figure.floor for figure in figures)
    has_targets = any(figure.target for figure in figures)
    columns = ["quantity", "unit", "measured"]
    columns[1:1] = ["size"] if has_sizes else []
    columns += ["floor", "", "ratio"] if has_floors else []
    columns += ["target"] if has_targets else []
    return table(tuple(columns), (_row(figure, has_sizes, has_floors, has_targets) for figure in figures))


def _row(figure: Figure, has_sizes: bool, has_floors: bool, has_targets: bool) -> tuple[str, ...]:
    row = [figure.name]
    if has_sizes:
        row.append("" if figure.size is None else f"{figure.size:,}")
    row += [figure.unit, _spread(figure.measured)]
    if has_floors:
        ratio = figure.ratio
        row += [figure.floor.name, _spread(figure.floor.measured)] if figure.floor else ["", ""]
        row.append(f"**{_value(ratio.median)}** {_range(ratio)}".strip() if ratio else "")
    if has_targets:
        mark = {None: "", True: " ✓", False: " ✗"}[figure.meets_target]
        row.append(f"{figure.target}{mark}" if figure.target else "")
    return tuple(row)


def _spread(spread: Spread) -> str:
    return f"{_value(spread.median)} {_range(spread)}".strip()


def _range(spread: Spread) -> str:
    """The lowest and the highest value, unless there is only one."""
    lowest, highest = (_value(value) for value in spread.range)
    return f"({lowest}–{highest})" if len(spread.values) > 1 else ""


def _value(value: float) -> str:
    """Three significant digits, and no fewer than all digits before the point."""
    if value == int(value) or abs(value) >= 10 ** (DIGITS - 1):
        return f"{value:,.0f}"
    return f"{value:#.{DIGITS}g}" if abs(value) >= 0.001 else f"{value:.3f}"


def table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A Markdown table; the first column is text, the others are aligned to the right."""
    lines = [headings, ("---", *("---:" for _ in headings[1:])), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
