"""Who gets a place, and who has to wait."""

from __future__ import annotations

import pytest

from decathlon_mcp.episodes.admission import Admission, Ticket
from decathlon_mcp.errors import AtCapacityError

pytestmark = pytest.mark.anyio


def admission(places: int = 2, queue: int = 2) -> Admission:
    return Admission(max_sandboxes=places, max_opening=1, max_queue=queue)


def reserve(admission: Admission, task: str, *conflicts: str) -> Ticket:
    return admission.reserve(task, frozenset(conflicts))


async def test_places_are_given_in_order_and_no_more_than_there_are() -> None:
    door = admission(places=2, queue=5)
    tickets = [reserve(door, f"task-{number}") for number in range(4)]
    assert [ticket.admitted.is_set() for ticket in tickets] == [True, True, False, False]
    assert (door.active, door.queued) == (2, 2)
    door.give_back(tickets[0])
    assert tickets[2].admitted.is_set()
    assert not tickets[3].admitted.is_set()


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


async def test_conflicting_tasks_never_run_side_by_side_and_hold_up_nobody_else() -> None:
    door = admission(places=3, queue=3)
    first = reserve(door, "mail", "mail", "calendar")
    second = reserve(door, "mail", "mail", "calendar")
    third = reserve(door, "calendar")
    other = reserve(door, "sums")
    assert first.admitted.is_set()
    assert other.admitted.is_set()
    assert not second.admitted.is_set()
    assert not third.admitted.is_set()
    assert door.waits_for(second) == ["mail"]
    door.give_back(first)
    assert second.admitted.is_set()
    assert not third.admitted.is_set()


async def test_a_place_is_free_again_however_it_was_left() -> None:
    door = admission(places=1)
    ticket = reserve(door, "a")
    with pytest.raises(RuntimeError):
        async with door.place(ticket):
            raise RuntimeError
    door.give_back(ticket)
    assert (door.active, door.queued) == (0, 0)


async def test_asking_whether_there_is_room_takes_none() -> None:
    door = admission(places=1, queue=0)
    door.refuse_if_full()
    assert (door.active, door.queued) == (0, 0)
    reserve(door, "a")
    with pytest.raises(AtCapacityError):
        door.refuse_if_full()
