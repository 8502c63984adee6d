"""Sandboxes that are opened ahead, with their drivers connected, for the episodes that come next.

A sandbox of the pool has run nothing but its driver. It is taken once, by an agent or a grader, and removed
afterwards. Sandboxes are of one kind, and interchangeable, if everything of their specification is the same
except the name.

Each sandbox has a task of the pool, which opens and removes it, because what a context manager has entered
must be exited in the same task.

Decided 2026-11-22: the pool counts against `max_sandboxes` and gives way. Labels cannot be changed after a
sandbox is created, so that the store, not a label, says which episode has it; a sandbox of a dead server that
is in no row of the store is swept.

Decided 2026-11-24: how many are open ahead is a setting, and not guessed from what was needed before. No
episode waits for the pool: not for a place among the openings, of which the pool takes none, and not until a
sandbox that gives way is gone. So there may be more than `max_sandboxes` for as long as a removal takes.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Self

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from decathlon_mcp.background import background_tasks, run_alone, run_for_ever
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.extensions import Opened, OpenNew, SandboxSource
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.plugins.settings import PoolSettings
from decathlon_mcp.sandboxes.base import Provider, SandboxSpec
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import fields

REFILLS_AT_ONCE = 2
"""Sandboxes that are opened ahead at a time, at most. More would only slow down the episodes."""
BUSY_SECONDS = 2.0
"""While episodes are set up, one sandbox is opened ahead in this time. The episode that has just taken one
needs the processors for its set-up; but under a steady load there is always an episode that is being set
up."""
LOOK_SECONDS = 0.5
"""How often the pool looks whether it may open a sandbox, and whether memory is low."""
RETRY_SECONDS = 10.0
"""Time until the next try of a kind that could not be opened, or that gave way to memory."""
CHECK_SECONDS = 1.0
"""In this time the driver of a sandbox that is taken must answer. It takes a millisecond."""

log = logging.getLogger("decathlon.episodes")


@dataclass(eq=False, slots=True)
class _Kind:
    """What sandboxes have in common that are interchangeable.

    `spec` has no name, and the digest that its image has now. None is opened before `retry_at`, a time of the
    event loop.
    """

    spec: SandboxSpec
    open_new: OpenNew
    retry_at: float = -math.inf


class _State(Enum):
    OPENING = auto()
    IDLE = auto()
    TAKEN = auto()
    ENDING = auto()


class PooledSandbox:
    """One sandbox of the pool. Its taker calls `remove`, once."""

    def __init__(self, kind: _Kind) -> None:
        self.kind = kind
        self.spec = replace(kind.spec, name=f"pooled-{secrets.token_hex(8)}")
        self.state = _State.OPENING
        self.gone = anyio.Event()
        self._opened: Opened | None = None
        self._opening = CancelScope()
        self._released = anyio.Event()

    async def run(self, ready: Callable[[], None]) -> None:
        """Open it, and remove it once it is released, or its connection ends before it is taken.

        `ready` is called when the driver has answered. Raises DecathlonError if it cannot be opened.
        """
        with self._opening:
            async with self.kind.open_new(self.spec) as (sandbox, driver), background_tasks() as tasks:
                await driver.ping()
                # It may have been ended meanwhile, and then nobody must take it.
                if self.state is _State.OPENING:
                    self._opened = sandbox, driver
                    self.state = _State.IDLE
                    tasks.start_soon(self._watch, driver)
                    ready()
                await self._released.wait()

    async def answering(self) -> Opened | None:
        """The sandbox and its driver, which has been opened; None if the driver does not answer in time."""
        assert self._opened is not None
        _, driver = self._opened
        with anyio.move_on_after(CHECK_SECONDS), suppress(DecathlonError):
            await driver.ping()
            return None if driver.closed.is_set() else self._opened
        return None

    def end(self) -> None:
        """Remove it in the background."""
        if self.state is _State.OPENING:
            self._opening.cancel()
        self.state = _State.ENDING
        self._released.set()

    async def remove(self) -> None:
        """Remove it and wait until it is gone, even if the caller is cancelled."""
        self.end()
        with CancelScope(shield=True):
            await self.gone.wait()

    async def _watch(self, driver: DriverClient) -> None:
        await driver.closed.wait()
        if self.state is _State.IDLE:
            self.end()


class SandboxPool(SandboxSource):
    """Opens `size` sandboxes ahead of each kind that has been needed.

    It works inside `running`; before, and after `close`, nothing is opened ahead. `admission` bounds the
    sandboxes of the pool and of the episodes together.
    """

    def __init__(self, size: int, admission: Admission) -> None:
        self._size = size
        self._admission = admission
        # By the provider's name and a specification without a name.
        self._kinds: dict[tuple[str, SandboxSpec], _Kind] = {}
        # Also taken sandboxes, and sandboxes that are being removed; the oldest first.
        self._sandboxes: list[PooledSandbox] = []
        self._changed = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._closed = False
        # Since when sandboxes are missing and none has been opened.
        self._missing_since: float | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Sandboxes are opened ahead in the body; on exit all of the pool are gone, also taken sandboxes."""
        async with background_tasks() as self._tasks:
            if self.is_open:
                self._tasks.start_soon(run_for_ever, self._maintain)
            try:
                yield self
            finally:
                self.close()

    @property
    def is_open(self) -> bool:
        """Whether sandboxes are opened ahead at all."""
        return self._tasks is not None and not self._closed and self._size > 0

    @property
    def idle(self) -> int:
        """Number of sandboxes that can be taken."""
        return len(self._in(_State.IDLE))

    @property
    def opening(self) -> int:
        """Number of sandboxes that are being opened ahead."""
        return len(self._in(_State.OPENING))

    def close(self) -> None:
        """Open nothing ahead any more, and remove in the background what nobody has taken."""
        self._closed = True
        for pooled in self._in(_State.OPENING, _State.IDLE):
            pooled.end()

    async def empty(self) -> None:
        """Close it and wait until what nobody has taken is gone."""
        self.close()
        for pooled in self._in(_State.ENDING):
            await pooled.gone.wait()

    async def expect(self, provider: Provider, spec: SandboxSpec, open_new: OpenNew) -> None:
        """Open sandboxes of this specification ahead, before the first episode needs one."""
        if self.is_open:
            await self._need(provider, spec, open_new)

    async def take(
        self, provider: Provider, spec: SandboxSpec, open_new: OpenNew, *, image: str | None = None
    ) -> tuple[Opened, Callable[[], Awaitable[None]]] | None:
        """Take a sandbox of this specification; None if there is none.

        It has another name. `open_new` opens more of this kind. `image`: the digest that the image of `spec`
        must have, if not its present digest.
        """
        kind = await self._need(provider, spec, open_new) if self.is_open else None
        if kind is None:
            return None
        # The sandbox that has been open for the longest time, if its driver answers.
        image = image or kind.spec.image
        idle = (one for one in self._in(_State.IDLE) if one.kind is kind and one.spec.image == image)
        if (pooled := next(idle, None)) is None:
            return None
        pooled.state, opened = _State.TAKEN, None
        try:
            opened = await pooled.answering()
        finally:
            if opened is None:
                pooled.end()
        if opened is None:
            log.warning("a sandbox opened ahead does not answer", extra=fields(name=pooled.spec.name))
            return None
        return opened, pooled.remove

    async def _need(self, provider: Provider, spec: SandboxSpec, open_new: OpenNew) -> _Kind | None:
        """The kind of this specification, whose sandboxes are opened ahead from now on.

        None if the image is missing, which an opening will report, or if the provider cannot have a pool.
        """
        spec = replace(spec, name="")
        # Where the root is a folder of the sandbox's own, the files in it would have other paths than in the
        # episode's prompt.
        if provider.root(replace(spec, name="a")) != provider.root(replace(spec, name="b")):
            return None
        digest = None if spec.image is None else await provider.environment(spec.image)
        if spec.image is not None and digest is None:
            return None
        kind = self._kinds.setdefault((provider.name, spec), _Kind(spec, open_new))
        kind.spec, kind.open_new = replace(spec, image=digest), open_new
        self._wake()
        return kind

    def give_way(self) -> None:
        """Bring episodes and pool together to the limit, by removing sandboxes of the pool."""
        # Sandboxes that are still opening first: less work is lost.
        free = [*self._in(_State.OPENING), *self._in(_State.IDLE)]
        excess = self._admission.active + len(free) - self._admission.max_sandboxes
        for pooled in free[: max(0, excess)]:
            pooled.end()

    def _in(self, *states: _State) -> list[PooledSandbox]:
        return [one for one in self._sandboxes if one.state in states]

    async def _maintain(self) -> None:
        while True:
            self._changed = anyio.Event()
            self._adjust(anyio.current_time())
            with anyio.move_on_after(LOOK_SECONDS):
                await self._changed.wait()

    def _adjust(self, now: float) -> None:
        """End what is obsolete or in the way, and begin what is missing."""
        is_low = self._admission.memory.is_low  # then episodes wait for memory
        for pooled in self._in(_State.OPENING, _State.IDLE):
            if is_low:
                pooled.kind.retry_at = now + RETRY_SECONDS
            if is_low or pooled.spec.image != pooled.kind.spec.image:
                pooled.end()
        while (kind := self._neediest(now)) is not None:
            if self._missing_since is None:
                self._missing_since = now
            if is_low or not self._may_open(now - self._missing_since):
                return
            self._begin(kind)
            self._missing_since = now
        self._missing_since = None

    def _neediest(self, now: float) -> _Kind | None:
        """The kind that has the fewest sandboxes, if it has too few."""
        counts = Counter(pooled.kind for pooled in self._in(_State.OPENING, _State.IDLE))
        kinds = (kind for kind in self._kinds.values() if counts[kind] < self._size and kind.retry_at <= now)
        return min(kinds, key=counts.__getitem__, default=None) if self.is_open else None

    def _may_open(self, missing_seconds: float) -> bool:
        """Whether a sandbox may be opened ahead now: there is room for it, and it holds up no episode.

        `missing_seconds`: how long one has been missing.
        """
        admission = self._admission
        own = self._in(_State.OPENING, _State.IDLE, _State.ENDING)
        return (
            admission.active + len(own) < admission.max_sandboxes
            and self.opening < REFILLS_AT_ONCE
            and (admission.set_ups.borrowed_tokens == 0 or missing_seconds >= BUSY_SECONDS)
            and admission.opening.available_tokens > 0
            and admission.opening_graders.available_tokens > 0
        )

    def _begin(self, kind: _Kind) -> None:
        assert self._tasks is not None
        pooled = PooledSandbox(kind)
        self._sandboxes.append(pooled)
        self._tasks.start_soon(run_alone, self._run, pooled)

    async def _run(self, pooled: PooledSandbox) -> None:
        try:
            await pooled.run(self._wake)
        except DecathlonError as error:
            if pooled.state is _State.OPENING:
                log.warning(
                    "a sandbox could not be opened ahead",
                    extra=fields(image=pooled.spec.image, why=error.message, retry_seconds=RETRY_SECONDS),
                )
        finally:
            if pooled.state is _State.OPENING:
                pooled.kind.retry_at = anyio.current_time() + RETRY_SECONDS
            pooled.end()
            self._sandboxes.remove(pooled)
            pooled.gone.set()
            self._wake()

    def _wake(self) -> None:
        self._changed.set()


def create(settings: Settings, admission: Admission) -> SandboxPool | None:
    """The pool of a server, of the size in its settings; None without one."""
    size = settings.of(PoolSettings).pool
    return SandboxPool(size, admission) if size else None
