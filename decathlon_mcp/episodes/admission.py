"""Who gets a sandbox, and when: so many at once, a bounded queue, tasks that share something one by one."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.suites.sharing import SharedResource

RETRY_SECONDS = (5.0, 15.0)
"""When to ask again, drawn anew for each refusal, so that the refused do not come back together."""


@dataclass(eq=False)
class Ticket:
    """A place in the queue, then one of the sandboxes.

    `shared`: what the task needs to itself, or a slot of; `slots` has, by its key, the one that it got.
    """

    admission: Admission
    task: str
    shared: Sequence[SharedResource] = ()
    admitted: anyio.Event = field(default_factory=anyio.Event)
    slots: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def accounts(self) -> dict[str, str]:
        """Its slots of accounts, by their names in the suite's settings."""
        return {each.account: self.slots[each.key] for each in self.shared if each.account is not None}

    @property
    def waits_for(self) -> str | None:
        """What stands between it and its place, for people; None where it has one, or never will."""
        return self.admission.waits_for(self)


class Admission:
    """Counts what lives: a ticket is in the queue or in a place, and nowhere once it is given back."""

    def __init__(self, *, max_sandboxes: int, max_opening: int, max_queue: int) -> None:
        self._places = max_sandboxes
        self._queue_length = max_queue
        self._queue: list[Ticket] = []
        self._active: set[Ticket] = set()
        self.opening = anyio.CapacityLimiter(max_opening)
        """Held while a sandbox is being opened and set up."""

    @property
    def active(self) -> int:
        """Sandboxes in use."""
        return len(self._active)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def reserve(self, task: str, shared: Sequence[SharedResource] = ()) -> Ticket:
        """A ticket, at once. Raises AtCapacityError when neither a place nor the queue has room."""
        ticket = Ticket(self, task, shared)
        self._queue.append(ticket)
        self._admit()
        if not ticket.admitted.is_set() and len(self._queue) > self._queue_length:
            why = ticket.waits_for
            self._queue.remove(ticket)
            seconds = round(random.uniform(*RETRY_SECONDS), 1)
            raise AtCapacityError(
                f"the server is full: {len(self._active)} of {self._places} sandboxes in use, "
                f"{len(self._queue)} episodes waiting{f' ({task} for {why})' if shared and why else ''}; "
                f"ask again in {seconds:.0f} s",
                retryAfterSeconds=seconds,
                sandboxes=self._places,
                active=len(self._active),
                waiting=len(self._queue),
            )
        return ticket

    def refuse_if_full(self) -> None:
        """Raise AtCapacityError if `reserve` would, whatever the task."""
        self.give_back(self.reserve(""))

    @asynccontextmanager
    async def place(self, ticket: Ticket) -> AsyncGenerator[None]:
        """Wait for the ticket's turn; the place is free again on exit."""
        try:
            await ticket.admitted.wait()
            yield
        finally:
            self.give_back(ticket)

    def give_back(self, ticket: Ticket) -> None:
        """Leave the queue or the place; nothing happens where it has been left already."""
        if ticket in self._queue:
            self._queue.remove(ticket)
        self._active.discard(ticket)
        self._admit()

    def waits_for(self, ticket: Ticket) -> str | None:
        """See `Ticket.waits_for`."""
        if ticket not in self._queue:
            return None
        before = self._queue[: self._queue.index(ticket)]
        for shared in ticket.shared:
            users = [other for other in self._active if shared.key in other.slots]
            ahead = [other for other in before if any(shared.key == its.key for its in other.shared)]
            if users and len(users) + len(ahead) >= len(shared.slots):
                waiting = f", and {len(ahead)} more before this one" if ahead else ""
                return f"{shared.name}, which {_named(users)} {_has(users)}{waiting}"
        return (
            f"a sandbox: {len(self._active)} of {self._places} are in use, "
            f"and {len(before)} episodes wait before this one"
        )

    def _admit(self) -> None:
        """Give places in the order of the queue; who waits for something that is shared keeps nobody from
        a place, and all who came later from the slot that it waits for."""
        taken: dict[str, set[str]] = {}
        for ticket in self._active:
            for key, slot in ticket.slots.items():
                taken.setdefault(key, set()).add(slot)
        for ticket in list(self._queue):
            if len(self._active) >= self._places:
                return
            free = {shared.key: _free(shared, taken) for shared in ticket.shared}
            slots = {key: slot for key, slot in free.items() if slot is not None}
            for key, slot in slots.items():
                taken.setdefault(key, set()).add(slot)
            if len(slots) == len(free):
                self._queue.remove(ticket)
                self._active.add(ticket)
                ticket.slots = slots
                ticket.admitted.set()


def _free(shared: SharedResource, taken: dict[str, set[str]]) -> str | None:
    return next((slot for slot in shared.slots if slot not in taken.get(shared.key, ())), None)


def _named(tickets: Iterable[Ticket]) -> str:
    return " and ".join(sorted({ticket.task for ticket in tickets}))


def _has(tickets: Sequence[Ticket]) -> str:
    return "have" if len({ticket.task for ticket in tickets}) > 1 else "has"
