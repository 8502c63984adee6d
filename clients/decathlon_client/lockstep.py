"""Episodes in lockstep: all open at the same time, played one turn of all at a time.

For trainers that generate for a whole batch at once.

Decided 2026-11-21: `batch.py` is not built on this module. A lockstep keeps every sandbox until the slowest
episode is done; a batch closes each sandbox when its episode is graded and opens the next. They share
`opener.py`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import anyio
from anyio.abc import TaskStatus

from decathlon_client.client_episode import Episode
from decathlon_client.client_errors import ClientError
from decathlon_client.client_values import JsonObject, Reply, Task, Verdict
from decathlon_client.opener import EpisodeOpener
from decathlon_client.task_groups import background_tasks

Call: TypeAlias = tuple[str, JsonObject | str | None]
"""A tool's name and its arguments, as an object or as the JSON text that a model wrote."""


class Slot:
    """One task of a lockstep: its episode, or its `failure` if there is none, and its `verdict`."""

    index: int
    task: str
    failure: ClientError | None
    verdict: Verdict | None

    def __init__(self, index: int, task: str) -> None:
        self.index = index
        self.task = task
        self.failure = None
        self.verdict = None
        self._episode: Episode | None = None

    def __repr__(self) -> str:
        return f"<Slot {self.index} of {self.task}: {self.failure or self.verdict or self._episode}>"

    @property
    def episode(self) -> Episode:
        """The episode. Raises the failure if there is none."""
        if self._episode is None:
            raise self.failure or RuntimeError("this slot is not open")
        return self._episode

    @property
    def is_live(self) -> bool:
        """Whether the episode can be played: neither claimed nor failed."""
        return self.failure is None and self._episode is not None and not self._episode.claimed

    async def keep_open(
        self, opener: EpisodeOpener, draw: Mapping[str, Any] | None, *, task_status: TaskStatus[None]
    ) -> None:
        """Open the episode and keep it open until cancelled; started when it is ready or has failed.

        `draw`: what is opened instead of the task.
        """
        try:
            async with opener.open(None if draw else self.task, draw=draw) as self._episode:
                task_status.started()
                await anyio.sleep_forever()
        except ClientError as error:
            self.failure = error
            task_status.started()

    async def act(self, calls: Sequence[Call], timeout: float | None) -> list[Reply]:
        """Make the calls in order. If the episode ends before the last one, that is the slot's failure."""
        replies: list[Reply] = []
        if self.failure is None:
            try:
                for name, arguments in calls:
                    replies.append(await self.episode.act(name, arguments, timeout=timeout))
            except ClientError as error:
                self.failure = error
        return replies

    async def evaluate(self) -> None:
        """Grade the attempt once; sets `verdict` or `failure`."""
        if self.failure is None and self.verdict is None:
            try:
                self.verdict = await self.episode.evaluate()
            except ClientError as error:
                self.failure = error


class Lockstep:
    """The slots of a lockstep, in the order of the tasks; made by `Decathlon.lockstep`."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    @property
    def live(self) -> list[Slot]:
        """The slots that can still be played."""
        return [slot for slot in self._slots if slot.is_live]

    async def call(
        self, calls: Mapping[Slot, Sequence[Call]], *, timeout: float | None = None
    ) -> dict[Slot, list[Reply]]:
        """Play one turn: each slot's calls in order, the slots in parallel. Waits for the last one.

        Returns a reply for every call, as `Episode.act` does: failures of tools and mistakes of the model are
        replies too. If an episode cannot go on there are fewer replies, and the slot's `failure` says why.
        `timeout` applies to each call, in seconds.
        """
        replies: dict[Slot, list[Reply]] = {slot: [] for slot in calls}

        async def act(slot: Slot, slot_calls: Sequence[Call]) -> None:
            replies[slot] = await slot.act(slot_calls, timeout)

        async with anyio.create_task_group() as tasks:
            for slot, slot_calls in calls.items():
                tasks.start_soon(act, slot, slot_calls)
        return replies

    async def evaluate(self) -> list[Verdict | None]:
        """Grade all attempts in parallel; later calls return the same. Claims open attempts.

        Returns the verdicts in the order of the tasks; None if there is none, and the slot's `failure` says
        why.
        """
        async with anyio.create_task_group() as tasks:
            for slot in self._slots:
                tasks.start_soon(slot.evaluate)
        return [slot.verdict for slot in self._slots]


@asynccontextmanager
async def open_lockstep(
    opener: EpisodeOpener, tasks: Iterable[str | Task], *, draw: Mapping[str, Any] | None = None
) -> AsyncGenerator[Lockstep]:
    """Open an episode of each task in parallel; on exit all are closed in parallel.

    `draw`: what is opened instead of the tasks, which then only name the slots.
    """
    slots = [Slot(n, task if isinstance(task, str) else task.id) for n, task in enumerate(tasks)]
    async with background_tasks() as owners:
        async with anyio.create_task_group() as starting:
            for slot in slots:
                starting.start_soon(owners.start, slot.keep_open, opener, draw)
        with opener.close_budget.shorten_on_interrupt():
            yield Lockstep(slots)
