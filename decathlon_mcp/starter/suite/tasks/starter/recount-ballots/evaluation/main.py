"""Checks the points of each candidate who did not withdraw, and that no other table was changed."""

import json
import sqlite3

from utils.evaluation import Attempt, judge, require
from utils.submission import open_database

TABLES = ["election", "candidates", "members", "ballots", "choices"]
MAX_ROWS = 2000


def check(attempt: Attempt) -> None:
    original = sqlite3.connect(":memory:")
    original.executescript((attempt.groundtruth / "election.sql").read_text())
    points = json.loads((attempt.groundtruth / "tally.json").read_text())
    with open_database(attempt.workspace, "election.db") as database:
        for table in TABLES:
            require(rows(database, table) == rows(original, table), f"table {table} has been changed")
        tally = database.execute("SELECT candidate_id, points FROM tally").fetchmany(MAX_ROWS)
    require(bool(tally), "the tally is empty")
    require(
        tally == sorted((int(candidate), count) for candidate, count in points.items()), "the tally is wrong"
    )


def rows(database: sqlite3.Connection, table: str) -> list[str]:
    return sorted(map(repr, database.execute(f"SELECT * FROM {table}").fetchmany(MAX_ROWS)))


if __name__ == "__main__":
    judge(check)
