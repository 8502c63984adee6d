"""Deaths in every phase of an episode: of the server, a driver, a tool server, the client, or its batch."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import anyio
from decathlon_client import ClientError, Decathlon, Episode
from decathlon_client.client_episode import EPISODE_KEY

from benchmarks.survival.running import ANSWER, KillableServer, Leftovers, ProviderName, killable_server
from benchmarks.wire_client import wire_client
from decathlon_mcp.cli.supervisor import DEFAULT_LIMITS
from decathlon_mcp.storage.store import EpisodeRow, SandboxRow

Victim = Literal["server", "driver", "tool server", "client", "batch"]
Moment = Literal["queued", "opening", "preprocess", "ready", "in a call", "capture", "grading", "scored"]
Outcome = Literal["continued", "forfeited", "lost"]
Inject = Callable[[KillableServer, Decathlon, int], Awaitable[None]]
"""Plays one episode with one death in it; the number selects the moment."""

TASKS = {"find-answer": ANSWER, "made-answer": "made-by-preprocess"}
"""Tasks of the probe suite without and with a preprocess script, and their answers."""
SURVIVAL_OPTIONS = ("--idle-seconds", "600", "--first-use-seconds", "600")
LEASE_OPTIONS = ("--idle-seconds", "6", "--first-use-seconds", "6", "--grace-seconds", "2")
"""For vanished clients. Longer than any pause of a client that is there."""
STABLE_SECONDS = DEFAULT_LIMITS.stable_seconds + 0.5
"""How long a server serves before it is killed: the supervisor gives up if too many die earlier in a row."""
SECOND_KILL_SECONDS = 3.0
"""Within this time after a kill, the next server is killed too: while it starts, recovers, or serves."""
BATCH_SECONDS = 6.0
"""Within this time after its first episode appears, a program with a batch is killed."""
STEP_SECONDS = 0.05
STEPS = 12
"""Deaths are stepped: the n-th is injected n % STEPS steps after its moment begins."""
END_SECONDS = 60.0
"""How long an episode may take to end after its driver or client died."""
POLL_SECONDS = 0.01


@dataclass(slots=True)
class Deaths:
    """Outcomes by victim and moment, and what was left of each server."""

    provider: ProviderName
    outcomes: dict[tuple[Victim, Moment], Counter[Outcome]] = field(
        default_factory=dict[tuple[Victim, Moment], Counter[Outcome]]
    )
    leftovers: dict[Victim, Leftovers] = field(default_factory=dict[Victim, Leftovers])
    errors: list[str] = field(default_factory=list[str])
    missed: int = 0
    """Episodes that had no first process at the moment at which it was to be killed."""

    def count(self, victim: Victim, moment: Moment, outcome: Outcome) -> None:
        self.outcomes.setdefault((victim, moment), Counter())[outcome] += 1
        sys.stderr.write(f"{self.total()}: {victim}, {moment}: {outcome}\n")

    def total(self, victim: Victim | None = None) -> int:
        return sum(
            counter.total() for (of, _), counter in self.outcomes.items() if victim is None or of == victim
        )

    def lost(self, victim: Victim) -> int:
        return sum(counter["lost"] for (of, _), counter in self.outcomes.items() if of == victim)


def moment_of(row: EpisodeRow, sandboxes: list[SandboxRow], calling: bool) -> Moment:
    """The moment of an episode's life that the store shows."""
    roles = {sandbox.role for sandbox in sandboxes}
    match row.phase:
        case "opening":
            return "preprocess" if "preprocess" in roles else "opening"
        case "ready":
            return "in a call" if calling else "ready"
        case "claimed":
            return "grading" if row.progress.get("captured") else "capture"
        case "scored":
            return "scored"
        case _:
            return "queued"


async def measure_deaths(provider: ProviderName, *, count: int, at_once: int) -> Deaths:
    """Inject deaths: half of them of the server, a quarter of drivers, the rest of the others.

    The numbers are exact except for servers and batches, where each open episode counts.
    """
    deaths = Deaths(provider)
    others = max(2, count // 12)
    await _kill_servers(deaths, count=count // 2, at_once=at_once)
    await _kill_drivers(deaths, count=count // 4, at_once=at_once)
    await _kill_tool_servers(deaths, count=others, at_once=at_once)
    await _lose_clients(deaths, count=others, at_once=at_once)
    await _kill_batches(deaths, count=others, at_once=at_once)
    return deaths


# The server


@dataclass(slots=True)
class _Attempt:
    """An episode that is played under servers that die."""

    moments: list[Moment] = field(default_factory=list[Moment])
    calling: bool = False
    outcome: Outcome | None = None


async def _kill_servers(deaths: Deaths, *, count: int, at_once: int) -> None:
    """Play episodes one after the other while the server is killed; each that is open has one death."""
    attempts: dict[str, _Attempt] = {}
    over = anyio.Event()
    rng = random.Random(1)

    async def play_many(client: Decathlon, worker: int) -> None:
        number = worker
        while not over.is_set():
            task = [*TASKS][number % len(TASKS)]
            number += 1
            identifier = ""
            try:
                async with client.episode(task) as episode:
                    identifier = episode.id
                    await _play(episode, task, attempts.setdefault(episode.id, _Attempt()))
            except (ClientError, AssertionError) as error:
                deaths.errors.append(f"server, {identifier or 'opening'}: {type(error).__name__}: {error}")
                # An opening that failed has no id here; it counts as an episode of its own.
                attempts.setdefault(identifier or f"opening-{number}-{worker}", _Attempt()).outcome = "lost"

    async with killable_server(deaths.provider, *SURVIVAL_OPTIONS) as server:  # noqa: SIM117  (clearer)
        async with Decathlon(server.url) as client, anyio.create_task_group() as tasks:
            for worker in range(at_once):
                tasks.start_soon(play_many, client, worker)
            injected = kills = 0
            while injected < count:
                await anyio.sleep(rng.uniform(0, SECOND_KILL_SECONDS) if kills % 2 else STABLE_SECONDS)
                server.process.kill_at_once()
                kills += 1
                for row, sandboxes in server.live_episodes():
                    attempt = attempts.setdefault(row.id, _Attempt())
                    attempt.moments.append(moment_of(row, sandboxes, attempt.calling))
                    injected += 1
                if kills % 2 == 0:
                    await client.tasks(prompts=False)  # until the next server answers
            over.set()
    for attempt in attempts.values():
        for moment in attempt.moments:
            # One without an outcome is none that a client had opened.
            deaths.count("server", moment, attempt.outcome or "lost")
        if attempt.outcome == "lost" and not attempt.moments:
            deaths.count("server", "opening", "lost")
    deaths.leftovers["server"] = server.leftovers[0]


async def _play(episode: Episode, task: str, attempt: _Attempt) -> None:
    for number in range(3):
        attempt.calling = True
        await episode.call("probe__shell", {"command": f"echo {number} >> runs.txt; sleep 0.4"})
        attempt.calling = False
        await anyio.sleep(0.2)
    text = (await episode.call("probe__shell", {"command": "cat runs.txt"})).text
    assert text.split() == ["0", "1", "2"], f"calls that ran: {text.split()}"
    await episode.call("probe__write", {"path": "answer.txt", "text": TASKS[task]})
    await episode.claim_done()
    verdict = await episode.evaluate()
    assert verdict.reward == 1.0, f"reward {verdict.reward}"
    await anyio.sleep(0.3)
    assert await episode.evaluate() == verdict, "another verdict"
    attempt.outcome = "continued"


# One sandbox's first process


async def _kill_drivers(deaths: Deaths, *, count: int, at_once: int) -> None:
    moments: tuple[Moment, ...] = (
        "opening", "preprocess", "ready", "in a call", "capture", "grading", "scored",
    )  # fmt: skip

    async def one(server: KillableServer, client: Decathlon, number: int) -> None:
        target = moments[number % len(moments)]
        task = "made-answer" if target == "preprocess" else "find-answer"
        started = await client.call_lobby("start_episode", {"task": task, "wait": False})
        handle = str((started.structured or {})["episode"])
        outcome: Outcome = "lost"
        injected: list[Moment] = []
        calling = [False]
        in_time = False

        async def kill() -> None:
            await _reach(server, handle, target, calling)
            await anyio.sleep(number % STEPS * STEP_SECONDS)
            for row, sandboxes in server.live_episodes():
                if row.id == handle:
                    moment = moment_of(row, sandboxes, calling[0])
                    killed = [await server.sandboxes.kill_first_process(sandbox) for sandbox in sandboxes]
                    if any(killed):
                        injected.append(moment)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with anyio.move_on_after(END_SECONDS):
                outcome = await _outcome(client, handle, task, calling)
                in_time = True
            tasks.cancel_scope.cancel()
        if not in_time:
            deaths.errors.append(f"driver, {target}: no outcome within {END_SECONDS:.0f} s")
        if not injected:
            # The sandbox had ended by itself, or was not there yet: nothing died.
            deaths.missed += 1
            if outcome != "continued":
                deaths.errors.append(f"driver, {target}: {outcome} although nothing was killed")
        for moment in injected:
            deaths.count("driver", moment, outcome)
        with suppress(ClientError):
            await client.call_lobby("close_episode", {"episode": handle})

    await _run_many(deaths, "driver", one, count=count, at_once=at_once, options=SURVIVAL_OPTIONS)


async def _reach(server: KillableServer, handle: str, moment: Moment, calling: list[bool]) -> None:
    """Wait until the episode has reached this moment, or is over."""
    while True:
        rows = [(row, sandboxes) for row, sandboxes in server.live_episodes() if row.id == handle]
        if not rows or (rows[0][1] and moment_of(*rows[0], calling[0]) == moment):
            return
        if moment_of(*rows[0], calling[0]) == moment == "scored":
            return
        await anyio.sleep(POLL_SECONDS)


async def _outcome(client: Decathlon, handle: str, task: str, calling: list[bool]) -> Outcome:
    """Play to the end; what a client gets."""
    try:
        async with client.attach(handle) as episode:
            await anyio.sleep(0.7)
            calling[0] = True
            await episode.call("probe__shell", {"command": "sleep 0.7"})
            calling[0] = False
            await episode.call("probe__write", {"path": "answer.txt", "text": TASKS[task]})
            await episode.claim_done()
            verdict = await episode.evaluate()
            await anyio.sleep(STEPS * STEP_SECONDS)
            assert await episode.evaluate() == verdict, "another verdict"
    except ClientError:
        return await _verdict(client, handle)
    return "forfeited" if verdict.status == "forfeited" else "continued"


async def _verdict(client: Decathlon, handle: str) -> Outcome:
    """The outcome of an episode that ended early."""
    try:
        async with client.attach(handle) as episode:
            return "forfeited" if (await episode.evaluate()).status == "forfeited" else "continued"
    except ClientError:
        return "lost"


# A tool server


async def _kill_tool_servers(deaths: Deaths, *, count: int, at_once: int) -> None:
    async def one(server: KillableServer, client: Decathlon, number: int) -> None:
        moment: Moment = "in a call" if number % 2 else "ready"
        outcome: Outcome = "lost"
        try:
            async with client.episode("find-answer") as episode:
                await episode.call("probe__write", {"path": "answer.txt", "text": ANSWER})
                delay = number % STEPS * STEP_SECONDS
                kill = f"(sleep {delay}; kill -9 $PPID) >/dev/null 2>&1 &"
                command = f"{kill} sleep 30" if moment == "in a call" else kill
                with suppress(ClientError):
                    await episode.call("probe__shell", {"command": command})
                await anyio.sleep(0.7)
                with suppress(ClientError):
                    await episode.call("probe__echo", {"text": ""})
                await episode.claim_done()
                verdict = await episode.evaluate()
                outcome = "forfeited" if verdict.status == "forfeited" else "continued"
                if verdict.reward != 1.0:
                    deaths.errors.append(f"tool server, {moment}: reward {verdict.reward}")
        except ClientError as error:
            deaths.errors.append(f"tool server, {moment}: {type(error).__name__}: {error}")
        deaths.count("tool server", moment, outcome)

    await _run_many(deaths, "tool server", one, count=count, at_once=at_once, options=SURVIVAL_OPTIONS)


# The client


async def _lose_clients(deaths: Deaths, *, count: int, at_once: int) -> None:
    """Cut the connection of a client whose session is the episode; the lease has to end the episode."""
    moments: tuple[Moment, ...] = (
        "opening",
        "preprocess",
        "ready",
        "in a call",
        "capture",
        "grading",
        "scored",
    )

    async def one(server: KillableServer, client: Decathlon, number: int) -> None:
        target = moments[number % len(moments)]
        task = "made-answer" if target == "preprocess" else "find-answer"
        handle = await _vanish(server.url, task, target, number % STEPS * STEP_SECONDS)
        with anyio.move_on_after(END_SECONDS) as scope:
            while any(row.id == handle for row, _ in server.live_episodes()):  # noqa: ASYNC110  (in a database)
                await anyio.sleep(0.1)
        if scope.cancelled_caught:
            deaths.errors.append(f"client, {target}: the episode is open after {END_SECONDS:.0f} s")
        # For a vanished client, what counts is that its episode ends.
        deaths.count("client", target, "lost" if scope.cancelled_caught else "continued")

    await _run_many(deaths, "client", one, count=count, at_once=at_once, options=LEASE_OPTIONS)


async def _vanish(url: str, task: str, moment: Moment, delay: float) -> str:
    """Play until `delay` seconds into this moment, and cut the connection. Returns the handle."""
    # Its connection is closed without a DELETE of the session.
    async with wire_client(f"{url}/tasks/{task}/mcp") as client:
        handle = str(client.server_info["_meta"][EPISODE_KEY]["id"])
        if moment in ("opening", "preprocess"):
            await _give_up(client.request("tools/list", {}), delay)
            return handle
        await client.request("tools/list", {})
        await client.request("tools/call", {"name": "probe__echo", "arguments": {"text": ""}})
        if moment == "ready":
            await anyio.sleep(delay)
        elif moment == "in a call":
            arguments = {"command": "sleep 30"}
            await _give_up(
                client.request("tools/call", {"name": "probe__shell", "arguments": arguments}), delay
            )
        else:
            await client.request("tools/call", {"name": "claim_done", "arguments": {}})
            evaluate = client.request("tools/call", {"name": "evaluate", "arguments": {}})
            if moment == "scored":
                await evaluate
                await anyio.sleep(delay)
            else:
                await _give_up(evaluate, delay)
        return handle


async def _give_up(request: Awaitable[object], seconds: float) -> None:
    with anyio.move_on_after(max(seconds, POLL_SECONDS)):
        await request


# A program with a batch


async def _kill_batches(deaths: Deaths, *, count: int, at_once: int) -> None:
    """Kill a client program while it plays a batch; the leases have to end all of its episodes."""
    rng = random.Random(2)
    arguments = (",".join(TASKS), str(at_once))
    async with killable_server(deaths.provider, *LEASE_OPTIONS) as server:
        while deaths.total("batch") < count:
            program = [sys.executable, "-m", "benchmarks.survival.batch_client", server.url, *arguments]
            async with await anyio.open_process(program, stdout=None, stderr=None) as process:
                try:
                    with anyio.fail_after(END_SECONDS):
                        while not server.live_episodes():  # noqa: ASYNC110  (in a database)
                            await anyio.sleep(POLL_SECONDS)
                    await anyio.sleep(rng.uniform(0, BATCH_SECONDS))
                finally:
                    process.kill()
                    await process.wait()
            moments: dict[str, Moment] = {
                row.id: moment_of(row, sandboxes, False) for row, sandboxes in server.live_episodes()
            }
            with anyio.move_on_after(END_SECONDS):
                while server.live_episodes():  # noqa: ASYNC110  (in a database)
                    await anyio.sleep(0.1)
            open_still = {row.id for row, _ in server.live_episodes()}
            for handle, moment in moments.items():
                outcome: Outcome = "lost" if handle in open_still else "continued"
                deaths.count("batch", moment, outcome)
            if open_still:
                deaths.errors.append(f"batch: {len(open_still)} episodes are open after {END_SECONDS:.0f} s")
                break
    deaths.leftovers["batch"] = server.leftovers[0]


# All of one victim


async def _run_many(
    deaths: Deaths, victim: Victim, inject: Inject, *, count: int, at_once: int, options: Sequence[str]
) -> None:
    """Inject deaths into `count` episodes of one server."""
    numbers = iter(range(count))
    async with killable_server(deaths.provider, *options) as server, Decathlon(server.url) as client:

        async def work() -> None:
            for number in numbers:
                await inject(server, client, number)

        async with anyio.create_task_group() as workers:
            for _ in range(at_once):
                workers.start_soon(work)
    deaths.leftovers[victim] = server.leftovers[0]
