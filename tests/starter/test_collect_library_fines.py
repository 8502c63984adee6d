"""collect-library-fines: attempts that look like a solution but are wrong."""

from __future__ import annotations

import pytest

from tests.starter.bench import Bench
from tests.starter.conftest import LayOut

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
TASK = "collect-library-fines"
DATABASE = "library.db"


async def test_charging_forgiven_days_fails(right: Bench) -> None:
    right.edit("fines.csv", '1,"Abdi, Hodan",1,140', '1,"Abdi, Hodan",2,200')
    right.assert_fails("who owes what")


async def test_leaving_a_member_out_fails(right: Bench) -> None:
    right.edit("fines.csv", '11,"Kaya, Elif",1,50,yes\n', "")
    right.assert_fails("who owes what")


async def test_another_order_fails(right: Bench) -> None:
    path = right.workspace / "fines.csv"
    head, first, second, *rest = path.read_text().splitlines()
    path.write_text("\n".join([head, second, first, *rest]))
    right.assert_fails("order")


async def test_a_notice_too_many_fails(right: Bench) -> None:
    right.sql(
        DATABASE, "INSERT INTO notices (member_id, sent_on, amount_cents) SELECT 12, today, 200 FROM branch"
    )
    right.assert_fails("notices")


async def test_notices_of_another_day_fail(right: Bench) -> None:
    right.sql(
        DATABASE,
        "UPDATE notices SET sent_on = date(sent_on, '+1 day') WHERE sent_on = (SELECT today FROM branch)",
    )
    right.assert_fails("notices")


async def test_changing_the_books_fails(right: Bench) -> None:
    right.sql(DATABASE, "UPDATE loans SET returned_on = due_on WHERE id = 107")
    right.assert_fails("loans")


async def test_a_table_that_never_ends_fails(right: Bench) -> None:
    endless = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n) SELECT i, i, i FROM n"
    right.sql(DATABASE, "DROP TABLE closed_days", f"CREATE VIEW closed_days AS {endless}")
    right.assert_fails("closed_days")


def test_today_is_the_day_of_the_launch(lay_out: LayOut) -> None:
    days = [
        lay_out(TASK, launch_time)
        for launch_time in ("2027-02-28 23:59:59 Sunday", "2026-05-06 00:00:00 Wednesday")
    ]
    assert (days[0].workspace / DATABASE).read_bytes() != (days[1].workspace / DATABASE).read_bytes()
    assert b"2027-02-28" in (days[0].workspace / DATABASE).read_bytes()
