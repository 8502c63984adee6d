"""Admission: a limit on sandboxes, a bounded queue, and tasks that share an account one at a time.

Decided 2026-11-22: with several tokens, each may take a fixed part of the sandboxes and of the queue, and a
free place goes to the token that has the fewest. Fairness in the queue alone is not enough: episodes are
never interrupted, so that a token that takes all places while nobody else asks would keep them for hours.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice

import anyio

from decathlon_mcp.background import Flag, LazyTimer
from decathlon_mcp.errors import AtCapacityError
from decathlon_mcp.sandboxes.machine_limits import MemoryFloor
from decathlon_mcp.suites.suite import SharedResource

SHARE_PER_TOKEN = 0.75
"""The largest part that one of several tokens may take of the sandboxes, the queue, the sessions, the memory
for bodies and the places of long forms."""
RETRY_SECONDS = (5.0, 15.0)
"""Range of the retry time; each refusal draws from it, so that refused clients do not retry together."""
SET_UPS_PER_OPENING = 2
"""While the drivers and servers of some episodes start, sandboxes are created for as many others. More than
that only makes each slower."""
LOOK_SECONDS = 1.0
"""How often the queue looks for descriptors while it waits for them."""
MAX_READERS = 2
"""Threads that read kept replies. A long one takes tens of milliseconds, most of it with Python's lock: with
many of them at once, the event loop would hardly get the lock."""
CAPTURES_PER_OPENING = 8
"""A capture mostly waits, for servers to end. But hundreds at once take longer than one of them may."""


@dataclass(eq=False)
class Ticket:
    """A place in the queue and, once `admitted` is set, the right to open a sandbox.

    `shared`: the shared resources that the task uses. `slots`: the slot of each that it got, by key. `token`:
    whose share it uses; None if there is nobody to share with.
    """

    admission: Admission
    task: str
    shared: Sequence[SharedResource] = ()
    token: str | None = None
    admitted: Flag = field(default_factory=Flag)
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
        """What the ticket is queued for, as text for people; None for a ticket that is not queued."""
        return self.admission.waiting_for(self)


class Admission:
    """Admits tickets. A ticket is queued, then active, and neither once it is released."""

    def __init__(
        self,
        *,
        max_sandboxes: int,
        max_opening: int,
        max_queue: int,
        share_per_token: float = SHARE_PER_TOKEN,
        memory: MemoryFloor | None = None,
        room: Callable[[], float] | None = None,
    ) -> None:
        """`room`: how many sandboxes this process has descriptors for now; None: enough."""
        self.share_per_token = share_per_token
        self.memory = memory or MemoryFloor()
        """To wait for before an agent's sandbox opens or one of its servers starts. Graders do not wait: they
        free memory."""
        self._max_sandboxes = max_sandboxes
        self._room = room
        self._look_again = LazyTimer(self._admit)
        self._max_queue = max_queue
        self._queue: list[Ticket] = []
        self._active: set[Ticket] = set()
        self._order: dict[Ticket, tuple[int, int]] | None = None
        """See `_fair_order`; None after each change of the queue or of what is active."""
        self.opening = anyio.CapacityLimiter(max_opening)
        """Hold it while the provider creates an agent's sandbox, and nothing longer."""
        self.opening_graders = anyio.CapacityLimiter(max_opening)
        """The same for a grader's sandbox: a claimed attempt does not wait behind hundreds of openings."""
        self.captures = anyio.CapacityLimiter(CAPTURES_PER_OPENING * max_opening)
        """Hold it while a claimed attempt's processes are stopped and its workspace is copied, and until its
        sandbox is removed. Stopping and copying have fixed time limits, even on a busy machine; beyond them
        the attempt may be forfeited. More removals at once would delay the removal of graders' sandboxes, and
        with it the verdicts."""
        self.starts_ahead = anyio.CapacityLimiter(max(1, max_opening // 2))
        """Hold it, and then `set_ups`, while a server starts ahead of its first call. So a set-up,
        for which a client waits, has at most this many of them before it."""
        self.readers = anyio.CapacityLimiter(MAX_READERS)
        """Hold it while a thread reads a reply that was kept."""
        self.set_ups = anyio.CapacityLimiter(SET_UPS_PER_OPENING * max_opening)
        """Hold it while an episode is set up, `opening` included. It bounds how many scripts of tasks run and
        how many of their servers start at once."""
        self._server_starts = anyio.CapacityLimiter(SET_UPS_PER_OPENING * max_opening)

    @asynccontextmanager
    async def starting_server(self) -> AsyncGenerator[None]:
        """Hold it while a server of a ready episode starts, at its first call or ahead of it.

        Apart from `set_ups`, whose scripts may take minutes. Raises AtCapacityError while there is too little
        memory.
        """
        async with self._server_starts:
            await self.memory.wait()
            yield

    @property
    def max_sandboxes(self) -> int:
        """Limit of `active`: the setting, or less while this process has too few descriptors for it."""
        room = math.inf if self._room is None else self._room()
        return int(min(self._max_sandboxes, room))

    @property
    def active(self) -> int:
        """Number of admitted tickets, each of which has a sandbox or opens one."""
        return len(self._active)

    @property
    def queued(self) -> int:
        """Number of tickets in the queue."""
        return len(self._queue)

    def reserve(self, task: str, shared: Sequence[SharedResource] = (), token: str | None = None) -> Ticket:
        """Create a ticket without waiting.

        Raises AtCapacityError if it had to wait and the queue, or the token's share of it, is full.
        """
        ticket = self.restore(task, shared, token, None)
        queued = sum(other.token == token for other in self._queue)
        if not ticket.admitted.is_set() and (
            len(self._queue) > self._max_queue or queued > self._share(token, self._max_queue)
        ):
            reason = ticket.waiting_for
            self._queue.remove(ticket)
            self._order = None
            seconds = round(random.uniform(*RETRY_SECONDS), 1)
            details = f" ({task} for {reason})" if shared and reason else ""
            used, share = self._used_by(token), self._share(token, self.max_sandboxes)
            own = "" if token is None else f"; your token uses {used} of the {share} sandboxes of its share"
            raise AtCapacityError(
                f"the server is full: {len(self._active)} of {self.max_sandboxes} sandboxes in use"
                f"{self._describe_room()}, {len(self._queue)} episodes waiting{details}"
                f"{own}; ask again in {seconds:.0f} s",
                retryAfterSeconds=seconds,
                sandboxes=self.max_sandboxes,
                active=len(self._active),
                waiting=len(self._queue),
            )
        return ticket

    def restore(
        self,
        task: str,
        shared: Sequence[SharedResource],
        token: str | None,
        slots: Mapping[str, str] | None,
    ) -> Ticket:
        """A ticket for an episode that an earlier server has admitted to these slots, or had in its queue.

        It takes its place even if the limits are lower now. `slots` None: it was in the queue.
        """
        ticket, self._order = Ticket(self, task, shared, token), None
        if slots is None:
            self._queue.append(ticket)
            self._admit()
        else:
            ticket.slots = dict(slots)
            self._active.add(ticket)
            ticket.admitted.set()
        return ticket

    def refuse_if_full(self, token: str | None = None) -> None:
        """Raise AtCapacityError if a task without shared resources could not be reserved now."""
        self.release(self.reserve("", token=token))

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
        self._order = None
        self._admit()

    def waiting_for(self, ticket: Ticket) -> str | None:
        """See `Ticket.waiting_for`."""
        order = self._fair_order()
        if ticket not in order:
            return None
        earlier, own = order[ticket]
        for shared in ticket.shared:
            users = [other for other in self._active if shared.key in other.slots]
            before = islice(order, earlier)
            ahead = [other for other in before if any(shared.key == its.key for its in other.shared)]
            if users and len(users) + len(ahead) >= len(shared.slots):
                names = sorted({user.task for user in users})
                waiting = f", and {len(ahead)} more before this one" if ahead else ""
                has = "have" if len(names) > 1 else "has"
                return f"{shared.name}, which {' and '.join(names)} {has}{waiting}"
        used, share = self._used_by(ticket.token), self._share(ticket.token, self.max_sandboxes)
        if used >= share and len(self._active) < self.max_sandboxes:
            return (
                f"a sandbox of its token's share: {used} of {share} are in use, "
                f"and {own} episodes of the token wait before this one"
            )
        return (
            f"a sandbox: {len(self._active)} of {self.max_sandboxes} are in use{self._describe_room()}, "
            f"and {earlier} episodes wait before this one"
        )

    def _describe_room(self) -> str:
        if self.max_sandboxes == self._max_sandboxes:
            return ""
        return f" (the limit of open files has no room for {self._max_sandboxes})"

    def _admit(self) -> None:
        """Admit as many tickets as there are places for."""
        while self._queue and len(self._active) < self.max_sandboxes and (ticket := self._next()) is not None:
            self._queue.remove(ticket)
            self._active.add(ticket)
            self._order = None
            ticket.admitted.set()
        if self._queue and self.max_sandboxes < self._max_sandboxes:
            # Connections that close make room, and nothing says so.
            self._look_again.set(asyncio.get_running_loop().time() + LOOK_SECONDS)

    def _next(self) -> Ticket | None:
        """The ticket to admit next, with its slots; None if each waits for something else than a place."""
        # A ticket that waits for a shared resource does not block tickets behind it that do not use the
        # resource. But it keeps the slots that are free for it: otherwise a ticket that needs two resources
        # could be overtaken for ever by tickets that need one.
        slots_in_use = defaultdict[str, set[str]](set)
        for ticket in self._active:
            for key, slot in ticket.slots.items():
                slots_in_use[key].add(slot)
        active_by_token = Counter(ticket.token for ticket in self._active)
        for ticket in self._fair_order():
            if active_by_token[ticket.token] >= self._share(ticket.token, self.max_sandboxes):
                continue
            free = {shared.key: _free_slot(shared, slots_in_use) for shared in ticket.shared}
            slots = {key: slot for key, slot in free.items() if slot is not None}
            for key, slot in slots.items():
                slots_in_use[key].add(slot)
            if len(slots) == len(free):
                ticket.slots = slots
                return ticket
        return None

    def _fair_order(self) -> Mapping[Ticket, tuple[int, int]]:
        """The queue: tickets of the token with the fewest places first, each token's in order of arrival.

        Each with how many come before it, in all and of its own token.
        """
        # Kept until something changes: lists, and the page each second, ask for every ticket of the queue.
        if self._order is None:
            active_by_token = Counter(ticket.token for ticket in self._active)
            ahead: Counter[str | None] = Counter()
            own: dict[Ticket, int] = {}
            for ticket in self._queue:
                own[ticket] = ahead[ticket.token]
                ahead[ticket.token] += 1
            order = sorted(own, key=lambda ticket: active_by_token[ticket.token] + own[ticket])
            self._order = {ticket: (place, own[ticket]) for place, ticket in enumerate(order)}
        return self._order

    def _used_by(self, token: str | None) -> int:
        return sum(ticket.token == token for ticket in self._active)

    def _share(self, token: str | None, total: int) -> int:
        """How many of `total` a token may take: at least one, if there is one."""
        return total if token is None else share_of(total, self.share_per_token)


def share_of(total: int, share: float) -> int:
    """A token's share of `total`, rounded down, but at least one if there is one."""
    return min(total, max(1, int(total * share)))


def _free_slot(shared: SharedResource, slots_in_use: Mapping[str, set[str]]) -> str | None:
    return next((slot for slot in shared.slots if slot not in slots_in_use[shared.key]), None)
