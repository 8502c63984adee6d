"""Who gets a sandbox, and when: so many at once, a bounded queue, conflicting tasks never side by side."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from decathlon_mcp.errors import AtCapacityError

RETRY_SECONDS = (5.0, 15.0)
"""When to ask again, drawn anew for each refusal, so that the refused do not come back together."""


@dataclass(eq=False)
class Ticket:
    """A place in the queue, then one of the sandboxes."""

    task: str
    conflicts: frozenset[str]
    admitted: anyio.Event = field(default_factory=anyio.Event)


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

    def reserve(self, task: str, conflicts: frozenset[str]) -> Ticket:
        """A ticket, at once. Raises AtCapacityError when neither a place nor the queue has room."""
        ticket = Ticket(task, conflicts)
        self._queue.append(ticket)
        self._admit()
        if not ticket.admitted.is_set() and len(self._queue) > self._queue_length:
            self._queue.remove(ticket)
            seconds = round(random.uniform(*RETRY_SECONDS), 1)
            raise AtCapacityError(
                f"the server is full: {len(self._active)} of {self._places} sandboxes in use, "
                f"{len(self._queue)} episodes waiting; ask again in {seconds:.0f} s",
                retryAfterSeconds=seconds,
                sandboxes=self._places,
                active=len(self._active),
                waiting=len(self._queue),
            )
        return ticket

    def refuse_if_full(self) -> None:
        """Raise AtCapacityError if `reserve` would, whatever the task."""
        self.give_back(self.reserve("", frozenset()))

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

    def waits_for(self, ticket: Ticket) -> list[str]:
        """The running tasks that this one may not run beside."""
        return sorted(active.task for active in self._active if _conflict(active, ticket))

    def _admit(self) -> None:
        for ticket in list(self._queue):
            if len(self._active) >= self._places:
                return
            if any(_conflict(active, ticket) for active in self._active):
                continue
            self._queue.remove(ticket)
            self._active.add(ticket)
            ticket.admitted.set()


def _conflict(one: Ticket, other: Ticket) -> bool:
    return one.task in other.conflicts or other.task in one.conflicts
