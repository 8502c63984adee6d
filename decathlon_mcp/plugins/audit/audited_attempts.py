"""The attempts of an audit. Each is an episode; an attempt with a verdict is not played again."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Self

import anyio
import anyio.to_thread
from decathlon_client import ClientError, Decathlon, NoVerdictError
from decathlon_client.client_values import JsonObject, Verdict
from pydantic import BaseModel, PrivateAttr, ValidationError

from decathlon_mcp.plugins.audit.policies import Play
from decathlon_mcp.plugins.audit.report import Cost
from decathlon_mcp.plugins.audit.steadiness import Unsteady
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.repeated_calls import recorded_calls
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.sandboxes.machine_limits import available_bytes
from decathlon_mcp.storage.disk import new_file
from decathlon_mcp.storage.store import Store
from decathlon_mcp.storage.trajectory import Trajectory
from decathlon_mcp.types import public_id

RUN_LABEL, POLICY_LABEL = "run", "policy"
PLAY_SECONDS = 600.0
"""What a policy may take; its attempt is graded as it is then."""
EVALUATE_SECONDS = 3600.0
_MIB = 1 << 20


class Reading(NamedTuple):
    """What the machine's clocks say. `seconds`: of a clock. `free_mib`: memory that is available."""

    seconds: float
    cpu_seconds: float
    free_mib: float

    @classmethod
    def now(cls) -> Reading:
        times = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0].split()[1:8]
        user, nice, system, _, _, irq, soft_irq = map(int, times)
        busy = (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
        return cls(time.monotonic(), busy, (available_bytes() or 0) / _MIB)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt. `episode`: its handle; empty if it was not opened. `failure`: why it has no verdict."""

    policy: str
    episode: str
    verdict: Verdict | None
    failure: str = ""
    readings: tuple[Reading, ...] = ()
    """At the start of the attempt, when its tools were there, after the last call, and when its sandboxes
    were gone; none of an attempt that was played before."""

    @property
    def public_id(self) -> str:
        return public_id(self.episode) if self.episode else ""

    @property
    def reward(self) -> float:
        return 0.0 if self.verdict is None else self.verdict.reward


def cost_of(empty: Attempt, looked: Attempt, calls: int, known: Cost | None) -> Cost | None:
    """The cost by the attempts that were played now; else the cost that is known. `looked` made the calls."""
    cost = known
    if empty.readings and empty.verdict is not None:
        began, ready, _, over = empty.readings
        cost = Cost(
            set_up_seconds=ready.seconds - began.seconds,
            set_up_cpu_seconds=ready.cpu_seconds - began.cpu_seconds,
            grading_seconds=float(empty.verdict.raw.get("seconds") or 0.0),
            grading_cpu_seconds=over.cpu_seconds - ready.cpu_seconds,
            memory_mib=max(0.0, began.free_mib - ready.free_mib),
        )
    if cost is not None and looked.readings and calls:
        _, ready, played, _ = looked.readings
        seconds = (played.seconds - ready.seconds) / calls
        cpu_seconds = (played.cpu_seconds - ready.cpu_seconds) / calls
        cost = replace(cost, call_seconds=seconds, call_cpu_seconds=cpu_seconds)
    return cost


@dataclass(slots=True)
class Attempts:
    """Plays the attempts of one audit at an open server, at most `places` at once."""

    d: Decathlon
    state: Path
    run: str
    launch_times: Mapping[str, str]
    """Of all attempts at a task, so that they can be compared."""
    stored: dict[tuple[str, str], Attempt]
    """Attempts that were played before, by task and policy."""
    places: anyio.CapacityLimiter
    advance: Callable[[str], None]
    """Called after each attempt, with a line to show."""

    async def play(self, task: str, policy: str, play: Play) -> Attempt:
        """The attempt of a policy at a task, from the state folder if it is there."""
        attempt = self.stored.get((task, policy))
        if attempt is None:
            async with self.places:
                attempt = await self._play_now(task, policy, play)
            if attempt.verdict is not None:
                self.stored[task, policy] = attempt
        self.advance(f"{task}: {policy}")
        return attempt

    async def _play_now(self, task: str, policy: str, play: Play) -> Attempt:
        labels, handle = {RUN_LABEL: self.run, POLICY_LABEL: policy}, ""
        readings = [Reading.now()]
        try:
            async with self.d.episode(
                task,
                launch_time=self.launch_times[task],
                labels=labels,
                patience_seconds=PLAY_SECONDS,
            ) as episode:
                handle = episode.id
                readings.append(Reading.now())
                with anyio.move_on_after(PLAY_SECONDS):
                    await play(episode)
                readings.append(Reading.now())
                if not episode.claimed:
                    # Some suites pay only for what was claimed.
                    await episode.claim_done()
                verdict = await episode.evaluate(timeout=EVALUATE_SECONDS)
            return Attempt(policy, handle, verdict, readings=(*readings, Reading.now()))
        except NoVerdictError as error:
            return Attempt(policy, handle, None, f"{error.status}: {error.message}")
        except ClientError as error:
            return Attempt(policy, handle, None, error.message)

    async def replies(self, attempt: Attempt) -> list[tuple[str, JsonObject, bool, str]]:
        """The calls of an attempt: tool, arguments, whether it failed, and its text. Empty if it has none."""
        if not attempt.episode:
            return []
        return await anyio.to_thread.run_sync(_replies, self.state / "episodes" / attempt.episode)


def _replies(folder: Path) -> list[tuple[str, JsonObject, bool, str]]:
    try:
        return [
            (call.name, call.arguments or {}, call.reply.is_error, call.reply.text)
            for call in recorded_calls(Trajectory(folder).update())
            if call.reply is not None
        ]
    except OSError:
        return []


class KeptResults(BaseModel):
    """Results that an audit keeps in a file of some kilobytes, so that one that goes on has them."""

    costs: dict[str, Cost] = {}
    """Of the tasks, measured also by earlier audits."""
    graded_again: dict[str, Unsteady | None] = {}
    """What was found when attempts were graded again, by their episodes."""
    _file: Path = PrivateAttr()

    @classmethod
    def of_file(cls, file: Path) -> Self:
        """What an earlier audit has kept; nothing if it cannot be read."""
        try:
            kept = cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError):
            kept = cls()
        kept._file = file
        return kept

    def write(self) -> None:
        """Write the file. Raises OSError."""
        self._file.parent.mkdir(exist_ok=True)
        with new_file(self._file, self._file.with_suffix(".new")) as file:
            file.write(self.model_dump_json().encode())


def read_stored(state: Path, run: str) -> tuple[dict[tuple[str, str], Attempt], dict[str, str]]:
    """The attempts of a run that have a verdict, by task and policy, and each task's launch time. Blocks."""
    history, found, launch_times = EpisodeHistory([state]), dict[tuple[str, str], Attempt](), dict[str, str]()
    with Store.open_read_only(state) as store:
        if store is None:
            return {}, {}
        handles = dict[str, str](store.query("SELECT public_id, id FROM episodes"))
    for summary in history.all_episodes(EpisodeQuery(run=run, live=False, lost=False)):
        place = (summary.task, summary.labels.get(POLICY_LABEL, ""))
        details = history.episode(summary.public_id)
        stored = None if details is None else details.verdict
        if place in found or details is None or stored is None or stored.get("reward") is None:
            continue
        verdict = Verdict.read(stored)
        found[place] = Attempt(place[1], handles[summary.public_id], verdict)
        if details.launch_time is not None:
            launch_times.setdefault(summary.task, details.launch_time)
    return found, launch_times
