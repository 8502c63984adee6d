"""Sandboxes that are opened ahead, with their drivers connected, for the episodes that come next.

A sandbox of the pool has run nothing but its driver. It is taken once, and removed afterwards: a used
one never comes back. Sandboxes are interchangeable if they have the same kind, which is
everything of their specification except the name, with the image's digest in place of its name.

Each sandbox has a task of the pool, which opens and removes it, because what a context manager has entered
must be exited in the same task.

Decided 2026-11-22: the pool counts against `max_sandboxes` and gives way. An episode that needs a place gets
one at once, by removing a sandbox of another kind; an episode that is opened cold goes first at the limit on
openings. Labels cannot be changed after a sandbox is created, so that the store, not a label, says which
episode has it; a sandbox of a dead server that is in no row of the store is swept.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Literal, Self, TypeAlias

import anyio
from anyio import CancelScope
from anyio.abc import TaskGroup

from decathlon_mcp.background import background_tasks, run_alone, run_for_ever
from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.errors import DecathlonError, ImageError
from decathlon_mcp.sandboxes.base import Provider, Sandbox, SandboxSpec
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.telemetry.metrics import Metrics

BURST_SECONDS = 30.0
"""Sandboxes that are needed within this time count as needed at once: four openings at a time fill the pool
about as fast as one or two at a time empty it."""
DEMAND_SECONDS = 300.0
"""How long a burst is expected to come again: a step of training takes minutes."""
PREFETCH_SECONDS = 300.0
"""How long a sandbox stays open for a task that a client has announced."""
REFILLS_AT_ONCE = 2
"""Sandboxes that are opened ahead at a time, at most. More would only slow down the episodes."""
RETRY_SECONDS = (1.0, 60.0)
"""Time until the next try after a sandbox could not be opened ahead: doubled from the first to the second."""
BUSY_SECONDS = 2.0
"""While episodes are set up, one sandbox is opened ahead in this time. The episode that has just taken one
needs the processors for its set-up; but under a steady load there is always one that is being set up."""
BLOCKED_SECONDS = 0.5
"""How often the pool looks whether it may open a sandbox while episodes are opened or set up."""
LOOK_SECONDS = 10.0
"""How often it looks for what is not needed any more."""
CHECK_SECONDS = 2.0
"""In this time the driver of a sandbox that is taken must answer. It takes a millisecond."""

WarmSetting: TypeAlias = int | Literal["auto"]
Opened: TypeAlias = tuple[Sandbox, DriverClient]
OpenNew: TypeAlias = Callable[[SandboxSpec], AbstractAsyncContextManager[Opened]]
"""Opens a new sandbox and connects to its driver; both are gone on exit."""

log = logging.getLogger("decathlon.episodes")


@dataclass(frozen=True, slots=True)
class SandboxKind:
    """What sandboxes must have in common to be interchangeable.

    `spec` has no name, and the digest of the image. Everything else of it counts, whatever it is.
    """

    provider: str
    spec: SandboxSpec

    @classmethod
    async def of(cls, provider: Provider, spec: SandboxSpec) -> Self | None:
        """The kind of a sandbox with this specification; None for a provider that cannot have a pool.

        Raises ImageError if the image is missing, or the engine does not answer.
        """
        spec = replace(spec, name="")
        # Where the root is a folder of the sandbox's own, the files in it would have other paths than those
        # in the episode's prompt.
        if provider.root(replace(spec, name="a")) != provider.root(replace(spec, name="b")):
            return None
        if spec.image is None:
            return cls(provider.name, spec)
        digest = await provider.environment(spec.image)
        if digest is None:
            raise ImageError(
                f"image {spec.image} is not on the engine, or the engine does not answer", image=spec.image
            )
        return cls(provider.name, replace(spec, image=digest))


class Demand:
    """How many sandboxes of one kind were needed at about the same time, in the last minutes."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        # Falling counts: an older, smaller one never decides again.
        self._peaks: deque[tuple[float, int]] = deque()

    def add(self, now: float) -> None:
        """One was needed at this time."""
        self._recent.append(now)
        while self._recent[0] <= now - BURST_SECONDS:
            self._recent.popleft()
        count = len(self._recent)
        while self._peaks and self._peaks[-1][1] <= count:
            self._peaks.pop()
        self._peaks.append((now, count))

    def peak(self, now: float) -> int:
        """The largest number within `BURST_SECONDS`, in the last `DEMAND_SECONDS`."""
        while self._peaks and self._peaks[0][0] <= now - DEMAND_SECONDS:
            self._peaks.popleft()
        return self._peaks[0][1] if self._peaks else 0


@dataclass(frozen=True, slots=True)
class Announcement:
    """A sandbox that a client will need. `token`: whose share it counts against."""

    token: str | None
    expires_at: float


class _State(Enum):
    OPENING = auto()
    IDLE = auto()
    TAKEN = auto()
    ENDING = auto()


class PooledSandbox:
    """One sandbox of the pool. The one that takes it calls `remove`, once."""

    def __init__(self, spec: SandboxSpec) -> None:
        self.spec = spec
        self.state = _State.OPENING
        self.reserved = False
        """Whether somebody waits for it, and will take it once it is open."""
        self.settled = anyio.Event()
        """Set once it is open, or will never be."""
        self.gone = anyio.Event()
        self._opened: Opened | None = None
        self._opening = CancelScope()
        self._released = anyio.Event()

    @property
    def opened(self) -> Opened:
        """The sandbox and its driver, once it has been opened."""
        assert self._opened is not None
        return self._opened

    async def run(self, open_new: OpenNew, created: Callable[[], None], ready: Callable[[], None]) -> None:
        """Open it, and remove it once it is released, or its connection ends before it is taken.

        `created` is called when the container exists, and `ready` when the driver has answered. Raises
        DecathlonError if it cannot be opened.
        """
        with self._opening:
            async with open_new(self.spec) as (sandbox, driver), background_tasks() as tasks:
                created()
                await driver.ping()
                self._opened = sandbox, driver
                # It may have been ended meanwhile, and then nobody must take it.
                if self.state is _State.OPENING:
                    self.state = _State.IDLE
                    tasks.start_soon(self._watch, driver)
                    self.settled.set()
                    ready()
                await self._released.wait()

    async def answers(self) -> bool:
        """Whether the driver answers in time."""
        _, driver = self.opened
        with anyio.move_on_after(CHECK_SECONDS):
            try:
                await driver.ping()
            except DecathlonError:
                return False
            return not driver.closed.is_set()
        return False

    def end(self) -> None:
        """Remove it in the background."""
        if self.state is _State.OPENING:
            self._opening.cancel()
        self.state = _State.ENDING
        self._released.set()
        self.settled.set()

    async def remove(self) -> None:
        """Remove it and wait until it is gone, even if the caller is cancelled."""
        self.end()
        with CancelScope(shield=True):
            await self.gone.wait()

    async def _watch(self, driver: DriverClient) -> None:
        await driver.closed.wait()
        if self.state is _State.IDLE:
            self.end()


@dataclass(eq=False, slots=True)
class _Stock:
    """The sandboxes of one kind that are opening or idle, and how many there should be.

    `permanent`: not of an image that its name does not mean any more.
    """

    kind: SandboxKind
    open_new: OpenNew
    permanent: bool = True
    sandboxes: list[PooledSandbox] = field(default_factory=list[PooledSandbox])
    demand: Demand = field(default_factory=Demand)
    announced: list[Announcement] = field(default_factory=list[Announcement])
    failures: int = 0
    retry_at: float = -math.inf

    def target(self, setting: WarmSetting, now: float) -> int:
        """How many sandboxes there should be, if there is room for them."""
        self.announced = [one for one in self.announced if one.expires_at > now]
        if setting == "auto":
            return max(self.demand.peak(now), len(self.announced))
        return max(setting if self.permanent else 0, len(self.announced))

    def next_to_take(self) -> PooledSandbox | None:
        """The one that has been idle for the longest time, else the one that opens for the longest time."""
        free = [one for one in self.sandboxes if not one.reserved and one.state is not _State.ENDING]
        return min(free, key=lambda one: one.state is not _State.IDLE, default=None)

    def used(self, token: str | None, now: float) -> None:
        """An episode of this token needs one."""
        self.demand.add(now)
        if self.announced:
            mine = (one for one in self.announced if one.token == token)
            self.announced.remove(next(mine, self.announced[0]))


class WarmPool:
    """Opens sandboxes ahead. It works inside `running`; before, and after `close`, nothing is opened ahead.

    `setting`: how many of each kind that has been used; `auto`: as many as were needed at once in the last
    minutes, none after some minutes without episodes. `admission` bounds the sandboxes of the pool and of the
    episodes together.
    """

    def __init__(self, setting: WarmSetting, admission: Admission, metrics: Metrics) -> None:
        self._setting: WarmSetting = setting
        self._admission = admission
        self._metrics = metrics
        self._stocks: dict[SandboxKind, _Stock] = {}
        self._digests: dict[tuple[str, str], str | None] = {}
        self._obsolete: set[str | None] = set()
        # Opening, idle or being removed; not those that are taken.
        self._own: set[PooledSandbox] = set()
        self._changed = anyio.Event()
        self._removed = anyio.Event()
        self._tasks: TaskGroup | None = None
        self._closed = False
        # Since when sandboxes are wanted and none has been opened.
        self._wanting_since: float | None = None

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Self]:
        """Sandboxes are opened ahead in the body; on exit all of the pool are gone, also those taken."""
        async with background_tasks() as self._tasks:
            self._tasks.start_soon(run_for_ever, self._maintain)
            try:
                yield self
            finally:
                self.close()

    @property
    def is_open(self) -> bool:
        """Whether sandboxes are opened ahead at all."""
        return self._tasks is not None and not self._closed and self._setting != 0

    @property
    def idle(self) -> int:
        """Number of sandboxes that can be taken."""
        return sum(one.state is _State.IDLE for one in self._own)

    @property
    def opening(self) -> int:
        """Number of sandboxes that are being opened ahead."""
        return sum(one.state is _State.OPENING for one in self._own)

    def close(self) -> None:
        """Open nothing ahead any more, and remove in the background what nobody has taken."""
        self._closed = True
        self._stocks.clear()
        for pooled in [*self._own]:
            pooled.end()

    async def empty(self) -> None:
        """Close it and wait until what nobody has taken is gone."""
        self.close()
        while self._own:
            await self._removed.wait()

    async def take(
        self, provider: Provider, spec: SandboxSpec, open_new: OpenNew, *, token: str | None = None
    ) -> PooledSandbox | None:
        """Take a sandbox of this specification; None if there is none, and then there is room for a new one.

        It has another name. `open_new` opens more of this kind. `token`: whose share the episode uses.
        """
        stock = None
        with suppress(ImageError):  # which the opening will report
            stock = await self._stock(provider, spec, open_new) if self.is_open else None
        pooled = None
        if stock is not None:
            stock.used(token, anyio.current_time())
            pooled = await self._take(stock)
        self._metrics.sandbox_taken("cold" if pooled is None else "warm")
        if pooled is None:
            await self._make_room()
        self._wake()
        return pooled

    async def _make_room(self) -> None:
        """Wait until episodes and pool together are within the limit, by removing sandboxes of the pool."""
        while (unclaimed := self._unclaimed()) and self._excess(unclaimed) > 0:
            # Those still opening first: less work is lost.
            others = sorted(
                (one for one in unclaimed if one.state is not _State.ENDING),
                key=lambda one: one.state is _State.IDLE,
            )
            ending = len(unclaimed) - len(others)
            for victim in others[: max(0, self._excess(unclaimed) - ending)]:
                victim.end()
            # At least one is ending now, so that this event comes.
            await self._removed.wait()

    def _unclaimed(self) -> list[PooledSandbox]:
        """Those of the pool that no episode waits for; an episode that waits for one is counted itself."""
        return [one for one in self._own if not one.reserved]

    def _excess(self, unclaimed: Sequence[PooledSandbox]) -> int:
        """By how many the sandboxes of episodes and pool are above the limit; negative: how many are free."""
        return self._admission.active + len(unclaimed) - self._admission.max_sandboxes

    async def expect(self, provider: Provider, spec: SandboxSpec, open_new: OpenNew) -> None:
        """Open as many sandboxes of this kind ahead as the setting says, before the first episode needs one.

        Raises ImageError if the image is missing, or the engine does not answer.
        """
        if self.is_open and self._setting != "auto":
            await self._stock(provider, spec, open_new)
            self._wake()

    async def announce(
        self, provider: Provider, spec: SandboxSpec, open_new: OpenNew, *, count: int, token: str | None
    ) -> int:
        """Open sandboxes ahead for episodes that this token will start within `PREFETCH_SECONDS`.

        Returns for how many: at most `count`, within the token's share and the limit. Raises ImageError if
        the image is missing, or the engine does not answer.
        """
        if not self.is_open or (stock := await self._stock(provider, spec, open_new)) is None:
            return 0
        now = anyio.current_time()
        announced = [one for one in self._announced() if one.expires_at > now]
        own = sum(one.token == token for one in announced)
        share = self._admission.remaining_share(token) - own
        free = self._admission.max_sandboxes - self._admission.active - len(announced)
        granted = max(0, min(count, share, free))
        stock.announced += [Announcement(token, now + PREFETCH_SECONDS)] * granted
        self._wake()
        return granted

    def _announced(self) -> Iterable[Announcement]:
        return (one for stock in self._stocks.values() for one in stock.announced)

    async def _stock(self, provider: Provider, spec: SandboxSpec, open_new: OpenNew) -> _Stock | None:
        kind = await SandboxKind.of(provider, spec)
        if kind is None:
            return None
        if spec.image is not None and spec.image != kind.spec.image:
            self._note_digest(provider.name, spec.image, kind.spec.image)
        stock = self._stocks.get(kind)
        if stock is None:
            stock = self._stocks[kind] = _Stock(kind, open_new)
        stock.permanent = kind.spec.image not in self._obsolete
        stock.open_new = open_new
        return stock

    def _note_digest(self, provider: str, image: str, digest: str | None) -> None:
        """The image with this name has this digest; what was kept of an older one is not needed any more."""
        former = self._digests.get((provider, image))
        self._digests[provider, image] = digest
        self._obsolete.discard(digest)
        if former is not None and former != digest:
            self._obsolete.add(former)
            for stock in self._stocks.values():
                if stock.kind.spec.image == former:
                    stock.permanent = False

    async def _take(self, stock: _Stock) -> PooledSandbox | None:
        """Take a sandbox whose driver answers. Waits for one that opens: it is ahead of a new one."""
        while (pooled := stock.next_to_take()) is not None:
            pooled.reserved = True
            try:
                await pooled.settled.wait()
            finally:
                pooled.reserved = False
            if pooled.state is not _State.IDLE:
                continue
            pooled.state = _State.TAKEN
            stock.sandboxes.remove(pooled)
            self._own.discard(pooled)
            try:
                answers = await pooled.answers()
            except BaseException:
                self._end_again(pooled)
                raise
            if answers:
                return pooled
            log.warning("a sandbox opened ahead does not answer", extra=fields(name=pooled.spec.name))
            self._end_again(pooled)
        return None

    def _end_again(self, pooled: PooledSandbox) -> None:
        """Remove in the background one that was taken a moment ago."""
        if not pooled.gone.is_set():
            self._own.add(pooled)
            pooled.end()

    def _wake(self) -> None:
        self._changed.set()

    async def _maintain(self) -> None:
        while True:
            self._changed = anyio.Event()
            with anyio.move_on_after(self._adjust()):
                await self._changed.wait()

    def _adjust(self) -> float:
        """End what is not needed and begin what is; returns the seconds until this must be done again."""
        if not self.is_open:
            return math.inf
        now = anyio.current_time()
        for kind, stock in [*self._stocks.items()]:
            target = stock.target(self._setting, now)
            for pooled in stock.sandboxes[target:]:
                if not pooled.reserved:
                    pooled.end()
            stock.sandboxes = [one for one in stock.sandboxes if one.state is not _State.ENDING]
            if target == 0 and not stock.sandboxes:
                del self._stocks[kind]
        while (stock := self._neediest(now)) is not None:
            if self._wanting_since is None:
                self._wanting_since = now
            if not self._may_open(now - self._wanting_since):
                return BLOCKED_SECONDS
            self._begin(stock)
            self._wanting_since = now
        self._wanting_since = None
        if not self._stocks:
            return math.inf
        retries = (stock.retry_at - now for stock in self._stocks.values() if stock.retry_at > now)
        return min([LOOK_SECONDS, *retries])

    def _may_open(self, wanting_seconds: float) -> bool:
        """Whether a sandbox may be opened ahead now: there is room for it, and no episode waits for that.

        `wanting_seconds`: how long one has been wanted.
        """
        admission = self._admission
        limiter = admission.opening
        spare = 1 if limiter.total_tokens > 1 else 0
        return (
            self._excess(self._unclaimed()) < 0
            and self.opening < REFILLS_AT_ONCE
            and (admission.set_ups.borrowed_tokens == 0 or wanting_seconds >= BUSY_SECONDS)
            and limiter.statistics().tasks_waiting == 0
            and limiter.available_tokens > spare
            and not admission.memory.is_low
        )

    def _neediest(self, now: float) -> _Stock | None:
        """The kind that has the smallest part of what it should have."""
        ratios = [
            (len(stock.sandboxes) / target, stock)
            for stock in self._stocks.values()
            if (target := stock.target(self._setting, now)) > len(stock.sandboxes) and stock.retry_at <= now
        ]
        return min(ratios, key=lambda ratio: ratio[0])[1] if ratios else None

    def _begin(self, stock: _Stock) -> None:
        assert self._tasks is not None
        pooled = PooledSandbox(replace(stock.kind.spec, name=f"pooled-{secrets.token_hex(8)}"))
        stock.sandboxes.append(pooled)
        self._own.add(pooled)
        self._admission.opening.acquire_on_behalf_of_nowait(pooled)
        self._tasks.start_soon(run_alone, self._run, stock, pooled)

    async def _run(self, stock: _Stock, pooled: PooledSandbox) -> None:
        holds_place = True

        def created() -> None:
            nonlocal holds_place
            if holds_place:
                holds_place = False
                self._admission.opening.release_on_behalf_of(pooled)

        def ready() -> None:
            stock.failures = 0
            self._wake()

        try:
            await pooled.run(stock.open_new, created, ready)
        except DecathlonError as error:
            if pooled.state is _State.OPENING:
                self._failed(stock, error)
        except Exception:
            log.exception("a sandbox opened ahead failed", extra=fields(name=pooled.spec.name))
            if pooled.state is _State.OPENING:
                self._failed(stock, None)
        finally:
            created()
            pooled.end()
            if pooled in stock.sandboxes:
                stock.sandboxes.remove(pooled)
            self._own.discard(pooled)
            pooled.gone.set()
            removed, self._removed = self._removed, anyio.Event()
            removed.set()
            self._wake()

    def _failed(self, stock: _Stock, error: DecathlonError | None) -> None:
        first, longest = RETRY_SECONDS
        seconds = min(longest, first * 2**stock.failures)
        stock.failures += 1
        stock.retry_at = anyio.current_time() + seconds
        if error is not None:
            log.warning(
                "a sandbox could not be opened ahead",
                extra=fields(image=stock.kind.spec.image, why=error.message, retry_seconds=seconds),
            )
