"""Figures, their JSON files, and the page and plots that are made of them."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from benchmarks import figures, report
from benchmarks.figures import Figures, SectionResult, Target
from benchmarks.sections import SECTIONS
from docs import performance

MACHINE = {"date": "2026-01-01", "machine": "2 cores"}
NOTHING_LEFT = {"containers": 0, "processes": 0, "files": 0}


def result(*added: tuple[float, float], size: int = 4, **changes: object) -> SectionResult:
    """A result of section `sizes` with one figure, whose repeats have these values and floors."""
    collected = Figures()
    for value, floor in added:
        collected.add(
            "calls per second",
            "/s",
            value,
            floor=("direct", floor),
            target=Target("at least", 0.8),
            size=size,
            plot="calls",
        )
    values = {"errors": (), "remaining": NOTHING_LEFT} | changes
    return SectionResult("sizes", MACHINE, 1.0, collected.all(), **values)  # type: ignore[arg-type]


def test_a_ratio_is_taken_repeat_by_repeat_and_its_median_meets_the_target() -> None:
    (figure,) = result((100, 100), (50, 100), (900, 1000)).figures
    assert figure.ratio is not None
    assert figure.ratio.values == (1.0, 0.5, 0.9)
    assert figure.meets_target is True


def test_without_a_floor_the_target_is_a_bound_on_the_quantity() -> None:
    collected = Figures()
    collected.add("delay", "ms", 25.0, target=Target("at most", 20))
    (figure,) = collected.all()
    assert (figure.ratio, figure.meets_target) == (None, False)


def test_a_section_with_errors_or_leaks_has_failed() -> None:
    assert result((1, 1), errors=("lost",)).failed
    assert result((1, 1), remaining=NOTHING_LEFT | {"processes": 1}).failed
    assert not result((1, 1)).failed


def test_a_row_shows_median_range_ratio_and_whether_the_target_is_met() -> None:
    text = report.figures_table(result((700, 1000), (850, 1000), (900, 1000)).figures)
    row = [cell.strip() for cell in text.splitlines()[-1].strip("|").split("|")]
    assert row == [
        *("calls per second", "4", "/s", "850 (700–900)", "direct", "1,000 (1,000–1,000)"),
        *("**0.850** (0.700–0.900)", "≥ 0.8 ✓"),
    ]


def test_page_has_every_section_and_a_plot_with_its_floor() -> None:
    files = performance.files([result((100, 200), (110, 190))])
    page = files[performance.PAGE]
    assert "## Cost against size" in page
    assert "](../images/performance-calls.svg)" in page
    (picture,) = [text for path, text in files.items() if path.suffix == ".svg"]
    texts = [node.text for node in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert {"calls per second", "floor: direct", "concurrent episodes", "4"} <= set(texts)


def test_performance_page_and_its_plots_are_up_to_date() -> None:
    files = performance.files(figures.read(SECTIONS))
    outdated = [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]
    unused = {path.name for path in performance.IMAGES.glob("performance-*.svg")} - {
        path.name for path in files
    }
    assert (outdated, unused) == ([], set()), "update them with: python docs/performance.py"
