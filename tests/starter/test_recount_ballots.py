"""recount-ballots: data that differs per episode, a sealed answer, and wrong attempts."""

from __future__ import annotations

import csv
import json
import sqlite3

import pytest

from decathlon_mcp.starter import oracle
from tests.starter.bench import Bench
from tests.starter.conftest import LayOut

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TASK = "recount-ballots"
DATABASE = "election.db"


def sealed(bench: Bench) -> dict[str, int]:
    return json.loads((bench.folder / "groundtruth_workspace" / "tally.json").read_text())


def test_the_answer_is_only_in_the_sealed_folder(lay_out: LayOut) -> None:
    bench = lay_out(TASK)
    answer = (bench.folder / "groundtruth_workspace" / "tally.json").read_bytes()
    holders = [path for path in bench.root.rglob("*") if path.is_file() and answer in path.read_bytes()]
    assert [path.parent.name for path in holders] == ["groundtruth_workspace"]
    connection = sqlite3.connect(bench.workspace / DATABASE)
    assert connection.execute("SELECT count(*) FROM tally").fetchone() == (0,)
    connection.close()


def test_the_first_count_is_wrong_about_everybody(lay_out: LayOut) -> None:
    bench = lay_out(TASK)
    with (bench.workspace / "first-count.csv").open() as file:
        announced = [int(points) for _, points in list(csv.reader(file))[1:]]
    right = sealed(bench)
    assert all(announced[int(candidate) - 1] != points for candidate, points in right.items())


def test_the_same_launch_time_gives_the_same_election(lay_out: LayOut) -> None:
    assert sealed(lay_out(TASK)) == sealed(lay_out(TASK))


async def test_another_launch_time_gives_another_election_and_the_oracle_counts_that_one_too(
    lay_out: LayOut,
) -> None:
    other = lay_out(TASK, "2027-01-31 23:59:59 Sunday")
    assert sealed(other) != sealed(lay_out(TASK))
    await other.play(oracle(TASK))
    assert other.evaluate().exit_code == 0


async def test_announcing_the_first_count_fails(right: Bench) -> None:
    with (right.workspace / "first-count.csv").open() as file:
        counted = list(csv.reader(file))[1:]
    points = ", ".join(f"((SELECT id FROM candidates WHERE name = '{name}'), {n})" for name, n in counted)
    right.sql(DATABASE, "DELETE FROM tally", f"INSERT INTO tally VALUES {points}")
    right.assert_fails("the tally is wrong")


async def test_one_point_more_for_everybody_fails(right: Bench) -> None:
    right.sql(DATABASE, "UPDATE tally SET points = points + 1")
    right.assert_fails("the tally is wrong")


async def test_changing_the_ballots_fails(right: Bench) -> None:
    right.sql(DATABASE, "UPDATE ballots SET spoiled = NOT spoiled WHERE id = 3")
    right.assert_fails("ballots")


async def test_an_empty_tally_fails(right: Bench) -> None:
    right.sql(DATABASE, "DELETE FROM tally")
    right.assert_fails("empty")


async def test_a_tally_of_texts_fails(right: Bench) -> None:
    right.sql(
        DATABASE,
        "DROP TABLE tally",
        "CREATE TABLE tally (candidate_id, points)",
        "INSERT INTO tally VALUES (1, 'all'), ('x', NULL)",
    )
    right.assert_fails("the tally is wrong")


async def test_a_file_that_is_no_database_fails(right: Bench) -> None:
    (right.workspace / DATABASE).write_text("the winner is Weaver\n")
    right.assert_fails("cannot be read")
