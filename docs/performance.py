"""Writes docs/results/performance.md and its plots from the results in benchmarks/results.

    .venv/bin/python -m benchmarks --write     # measures
    .venv/bin/python docs/performance.py

`tests/docs` fails if the page or a plot is not what the results give.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks import figures, report
from benchmarks.figures import Figure, SectionResult, Spread
from benchmarks.sections import SECTIONS
from docs.plots import Line, Point, plot

PAGE = Path(__file__).parent / "results" / "performance.md"
IMAGES = Path(__file__).parent / "images"
PLOTS: Mapping[str, tuple[str, str]] = {
    "calls": ("Calls per second of all episodes together", "calls per second"),
    "cpu": ("CPU time of the server per call", "µs"),
    "played": ("Until every episode has been called once", "seconds"),
    "graded": ("Episodes graded per second", "episodes per second"),
    "memory": ("Memory of the whole machine for each episode", "MiB"),
    "density": ("Memory for each episode with two tool servers", "MiB"),
    "servers": ("Until every episode's servers have started and replied", "seconds"),
}
"""Title and unit of the plots, by the name that figures give."""
INTRODUCTION = """\
<!-- Written by docs/performance.py from benchmarks/results: do not edit. -->

# Results: performance

Measured by `python -m benchmarks`: each quantity next to its floor, the same work done with less, in turns
in the same run. So the ratio is the result, and the state of the machine is in both. Values are medians of
the repeats, with the lowest and the highest in parentheses. A target is a bound on the ratio, or on the
quantity where there is no floor; ✓ and ✗ say whether the median meets it. No test asserts a time."""


def files(results: Sequence[SectionResult]) -> dict[Path, str]:
    """The page and its plots, by path."""
    found: dict[Path, str] = {}
    common = results[0].machine if results else {}
    parts = [INTRODUCTION, report.machine_list(common)] if results else [INTRODUCTION]
    for result in results:
        images: list[str] = []
        for name in PLOTS:
            lines = _lines([figure for figure in result.figures if figure.plot == name])
            if lines:
                title, unit = PLOTS[name]
                file = IMAGES / f"performance-{name}.svg"
                found[file] = plot(title, unit, lines)
                images.append(f"![{title}](../images/{file.name})")
        section = SECTIONS[result.section]
        parts.append(report.section(result, section.title, section.text, images, common))
    found[PAGE] = "\n\n".join(parts) + "\n"
    return found


def _lines(shown: Sequence[Figure]) -> list[Line]:
    """A line for each name of a figure, followed by its floor's if there is one."""
    lines: list[Line] = []
    for name in dict.fromkeys(figure.name for figure in shown):
        of_name = [figure for figure in shown if figure.name == name]
        floors = [figure.floor for figure in of_name if figure.floor]
        lines.append(Line(name, _points(of_name, [figure.measured for figure in of_name])))
        if len(floors) == len(of_name):
            points = _points(of_name, [floor.measured for floor in floors])
            lines.append(Line(f"floor: {floors[0].name}", points, dashed=True))
    return [line for line in lines if line.points]


def _points(shown: Sequence[Figure], spreads: Sequence[Spread]) -> tuple[Point, ...]:
    """Only values above zero, which a logarithmic axis can show."""
    points = [
        Point(figure.size, spread.median, *spread.range)
        for figure, spread in zip(shown, spreads, strict=True)
        if figure.size is not None and spread.range[0] > 0
    ]
    return tuple(sorted(points, key=lambda point: point.size))


def main() -> None:
    for old in IMAGES.glob("performance-*.svg"):
        old.unlink()
    for path, text in files(figures.read(SECTIONS)).items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
