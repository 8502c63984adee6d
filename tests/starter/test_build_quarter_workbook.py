"""build-quarter-workbook: attempts that look like a solution but are wrong."""

from __future__ import annotations

import zipfile
from typing import Any

import pytest
from openpyxl import Workbook, load_workbook

from tests.starter.bench import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TASK = "build-quarter-workbook"
WORKBOOK = "quarter.xlsx"


def put(bench: Bench, sheet: str, cells: dict[str, Any]) -> None:
    """Overwrite cells, formulas as they are typed."""
    workbook = load_workbook(bench.workspace / WORKBOOK)
    for cell, value in cells.items():
        workbook[sheet][cell] = value
    workbook.save(bench.workspace / WORKBOOK)


@pytest.mark.parametrize(
    ("cell", "value", "reason"),
    [
        ("G2", 190, "its revenue is no formula"),
        pytest.param("E5", 9, "not its units", marks=pytest.mark.long),  # one was brought back
        pytest.param("B2", "2026-01-08", "not a date", marks=pytest.mark.long),  # a text
        pytest.param("C2", "harbour", "not its branch", marks=pytest.mark.long),
        ("A32", 1031, "more than was asked for"),  # a sale of April
    ],
)
async def test_a_wrong_sale_fails(right: Bench, cell: str, value: object, reason: str) -> None:
    put(right, "Sales", {cell: value})
    right.assert_fails(reason)


async def test_a_figure_typed_into_the_summary_fails(right: Bench) -> None:
    put(right, "Summary", {"B2": 801.5})
    right.assert_fails("a figure is no formula")


async def test_figures_dressed_up_as_formulas_fail(right: Bench) -> None:
    table = {"B2": 801.5, "C2": 298.25, "D2": 1628.3, "B4": 988.95}
    put(right, "Summary", {cell: f"={figure}+0*Sales!G2" for cell, figure in table.items()})
    right.assert_fails("once sales have been corrected")


async def test_months_told_apart_by_rows_instead_of_dates_fail(right: Bench) -> None:
    """Right as long as nobody corrects a date."""
    for branch in (2, 3, 4):
        put(right, "Summary", {f"B{branch}": f"=SUMIFS(Sales!$G$2:$G$10,Sales!$C$2:$C$10,$A{branch})"})
    right.assert_fails("January is wrong once sales have been corrected")


async def test_a_workbook_without_the_sheets_fails(right: Bench) -> None:
    Workbook().save(right.workspace / WORKBOOK)
    right.assert_fails("the sheets are Sheet")


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"Sale,Date\n"])
async def test_a_file_that_is_no_workbook_fails(right: Bench, data: bytes) -> None:
    (right.workspace / WORKBOOK).write_bytes(data)
    right.assert_fails("not a workbook")


async def test_a_workbook_that_unpacks_to_a_giant_fails(right: Bench) -> None:
    with zipfile.ZipFile(right.workspace / WORKBOOK, "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("xl/media/bomb", bytes(80 * 1024 * 1024))
    right.assert_fails("unpacks to more than")


async def test_a_workbook_that_defines_entities_fails(right: Bench) -> None:
    path = right.workspace / WORKBOOK
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]>'
    parts["xl/workbook.xml"] = bomb + parts["xl/workbook.xml"]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in parts.items():
            archive.writestr(name, data)
    right.assert_fails("defines entities")
