"""Checks the sales and the summary, and that the summary changes when sales are corrected."""

import json
from dataclasses import dataclass, replace
from datetime import date, datetime

from openpyxl.worksheet.worksheet import Worksheet

from utils.evaluation import Attempt, judge, require
from utils.spreadsheet import Calculation, calculate, open_workbook
from utils.submission import close, regular_file

WORKBOOK = "quarter.xlsx"
HEADER = ["Sale", "Date", "Branch", "Product", "Units", "Price", "Revenue"]
SUMMARY = ["Branch", "January", "February", "March", "Total"]
BRANCHES = ["Harbour", "Hill", "Old Town"]


@dataclass(frozen=True)
class Sale:
    number: int
    day: date
    branch: str
    product: str
    units: int
    price: float

    @property
    def revenue(self) -> float:
        return self.units * self.price


def check(attempt: Attempt) -> None:
    rows = json.loads((attempt.groundtruth / "sales.json").read_text())
    sales = [Sale(number, date.fromisoformat(day), *rest) for number, day, *rest in rows]
    workbook = open_workbook(attempt.workspace, WORKBOOK)
    require(workbook.sheetnames == ["Sales", "Summary"], f"the sheets are {', '.join(workbook.sheetnames)}")
    check_sales(workbook["Sales"], sales)
    check_summary(workbook["Summary"])

    async def check_figures(calculation: Calculation) -> None:
        """Check the results, before and after some sales are corrected."""
        await compare(calculation, sales, "")
        corrected = [correct(sale) for sale in sales]
        values = [
            [sale.day.isoformat(), sale.branch, sale.product, sale.units, sale.price] for sale in corrected
        ]
        await calculation.write("Sales", "B2", values)
        await compare(calculation, corrected, " once sales have been corrected")

    calculate(regular_file(attempt.workspace, WORKBOOK), check_figures)


def check_sales(sheet: Worksheet, sales: list[Sale]) -> None:
    """Check the entered values, and that Revenue is a formula."""
    require(cells(sheet, 1, HEADER) == HEADER, "Sales does not have the header asked for")
    require_nothing_beyond(sheet, len(sales) + 1, len(HEADER))
    for row, sale in enumerate(sales, 2):
        number, day, branch, product, units, price, revenue = cells(sheet, row, HEADER)
        require(number == sale.number, f"Sales, row {row}: sale {sale.number} belongs here")
        require(
            isinstance(day, datetime) and day.date() == sale.day,
            f"sale {sale.number}: not its date, or not a date",
        )
        require(
            [branch, product] == [sale.branch, sale.product], f"sale {sale.number}: not its branch or product"
        )
        require(
            close(units, sale.units, 0) and close(price, sale.price),
            f"sale {sale.number}: not its units or price",
        )
        require(is_formula(revenue), f"sale {sale.number}: its revenue is no formula")


def check_summary(sheet: Worksheet) -> None:
    """Check the labels, and that every figure is a formula."""
    require(cells(sheet, 1, SUMMARY) == SUMMARY, "Summary does not have the header asked for")
    require_nothing_beyond(sheet, len(BRANCHES) + 2, len(SUMMARY))
    for row, name in enumerate([*BRANCHES, "Total"], 2):
        label, *figures = cells(sheet, row, SUMMARY)
        require(label == name, f"Summary, row {row}: {name} belongs here")
        require(all(map(is_formula, figures)), f"Summary, {name}: a figure is no formula")


def correct(sale: Sale) -> Sale:
    """Change the month, branch, number of units or price of some sales."""
    match sale.number % 5:
        case 0:
            return replace(sale, day=sale.day.replace(month=sale.day.month % 3 + 1, day=1))
        case 1:
            return replace(sale, branch=BRANCHES[BRANCHES.index(sale.branch) - 1])
        case 2:
            return replace(sale, units=sale.units + 7)
        case 3:
            return replace(sale, price=sale.price + 3.5)
    return sale


async def compare(calculation: Calculation, sales: list[Sale], when: str) -> None:
    """Compare every figure of both sheets with the figure calculated from the sales."""
    revenues = await calculation.read("Sales", f"G2:G{len(sales) + 1}")
    for sale, [revenue] in zip(sales, revenues, strict=True):
        require(close(revenue, sale.revenue), f"sale {sale.number}: its revenue is wrong{when}")
    actual = await calculation.read("Summary", f"B2:E{len(BRANCHES) + 2}")
    for name, figures, expected in zip([*BRANCHES, "Total"], actual, summary(sales), strict=True):
        for column, figure, correct_figure in zip(SUMMARY[1:], figures, expected, strict=True):
            require(close(figure, correct_figure), f"Summary, {name}, {column} is wrong{when}")


def summary(sales: list[Sale]) -> list[list[float]]:
    """Return the figures of Summary, row by row, with totals."""
    table = [
        [
            sum(sale.revenue for sale in sales if (sale.branch, sale.day.month) == (branch, month))
            for month in (1, 2, 3)
        ]
        for branch in BRANCHES
    ]
    table.append([sum(column) for column in zip(*table, strict=True)])
    return [[*row, sum(row)] for row in table]


def cells(sheet: Worksheet, row: int, header: list[str]) -> list[object]:
    return [sheet.cell(row, column).value for column in range(1, len(header) + 1)]


def require_nothing_beyond(sheet: Worksheet, rows: int, columns: int) -> None:
    for row in sheet.iter_rows(max_row=rows + 20, max_col=columns + 5):
        for cell in row:
            inside = cell.row <= rows and cell.column <= columns
            require(
                inside or cell.value is None,
                f"{sheet.title} has more than was asked for, in {cell.coordinate}",
            )


def is_formula(value: object) -> bool:
    return isinstance(value, str) and value.startswith("=")


if __name__ == "__main__":
    judge(check)
