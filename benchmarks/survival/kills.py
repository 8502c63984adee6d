"""Episodes that play while their server is killed again and again."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import anyio
from decathlon_client import ClientError, Decathlon, Episode

from benchmarks.survival.running import ANSWER, Leftovers, ProviderName, killable_server

LONG_REPLY_BYTES = 1 << 20
RUNS = "runs.txt"
"""File in the workspace in which each call writes a line of its own."""
OPTIONS = ("--idle-seconds", "600", "--first-use-seconds", "600")


@dataclass(frozen=True, slots=True)
class Call:
    """One call, in seconds of `time.perf_counter`."""

    sent_at: float
    replied_at: float


@dataclass(slots=True)
class Play:
    """What one episode did and what became of it."""

    calls: list[Call] = field(default_factory=list[Call])
    lines: Counter[str] = field(default_factory=Counter[str])
    reward: float | None = None
    error: str | None = None

    @property
    def each_call_ran_once(self) -> bool:
        return self.lines == Counter(str(number) for number in range(len(self.calls)))


@dataclass(frozen=True, slots=True)
class Kills:
    """The plays of all episodes, and the kills of their server.

    `next_reply_seconds`: for each kill, from the kill until the reply to a call that was sent right after it,
    which may come after further kills.
    """

    provider: ProviderName
    plays: Sequence[Play]
    killed_at: Sequence[float]
    next_reply_seconds: Sequence[float]
    leftovers: Leftovers

    @property
    def calls(self) -> int:
        return sum(len(play.calls) for play in self.plays)

    @property
    def in_flight(self) -> int:
        """Number of calls that were in flight at a kill."""
        return sum(
            call.sent_at < kill < call.replied_at
            for play in self.plays
            for call in play.calls
            for kill in self.killed_at
        )

    @property
    def rewarded(self) -> int:
        return sum(play.reward == 1.0 for play in self.plays)

    @property
    def ran_once(self) -> int:
        """Number of episodes in which each call ran exactly once."""
        return sum(play.each_call_ran_once for play in self.plays)

    @property
    def lost(self) -> list[str]:
        """The errors of the episodes that did not get a verdict."""
        return [play.error for play in self.plays if play.error is not None]


async def measure_kills(provider: ProviderName, *, episodes: int, kills: int, every: float) -> Kills:
    """Play until the last kill is over, then read back what ran, claim and grade.

    The server is killed every `every` seconds, whatever the state of its recovery from the last time.
    """
    plays = [Play() for _ in range(episodes)]
    all_ready, over = anyio.Event(), anyio.Event()
    ready = 0
    killed_at: list[float] = []
    next_reply_seconds: list[float] = []

    async def play(client: Decathlon, own: Play, seed: int) -> None:
        nonlocal ready
        try:
            async with client.episode("find-answer") as episode:
                ready += 1
                if ready == episodes:
                    all_ready.set()
                await _call_until(over, episode, own, random.Random(seed))
                text = (await episode.call("probe__shell", {"command": f"cat {RUNS}"})).text
                own.lines = Counter(text.split())
                await episode.call("probe__write", {"path": "answer.txt", "text": ANSWER})
                await episode.claim_done()
                own.reward = (await episode.evaluate()).reward
        except ClientError as error:
            own.error = f"{type(error).__name__}: {error}"
            all_ready.set()

    async def wait_for_reply(probe: Episode, kill: float) -> None:
        await probe.call("probe__echo", {"text": ""})
        next_reply_seconds.append(time.perf_counter() - kill)

    sandboxes = ("--max-sandboxes", str(episodes + 1))
    async with killable_server(provider, *OPTIONS, *sandboxes) as server:  # noqa: SIM117  (clearer)
        async with Decathlon(server.url) as client, client.episode("find-answer") as probe:
            async with anyio.create_task_group() as tasks:
                for seed, own in enumerate(plays):
                    tasks.start_soon(play, client, own, seed)
                await all_ready.wait()
                all_ready_at = anyio.current_time()
                async with anyio.create_task_group() as replies:
                    for number in range(1, kills + 1):
                        await anyio.sleep_until(all_ready_at + number * every)
                        server.process.kill_at_once()
                        killed_at.append(time.perf_counter())
                        replies.start_soon(wait_for_reply, probe, killed_at[-1])
                over.set()
    return Kills(provider, plays, killed_at, next_reply_seconds, server.leftovers[0])


async def _call_until(over: anyio.Event, episode: Episode, play: Play, rng: random.Random) -> None:
    """Make calls of several kinds; each writes its number into the workspace."""
    kinds: tuple[tuple[float, Callable[[Episode, str], Awaitable[None]]], ...] = (
        (0.6, _short_call),
        (0.2, _long_call),
        (0.2, _call_with_long_reply),
    )
    while not over.is_set():
        make_call = rng.choices([call for _, call in kinds], [weight for weight, _ in kinds])[0]
        sent_at = time.perf_counter()
        await make_call(episode, f"echo {len(play.calls)} >> {RUNS}")
        play.calls.append(Call(sent_at, time.perf_counter()))
        await anyio.sleep(rng.uniform(0, 2))


async def _short_call(episode: Episode, record: str) -> None:
    await episode.call("probe__shell", {"command": f"{record}; sleep 0.1"})


async def _long_call(episode: Episode, record: str) -> None:
    await episode.call("probe__shell", {"command": f"{record}; sleep 4"})


async def _call_with_long_reply(episode: Episode, record: str) -> None:
    command = f"{record}; head -c {LONG_REPLY_BYTES} /dev/zero | tr '\\0' x"
    reply = await episode.call("probe__shell", {"command": command})
    assert len(reply.text) == LONG_REPLY_BYTES, "a reply is incomplete"
