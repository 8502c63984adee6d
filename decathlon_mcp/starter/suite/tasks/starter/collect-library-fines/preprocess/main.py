"""Creates the library's database, relative to the launch date, and keeps a copy for the evaluator."""

import shutil
import sqlite3
from datetime import date, timedelta
from pathlib import Path

from utils.preparation import episode

from . import library

GROUNDTRUTH = Path(__file__).resolve().parents[1] / "groundtruth_workspace"

TABLES = """
CREATE TABLE branch (name TEXT NOT NULL, today TEXT NOT NULL);
CREATE TABLE members (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL,
    kind TEXT NOT NULL CHECK (kind IN ('adult', 'child', 'staff')), left_on TEXT
);
CREATE TABLE copies (id INTEGER PRIMARY KEY, title TEXT NOT NULL);
CREATE TABLE loans (
    id INTEGER PRIMARY KEY,
    member_id INTEGER NOT NULL REFERENCES members, copy_id INTEGER NOT NULL REFERENCES copies,
    lent_on TEXT NOT NULL, due_on TEXT NOT NULL, returned_on TEXT
);
CREATE TABLE renewals (
    id INTEGER PRIMARY KEY, loan_id INTEGER NOT NULL REFERENCES loans,
    asked_on TEXT NOT NULL, granted INTEGER NOT NULL
);
CREATE TABLE closed_days (day TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE notices (
    id INTEGER PRIMARY KEY, member_id INTEGER NOT NULL REFERENCES members,
    sent_on TEXT NOT NULL, amount_cents INTEGER NOT NULL
);
"""


def main() -> None:
    arguments = episode()
    today = arguments.launch_time.date()
    database = arguments.workspace / "library.db"
    connection = sqlite3.connect(database)
    with connection:
        connection.executescript(TABLES)
        fill(connection, today)
    connection.close()
    shutil.copyfile(database, GROUNDTRUTH / "library.db")


def fill(connection: sqlite3.Connection, today: date) -> None:
    def day(offset: int | None) -> str | None:
        return None if offset is None else (today + timedelta(days=offset)).isoformat()

    def insert(table: str, rows: list[tuple[object, ...]]) -> None:
        connection.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * len(rows[0]))})", rows)

    insert("branch", [("Quayside", day(0))])
    insert("members", [(*member, day(left_on)) for *member, left_on in library.MEMBERS])
    insert("copies", [(copy, library.SHELF[copy % len(library.SHELF)]) for copy in range(1, 41)])
    loans = library.past_loans() + library.OUT
    insert("loans", [(*ids, day(lent), day(due), day(back)) for *ids, lent, due, back in loans])
    insert(
        "renewals",
        [(i, loan, day(asked), granted) for i, (loan, asked, granted) in enumerate(library.RENEWALS, 1)],
    )
    insert("closed_days", [(day(closed), reason) for closed, reason in library.CLOSED])
    insert(
        "notices",
        [(i, member, day(sent), cents) for i, (member, sent, cents) in enumerate(library.NOTICES, 1)],
    )


if __name__ == "__main__":
    main()
