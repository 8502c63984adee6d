"""Who gets a place, who has to wait, and for what."""

from __future__ import annotations

import pytest

from decathlon_mcp.episodes.admission import Admission, Ticket
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.suites.sharing import Shared

pytestmark = pytest.mark.anyio

MAIL = Shared("mail", "the account mail")
NOTES = Shared("notes", "the account notes", ("first", "second"), "notes")


def admission(places: int = 2, queue: int = 2) -> Admission:
    return Admission(max_sandboxes=places, max_opening=1, max_queue=queue)


def reserve(admission: Admission, task: str, *shared: Shared) -> Ticket:
    return admission.reserve(task, shared)


def admitted(*tickets: Ticket) -> list[bool]:
    return [ticket.admitted.is_set() for ticket in tickets]


async def test_places_are_given_in_order_and_no_more_than_there_are() -> None:
    door = admission(places=2, queue=5)
    tickets = [reserve(door, f"task-{number}") for number in range(4)]
    assert admitted(*tickets) == [True, True, False, False]
    assert (door.active, door.queued) == (2, 2)
    assert tickets[0].waiting_for is None
    assert tickets[3].waiting_for == "a sandbox: 2 of 2 are in use, and 1 episodes wait before this one"
    door.release(tickets[0])
    assert admitted(*tickets[2:]) == [True, False]


async def test_past_the_queue_there_is_a_refusal_with_counts_and_a_time() -> None:
    door = admission(places=1, queue=1)
    reserve(door, "a")
    reserve(door, "b")
    with pytest.raises(AtCapacityError) as refused:
        reserve(door, "c")
    assert refused.value.retryable
    assert refused.value.data["active"] == 1
    assert 5 <= refused.value.data["retryAfterSeconds"] <= 15
    assert door.queued == 1


async def test_tasks_that_share_something_never_run_side_by_side_and_hold_up_nobody_else() -> None:
    door = admission(places=3, queue=3)
    first = reserve(door, "write", MAIL)
    itself = reserve(door, "write", MAIL)
    third = reserve(door, "read", MAIL)
    other = reserve(door, "sums")
    assert admitted(first, itself, third, other) == [True, False, False, True]
    assert itself.waiting_for == "the account mail, which write has"
    assert third.waiting_for == "the account mail, which write has, and 1 more before this one"
    door.release(first)
    assert admitted(itself, third) == [True, False]


async def test_as_many_run_at_once_as_there_are_slots_each_with_its_own() -> None:
    door = admission(places=5, queue=5)
    tickets = [reserve(door, f"page-{number}", NOTES) for number in range(4)]
    assert admitted(*tickets) == [True, True, False, False]
    assert [ticket.accounts for ticket in tickets[:2]] == [{"notes": "first"}, {"notes": "second"}]
    assert tickets[2].waiting_for == "the account notes, which page-0 and page-1 have"
    door.release(tickets[1])
    assert tickets[2].accounts == {"notes": "second"}
    assert not tickets[3].admitted.is_set()


async def test_who_wants_two_things_is_not_overtaken_for_ever_by_those_who_want_one() -> None:
    door = admission(places=5, queue=9)
    mail, notes = reserve(door, "mail", MAIL), [reserve(door, "notes", NOTES) for _ in range(2)]
    both = reserve(door, "both", MAIL, NOTES)
    late = reserve(door, "late", MAIL)
    door.release(mail)
    assert admitted(both, late) == [False, False], "the mail is kept for who came first"
    assert both.waiting_for == "the account notes, which notes has"
    door.release(notes[0])
    assert admitted(both, late) == [True, False]
    door.release(both)
    assert late.admitted.is_set()


async def test_a_refusal_says_what_was_waited_for() -> None:
    door = admission(places=2, queue=0)
    reserve(door, "write", MAIL)
    with pytest.raises(AtCapacityError, match=r"\(read for the account mail, which write has\)"):
        reserve(door, "read", MAIL)


async def test_a_place_is_free_again_however_it_was_left() -> None:
    door = admission(places=1)
    ticket = reserve(door, "a")
    with pytest.raises(RuntimeError):
        async with door.admit(ticket):
            raise RuntimeError
    door.release(ticket)
    assert (door.active, door.queued) == (0, 0)


async def test_asking_whether_there_is_room_takes_none() -> None:
    door = admission(places=1, queue=0)
    door.refuse_if_full()
    assert (door.active, door.queued) == (0, 0)
    reserve(door, "a")
    with pytest.raises(AtCapacityError):
        door.refuse_if_full()
