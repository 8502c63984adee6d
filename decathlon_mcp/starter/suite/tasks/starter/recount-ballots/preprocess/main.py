"""Creates an election that is different in every episode, and writes its result to the groundtruth."""

import json
import sqlite3
from datetime import datetime, timedelta
from pathlib import Path

from utils.preparation import episode

from .election import CANDIDATES, Election, generate, ids

GROUNDTRUTH = Path(__file__).resolve().parents[1] / "groundtruth_workspace"

TABLES = """
CREATE TABLE election (day TEXT NOT NULL, office TEXT NOT NULL);
CREATE TABLE candidates (id INTEGER PRIMARY KEY, name TEXT NOT NULL, withdrawn INTEGER NOT NULL);
CREATE TABLE members (id INTEGER PRIMARY KEY, name TEXT NOT NULL, joined_on TEXT NOT NULL, left_on TEXT);
CREATE TABLE ballots (
    id INTEGER PRIMARY KEY, member_id INTEGER NOT NULL REFERENCES members,
    cast_at TEXT NOT NULL, spoiled INTEGER NOT NULL
);
CREATE TABLE choices (
    ballot_id INTEGER NOT NULL REFERENCES ballots, rank INTEGER NOT NULL,
    candidate_id INTEGER NOT NULL REFERENCES candidates,
    PRIMARY KEY (ballot_id, rank)
);
CREATE TABLE tally (candidate_id INTEGER PRIMARY KEY REFERENCES candidates, points INTEGER NOT NULL);
"""


def main() -> None:
    arguments = episode()
    election = generate(arguments.launch_time.isoformat())
    connection = sqlite3.connect(arguments.workspace / "election.db")
    with connection:
        connection.executescript(TABLES)
        fill(connection, election, arguments.launch_time.replace(hour=0, minute=0, second=0))
        dump = "\n".join(connection.iterdump())
    connection.close()
    first_count = election.first_count()
    lines = [
        "candidate,points",
        *(f"{CANDIDATES[candidate - 1]},{first_count[candidate]}" for candidate in ids()),
    ]
    (arguments.workspace / "first-count.csv").write_text("\n".join(lines) + "\n")
    (GROUNDTRUTH / "tally.json").write_text(json.dumps(election.tally()))
    (GROUNDTRUTH / "election.sql").write_text(dump)


def fill(connection: sqlite3.Connection, election: Election, day: datetime) -> None:
    def on(offset: int | None) -> str | None:
        return None if offset is None else (day + timedelta(days=offset)).date().isoformat()

    def at(minute: int) -> str:
        return (day + timedelta(hours=8, minutes=minute)).isoformat(sep=" ")

    connection.execute("INSERT INTO election VALUES (?, 'chair')", [on(0)])
    candidates = [(number, CANDIDATES[number - 1], number in election.withdrawn) for number in ids()]
    connection.executemany("INSERT INTO candidates VALUES (?, ?, ?)", candidates)
    members = [(voter.id, voter.name, on(voter.joined), on(voter.left)) for voter in election.voters]
    connection.executemany("INSERT INTO members VALUES (?, ?, ?, ?)", members)
    ballots = [(ballot.id, ballot.voter, at(ballot.minute), ballot.spoiled) for ballot in election.ballots]
    connection.executemany("INSERT INTO ballots VALUES (?, ?, ?, ?)", ballots)
    choices = [(b.id, rank, choice) for b in election.ballots for rank, choice in enumerate(b.choices, 1)]
    connection.executemany("INSERT INTO choices VALUES (?, ?, ?)", choices)


if __name__ == "__main__":
    main()
