"""Checks the list of fines and the notices in the database, and that nothing else in it changed."""

import sqlite3

from utils.evaluation import Attempt, judge, require
from utils.leftovers import open_database, read_csv

HEADER = ["member_id", "name", "loans", "fine_cents", "notice"]
TABLES = ["branch", "closed_days", "copies", "loans", "members", "notices", "renewals"]
MAX_ROWS = 2000


def check(attempt: Attempt) -> None:
    wanted = read_csv(attempt.groundtruth, "fines.csv", HEADER)
    found = read_csv(attempt.workspace, "fines.csv", HEADER)
    require(sorted(found) == sorted(wanted), "fines.csv does not list who owes what")
    require(found == wanted, "fines.csv is not in the order asked for")

    with open_database(attempt.groundtruth, "library.db") as database:
        right = {table: rows(database, table) for table in TABLES}
    today = attempt.launch_time.date().isoformat()
    right["notices"] += [
        (int(who), today, int(fine)) for who, _, _, fine, notice in wanted if notice == "yes"
    ]
    with open_database(attempt.workspace, "library.db") as database:
        for table in TABLES:
            same = sorted(map(repr, rows(database, table))) == sorted(map(repr, right[table]))
            require(same, f"table {table} does not hold what it should")


def rows(database: sqlite3.Connection, table: str) -> list[tuple[object, ...]]:
    """Return a table's rows; notices without their ids, which the database assigns."""
    columns = "member_id, sent_on, amount_cents" if table == "notices" else "*"
    return database.execute(f"SELECT {columns} FROM {table}").fetchmany(MAX_ROWS)


if __name__ == "__main__":
    judge(check)
