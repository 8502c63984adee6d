"""Checks the list of fines and the notices in the database, and that nothing else in it changed."""

import sqlite3

from utils.evaluation import Attempt, judge, require
from utils.submission import open_database, read_csv

HEADER = ["member_id", "name", "loans", "fine_cents", "notice"]
TABLES = ["branch", "closed_days", "copies", "loans", "members", "notices", "renewals"]
MAX_ROWS = 2000


def check(attempt: Attempt) -> None:
    expected = read_csv(attempt.groundtruth, "fines.csv", HEADER)
    actual = read_csv(attempt.workspace, "fines.csv", HEADER)
    require(sorted(actual) == sorted(expected), "fines.csv does not list who owes what")
    require(actual == expected, "fines.csv is not in the order asked for")

    with open_database(attempt.groundtruth, "library.db") as database:
        expected_rows = {table: rows(database, table) for table in TABLES}
    today = attempt.launch_time.date().isoformat()
    expected_rows["notices"] += [
        (int(member), today, int(fine)) for member, _, _, fine, notice in expected if notice == "yes"
    ]
    with open_database(attempt.workspace, "library.db") as database:
        for table in TABLES:
            same = sorted(map(repr, rows(database, table))) == sorted(map(repr, expected_rows[table]))
            require(same, f"table {table} does not hold what it should")


def rows(database: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    """Return a table's rows; notices without their ids, which the database assigns."""
    columns = "member_id, sent_on, amount_cents" if table == "notices" else "*"
    return database.execute(f"SELECT {columns} FROM {table}").fetchmany(MAX_ROWS)


if __name__ == "__main__":
    judge(check)
