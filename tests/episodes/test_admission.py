"""Admission: limits, the queue, shared resources and refusals."""

from __future__ import annotations

import time

import pytest

from decathlon_mcp.episodes.admission import Admission, Ticket, share_of
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.suites.suite import SharedResource

pytestmark = pytest.mark.anyio

MAIL = SharedResource("mail", "the account mail")
NOTES = SharedResource("notes", "the account notes", ("first", "second"), "notes")


def new_admission(sandboxes: int = 2, queue: int = 2, share: float = 0.5) -> Admission:
    return Admission(max_sandboxes=sandboxes, max_opening=1, max_queue=queue, share_per_token=share)


def reserve(admission: Admission, task: str, *shared: SharedResource) -> Ticket:
    return admission.reserve(task, shared)


def admitted(*tickets: Ticket) -> list[bool]:
    return [ticket.admitted.is_set() for ticket in tickets]


async def test_tickets_are_admitted_in_order_up_to_the_limit() -> None:
    admission = new_admission(sandboxes=2, queue=5)
    tickets = [reserve(admission, f"task-{number}") for number in range(4)]
    assert admitted(*tickets) == [True, True, False, False]
    assert (admission.active, admission.queued) == (2, 2)
    assert tickets[0].waiting_for is None
    assert tickets[3].waiting_for == "a sandbox: 2 of 2 are in use, and 1 episodes wait before this one"
    admission.release(tickets[0])
    assert admitted(*tickets[2:]) == [True, False]


async def test_tasks_that_share_an_account_run_one_at_a_time_and_do_not_delay_others() -> None:
    admission = new_admission(sandboxes=3, queue=3)
    first = reserve(admission, "write", MAIL)
    itself = reserve(admission, "write", MAIL)
    third = reserve(admission, "read", MAIL)
    other = reserve(admission, "sums")
    assert admitted(first, itself, third, other) == [True, False, False, True]
    assert itself.waiting_for == "the account mail, which write has"
    assert third.waiting_for == "the account mail, which write has, and 1 more before this one"
    admission.release(first)
    assert admitted(itself, third) == [True, False]


async def test_tasks_of_an_account_run_together_up_to_its_slots() -> None:
    admission = new_admission(sandboxes=5, queue=5)
    tickets = [reserve(admission, f"page-{number}", NOTES) for number in range(4)]
    assert admitted(*tickets) == [True, True, False, False]
    assert [ticket.accounts for ticket in tickets[:2]] == [{"notes": "first"}, {"notes": "second"}]
    assert tickets[2].waiting_for == "the account notes, which page-0 and page-1 have"
    admission.release(tickets[1])
    assert tickets[2].accounts == {"notes": "second"}
    assert not tickets[3].admitted.is_set()


async def test_a_task_that_needs_two_accounts_is_not_overtaken_by_tasks_that_need_one() -> None:
    admission = new_admission(sandboxes=5, queue=9)
    mail, notes = reserve(admission, "mail", MAIL), [reserve(admission, "notes", NOTES) for _ in range(2)]
    both = reserve(admission, "both", MAIL, NOTES)
    late = reserve(admission, "late", MAIL)
    admission.release(mail)
    assert admitted(both, late) == [False, False], "the free slot of mail is kept for the earlier ticket"
    assert both.waiting_for == "the account notes, which notes has"
    admission.release(notes[0])
    assert admitted(both, late) == [True, False]
    admission.release(both)
    assert late.admitted.is_set()


async def test_a_token_can_take_neither_all_sandboxes_nor_the_whole_queue() -> None:
    admission = new_admission(sandboxes=4, queue=4)
    greedy = [admission.reserve("a", token="greedy") for _ in range(4)]
    assert admitted(*greedy) == [True, True, False, False]
    assert greedy[3].waiting_for == (
        "a sandbox of its token's share: 2 of 2 are in use, and 1 episodes of the token wait before this one"
    )
    with pytest.raises(AtCapacityError, match="your token uses 2 of the 2 sandboxes of its share"):
        admission.reserve("a", token="greedy")
    with pytest.raises(AtCapacityError):
        admission.refuse_if_full("greedy")
    modest = [admission.reserve("b", token="modest") for _ in range(2)]
    assert admitted(*modest) == [True, True]
    assert admitted(admission.reserve("b", token="modest")) == [False], "half of the queue is free for it"


async def test_a_free_place_goes_to_the_token_with_the_fewest_sandboxes() -> None:
    admission = new_admission(sandboxes=3, queue=9, share=1)
    greedy = [admission.reserve("a", token="greedy") for _ in range(6)]
    first, second = (admission.reserve("b", token=token) for token in ("first", "second"))
    again = admission.reserve("b", token="first")
    assert admitted(*greedy[:4], first) == [True, True, True, False, False]
    assert first.waiting_for == "a sandbox: 3 of 3 are in use, and 0 episodes wait before this one"
    waiting = (first, second, greedy[3], again, greedy[4])
    for number, ticket in enumerate([greedy[0], greedy[1], greedy[2], first], 1):
        admission.release(ticket)
        assert admitted(*waiting) == [True] * number + [False] * (5 - number)


async def test_a_token_that_waits_for_its_share_keeps_no_account_from_others() -> None:
    admission = new_admission(sandboxes=2, queue=4)
    admission.reserve("a", token="greedy")
    waiting = admission.reserve("mail", [MAIL], "greedy")
    other = admission.reserve("mail", [MAIL], "modest")
    assert admitted(waiting, other) == [False, True]


@pytest.mark.parametrize(
    ("total", "share", "expected"),
    [(64, 0.5, 32), (1, 0.5, 1), (3, 0.5, 1), (0, 0.5, 0), (64, 1, 64), (8, 0.001, 1)],
)
async def test_a_share_is_at_least_one_place(total: int, share: float, expected: int) -> None:
    assert share_of(total, share) == expected


async def test_what_thousands_wait_for_is_told_in_a_moment() -> None:
    admission = new_admission(sandboxes=2, queue=6_000)
    tickets = [admission.reserve("task", token=f"token {number % 3}") for number in range(3_000)]
    started_at = time.thread_time()
    reasons = [ticket.waiting_for for ticket in tickets]
    # A list of episodes asks twice, in the event loop. It took some seconds.
    assert time.thread_time() - started_at < 1
    assert sum(reason is not None for reason in reasons) == 2_998
