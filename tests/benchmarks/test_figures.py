"""Figures, their JSON files, and the page and plots that are made of them."""

from __future__ import annotations

from benchmarks import figures
from benchmarks.sections import SECTIONS
from docs import performance


def test_performance_page_and_its_plots_are_up_to_date() -> None:
    files = performance.files(figures.read(SECTIONS))
    outdated = [path.name for path, text in files.items() if not path.exists() or path.read_text() != text]
    unused = {path.name for path in performance.IMAGES.glob("performance-*.svg")} - {
        path.name for path in files
    }
    assert (outdated, unused) == ([], set()), "update them with: python docs/performance.py"
