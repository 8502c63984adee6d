"""Episodes held together: for trainers that generate for a whole batch at once, a turn of all at a time.

Decided 2026-11-21: the batch (`batch.py`) is not written upon this. What is held together keeps every sandbox
until the slowest is done, while a batch gives each up once its attempt is graded and opens the next. Both
stand upon the same openings (`openings.py`), which is all that they share.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
from anyio.abc import TaskStatus

from decathlon_client.background import background_tasks
from decathlon_client.episode import Episode
from decathlon_client.errors import ClientError
from decathlon_client.opener import EpisodeOpener
from decathlon_client.values import JsonObject, Reply, Task, Verdict

Call: TypeAlias = tuple[str, JsonObject | str | None]
"""A tool's name and its arguments, or the JSON text of them that a model wrote."""


class Slot:
    """The place of one task: its episode, or its `failure` where there is none, and its `verdict`."""

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
        """Raises the failure where there is none."""
        if self._episode is None:
            raise self.failure or RuntimeError("this slot is not open")
        return self._episode

    @property
    def is_live(self) -> bool:
        """Can it still be played: neither claimed nor failed."""
        return self.failure is None and self._episode is not None and not self._episode.claimed

    async def hold(self, opener: EpisodeOpener, *, task_status: TaskStatus[None]) -> None:
        """Open the episode and stay until cancelled; started once it is ready or has failed."""
        try:
            async with opener.opened(self.task) as self._episode:
                task_status.started()
                await anyio.sleep_forever()
        except ClientError as error:
            self.failure = error
            task_status.started()

    async def act(self, calls: Sequence[Call], timeout: float | None) -> list[Reply]:
        """One after the other. Ends early where the episode does, which is the slot's failure then."""
        replies: list[Reply] = []
        if self.failure is None:
            try:
                for name, arguments in calls:
                    replies.append(await self.episode.act(name, arguments, timeout=timeout))
            except ClientError as error:
                self.failure = error
        return replies

    async def evaluate(self) -> None:
        """The verdict, or the failure, once."""
        if self.failure is None and self.verdict is None:
            try:
                self.verdict = await self.episode.evaluate()
            except ClientError as error:
                self.failure = error


class Lockstep:
    """The slots, in the tasks' order. Made by `Decathlon.episodes`."""

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
        """Those that can still be played."""
        return [slot for slot in self._slots if slot.is_live]

    async def call(
        self, calls: Mapping[Slot, Sequence[Call]], *, timeout: float | None = None
    ) -> dict[Slot, list[Reply]]:
        """A turn: each slot's calls in their order, the slots side by side; waits for the last of them.

        A reply for every call, as `Episode.act` gives it: a tool that failed, and a call that was a mistake,
        are replies too. Where an episode could not go on there are fewer, and the slot's `failure` says why.
        `timeout` is each call's, in seconds.
        """
        replies: dict[Slot, list[Reply]] = {slot: [] for slot in calls}

        async def act(slot: Slot, asked: Sequence[Call]) -> None:
            replies[slot] = await slot.act(asked, timeout)

        async with anyio.create_task_group() as turns:
            for slot, asked in calls.items():
                turns.start_soon(act, slot, asked)
        return replies

    async def evaluate(self) -> list[Verdict | None]:
        """The verdicts, in the tasks' order; None where there is none, and the slot's `failure` says why.

        Closes the attempts that nobody has. Graded once: later calls return the same.
        """
        async with anyio.create_task_group() as graders:
            for slot in self._slots:
                graders.start_soon(slot.evaluate)
        return [slot.verdict for slot in self._slots]


@asynccontextmanager
async def lockstep(opener: EpisodeOpener, tasks: Iterable[str | Task]) -> AsyncGenerator[Lockstep]:
    """An episode of each task, opened side by side and closed side by side."""
    slots = [Slot(n, task if isinstance(task, str) else task.id) for n, task in enumerate(tasks)]
    async with background_tasks() as holders:
        async with anyio.create_task_group() as starting:
            for slot in slots:
                starting.start_soon(holders.start, slot.hold, opener)
        with opener.close_budget.hurried():
            yield Lockstep(slots)
