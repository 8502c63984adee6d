"""Admission: a limit on sandboxes, a bounded queue, and tasks that share an account one at a time."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio

from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.suites.sharing import SharedResource

RETRY_SECONDS = (5.0, 15.0)
"""Range of the retry time; each refusal draws from it, so that refused clients do not retry together."""


@dataclass(eq=False)
class Ticket:
    """A place in the queue and, once `admitted` is set, the right to open a sandbox.

    `shared`: the shared resources that the task uses. `slots`: the slot of each that it got, by key.
    """

    admission: Admission
    task: str
    shared: Sequence[SharedResource] = ()
    admitted: anyio.Event = field(default_factory=anyio.Event)
    slots: dict[str, str] = field(default_factory=dict[str, str])

    @property
    def accounts(self) -> dict[str, str]:
        """The slots of accounts, by the accounts' names in the suite's settings."""
        return {
            resource.account: self.slots[resource.key]
            for resource in self.shared
            if resource.account is not None
        }

    @property
    def waiting_for(self) -> str | None:
        """What the ticket is queued for, as text for people; None if it is not queued."""
        return self.admission.waiting_for(self)


class Admission:
    """Admits tickets. A ticket is queued, then active, and neither once it is released."""

    def __init__(self, *, max_sandboxes: int, max_opening: int, max_queue: int) -> None:
        self._max_sandboxes = max_sandboxes
        self._max_queue = max_queue
        self._queue: list[Ticket] = []
        self._active: set[Ticket] = set()
        self.opening = anyio.CapacityLimiter(max_opening)
        """Hold it while opening and setting up a sandbox."""

    @property
    def active(self) -> int:
        """Number of admitted tickets, each of which has a sandbox or opens one."""
        return len(self._active)

    @property
    def queued(self) -> int:
        """Number of tickets in the queue."""
        return len(self._queue)

    def reserve(self, task: str, shared: Sequence[SharedResource] = ()) -> Ticket:
        """Create a ticket without waiting. Raises AtCapacityError if it had to wait in a full queue."""
        ticket = Ticket(self, task, shared)
        self._queue.append(ticket)
        self._admit()
        if not ticket.admitted.is_set() and len(self._queue) > self._max_queue:
            reason = ticket.waiting_for
            self._queue.remove(ticket)
            seconds = round(random.uniform(*RETRY_SECONDS), 1)
            details = f" ({task} for {reason})" if shared and reason else ""
            raise AtCapacityError(
                f"the server is full: {len(self._active)} of {self._max_sandboxes} sandboxes in use, "
                f"{len(self._queue)} episodes waiting{details}; "
                f"ask again in {seconds:.0f} s",
                retryAfterSeconds=seconds,
                sandboxes=self._max_sandboxes,
                active=len(self._active),
                waiting=len(self._queue),
            )
        return ticket

    def refuse_if_full(self) -> None:
        """Raise AtCapacityError if a task without shared resources could not be reserved now."""
        self.release(self.reserve(""))

    @asynccontextmanager
    async def admit(self, ticket: Ticket) -> AsyncGenerator[None]:
        """Wait until the ticket is admitted; release it on exit."""
        try:
            await ticket.admitted.wait()
            yield
        finally:
            self.release(ticket)

    def release(self, ticket: Ticket) -> None:
        """Remove the ticket and admit others. Does nothing for a ticket released before."""
        if ticket in self._queue:
            self._queue.remove(ticket)
        self._active.discard(ticket)
        self._admit()

    def waiting_for(self, ticket: Ticket) -> str | None:
        """See `Ticket.waiting_for`."""
        if ticket not in self._queue:
            return None
        earlier = self._queue[: self._queue.index(ticket)]
        for shared in ticket.shared:
            users = [other for other in self._active if shared.key in other.slots]
            ahead = [other for other in earlier if any(shared.key == its.key for its in other.shared)]
            if users and len(users) + len(ahead) >= len(shared.slots):
                waiting = f", and {len(ahead)} more before this one" if ahead else ""
                return f"{shared.name}, which {_task_names(users)} {_have(users)}{waiting}"
        return (
            f"a sandbox: {len(self._active)} of {self._max_sandboxes} are in use, "
            f"and {len(earlier)} episodes wait before this one"
        )

    def _admit(self) -> None:
        """Admit tickets in the order of the queue."""
        # A ticket that waits for a shared resource does not block tickets behind it that do not use the
        # resource. But it keeps the slots that are free for it: otherwise a ticket that needs two resources
        # could be overtaken for ever by tickets that need one.
        taken: dict[str, set[str]] = {}
        for ticket in self._active:
            for key, slot in ticket.slots.items():
                taken.setdefault(key, set()).add(slot)
        for ticket in list(self._queue):
            if len(self._active) >= self._max_sandboxes:
                return
            free = {shared.key: _free_slot(shared, taken) for shared in ticket.shared}
            slots = {key: slot for key, slot in free.items() if slot is not None}
            for key, slot in slots.items():
                taken.setdefault(key, set()).add(slot)
            if len(slots) == len(free):
                self._queue.remove(ticket)
                self._active.add(ticket)
                ticket.slots = slots
                ticket.admitted.set()


def _free_slot(shared: SharedResource, taken: dict[str, set[str]]) -> str | None:
    return next((slot for slot in shared.slots if slot not in taken.get(shared.key, ())), None)


def _task_names(tickets: Iterable[Ticket]) -> str:
    return " and ".join(sorted({ticket.task for ticket in tickets}))


def _have(tickets: Sequence[Ticket]) -> str:
    return "have" if len({ticket.task for ticket in tickets}) > 1 else "has"
