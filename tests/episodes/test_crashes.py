"""Calls of a server that dies at each step of one: each runs once, and the next server has its reply.

For each step a process begins a call and ends there, as `kill -9` would end it. A second process continues
the episode from its files, and a client repeats the request.

The sandbox is a folder: what was sent to it has happened, also if its server dies afterwards. As the driver
does, it runs each request once, by its id, and keeps its reply until it is acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec
import pytest

from decathlon_mcp.app import create_registry
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.driver.stream import AttachedClock
from decathlon_mcp.episodes.call import Waiter
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.grading import attempt_of
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import EpisodeSpec, Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.episodes.tools.offered import OfferedTools
from decathlon_mcp.episodes.tools.tool_session import ServerStarts, ToolSession
from decathlon_mcp.errors import CallTimeoutError, DecathlonError
from decathlon_mcp.settings import read_settings
from decathlon_mcp.storage import disk
from decathlon_mcp.storage import trajectory as trajectory_module
from decathlon_mcp.storage.trajectory import RequestKeys
from decathlon_mcp.types import JsonObject
from tests.episodes.environment import make_call, sandbox_factory
from tests.fakes.provider import FakeProvider
from tests.forks import in_fork
from tests.storage.trajectories import events

pytestmark = pytest.mark.slow

STEPS = 12
BEFORE_THE_LINE = 2
"""Steps before the line of the call is complete: the call is not sent then, and its number is free."""
SENT = 5
"""The first step after the call was sent."""


class Crash:
    """Ends the process at one step."""

    def __init__(self, at: int) -> None:
        self._remaining = at

    def step(self) -> None:
        self._remaining -= 1
        if self._remaining == 0:
            os._exit(9)

    def write_all(self, descriptor: int, data: bytes) -> None:
        """Write a line in two parts."""
        self.step()
        half = len(data) // 2
        disk.write_all(descriptor, data[:half])
        self.step()
        disk.write_all(descriptor, data[half:])
        self.step()


class FolderDriver:
    """Implements the part of `DriverClient` that sends calls.

    `first`: id of this server's first request.
    """

    def __init__(self, folder: Path, crash: Crash, first: int) -> None:
        self._folder = folder
        self._crash = crash
        self._ids = count(first)
        self.clock = AttachedClock()
        folder.mkdir(exist_ok=True)

    def new_request_id(self) -> int:
        return next(self._ids)

    def call(
        self, request_id: int, server: str, params: JsonObject, *, on_outcome: Any, **options: Any
    ) -> None:
        """The request arrives, and its tool runs unless it has run before."""
        self._crash.step()
        if not (seen := self._folder / f"seen-{request_id}").exists():
            seen.touch()
            runs = self._folder / "runs"
            count = int(runs.read_text()) + 1 if runs.exists() else 1
            runs.write_text(str(count))
            result = {"content": [{"type": "text", "text": f"run {count}"}]}
            self._reply(request_id).write_text(json.dumps({"result": result}))
        asyncio.get_running_loop().call_soon(self._answer, request_id, params, on_outcome)

    def _answer(self, request_id: int, params: JsonObject, on_outcome: Any) -> None:
        """The reply arrives, and is acknowledged."""
        self._crash.step()
        reply = self._reply(request_id)
        result = msgspec.json.encode(json.loads(reply.read_text())["result"])
        if json.loads(bytes(params["arguments"])) == {"late": True}:
            on_outcome(CallTimeoutError("the tool took too long"))
        else:
            on_outcome(Reply.from_result(result))
        self._crash.step()
        reply.unlink()
        self._crash.step()

    def _reply(self, request_id: int) -> Path:
        return self._folder / f"reply-{request_id}"


@cache
def registry_in(folder: Path) -> EpisodeRegistry:
    """What all servers have in common: each is a fork of the process that made it."""
    factory = sandbox_factory(folder, FakeProvider())
    settings = read_settings({"state": folder / "state"})
    return create_registry(Catalogue([factory.suite]), {factory.suite.name: factory}, settings, folder)


def episode_of(folder: Path) -> Episode:
    registry = registry_in(folder.parent)
    (factory,) = registry.factories.values()
    task = factory.suite.tasks["find-answer"]
    spec = EpisodeSpec(
        id="e" * 48,
        agent_id="a" * 48,
        task=task,
        task_name="find-answer",
        owner=Principal(),
        launch_time=datetime.now(UTC),
        policy="visible",
        limits=registry.options.limits.for_task(task),
    )
    ticket = registry.admission.reserve("find-answer")
    return Episode(
        spec,
        sandbox_factory=factory,
        ticket=ticket,
        folder=folder / "episode",
        disk=None,
        emit=registry.events.emit,
    )


def tools(folder: Path, crash: Crash, generation: int) -> ToolSession:
    folder_driver = FolderDriver(folder / "sandbox", crash, generation << 32 | 1)
    driver = cast("DriverClient", folder_driver)
    starts = ServerStarts(driver, start_seconds=5, running=["probe"])
    return ToolSession(driver, starts)


def make_ready(episode: Episode, session: ToolSession) -> None:
    tools = OfferedTools({"probe": [{"name": "tool"}]}, {}, "decathlon")
    episode.note(tools=tools.to_json())
    episode.tools.offer(tools)
    episode.become_ready(session)


def caller_of(operation: str) -> Waiter:
    return Waiter(RequestKeys(operation))


async def begin(folder: Path, step: int, arguments: Any) -> None:
    """The first server: a call that is answered, and one in which the server dies."""
    episode, crash = episode_of(folder), Crash(step)
    episode.trajectory.create()
    episode.mark_opening()
    make_ready(episode, tools(folder, Crash(0), 1))
    async with episode.calls.running():
        await make_call(episode, "probe__tool", CallParams.of({}), waiter=caller_of("before"))
        session = tools(folder, crash, 2)
        episode.calls.open(session)
        trajectory_module.write_all = crash.write_all
        with suppress(CallTimeoutError):
            await make_call(episode, "probe__tool", CallParams.of(arguments), waiter=caller_of("one"))


async def resume(folder: Path, kind: str, arguments: Any) -> Any:
    """The next server, and its client."""
    episode = episode_of(folder)
    episode.trajectory.reopen()
    await episode.calls.restore()
    counts = [episode.calls.sent]
    replies: list[str] = []
    if kind == "claim":
        episode.state.phase = Phase.CLAIMED
        episode.calls.end()
    else:
        episode.mark_opening()

    async def repeat(operation: str, arguments: Any) -> None:
        try:
            caller, params = caller_of(operation), CallParams.of(arguments)
            reply = await make_call(episode, "probe__tool", params, waiter=caller)
            replies.append(reply.decoded()["result"]["content"][0]["text"])
        except DecathlonError as error:
            replies.append(error.message)

    async with episode.calls.running():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(repeat, "one", arguments)
            await anyio.lowlevel.checkpoint()
            if kind != "claim":
                make_ready(episode, tools(folder, Crash(0), 3))
            tasks.start_soon(repeat, "one", arguments)
        await repeat("one", arguments)
        await repeat("before", {})
    attempt = attempt_of(episode)
    records = [(call.seq, call.failed, call.result) for call in attempt.calls]
    counted = attempt.call_counts
    counts += [counted.calls, counted.failed, len(records)]
    calls = events(episode.trajectory, "call")
    runs = int((folder / "sandbox" / "runs").read_text())
    return {"replies": replies, "runs": runs, "counts": counts, "calls": len(calls), "records": records}


def rounds(folder: Path, kind: str) -> list[dict[str, Any]]:
    """What came of an episode whose server died at each step.

    `kind`: `play`, `late` (the call fails) or `claim` (the attempt had been closed when its server died).
    """
    arguments = {"late": True} if kind == "late" else {"x": 1}
    registry_in(folder)
    found: list[dict[str, Any]] = []
    exits: list[int] = []
    for step in range(1, STEPS + 1):
        life = folder / str(step)
        life.mkdir()
        first = in_fork(partial(anyio.run, partial(begin, life, step, arguments)))
        exits.append(first.returncode)

        def second(life: Path = life) -> None:
            print(json.dumps(anyio.run(resume, life, kind, arguments)))  # noqa: T201

        done = in_fork(second)
        assert done.returncode == 0, first.stderr + done.stderr
        found.append({"step": step, **json.loads(done.stdout)})
    assert exits[0] == 9, "no server died"
    assert exits[-1] == 0, "the last steps are not covered"
    return found


@pytest.mark.parametrize(("kind", "reply"), [("play", "run 2"), ("late", "the tool took too long")])
def test_a_call_runs_once_at_whatever_step_its_server_dies(tmp_path: Path, kind: str, reply: str) -> None:
    for found in rounds(tmp_path, kind):
        assert found["runs"] == 2, found
        assert found["replies"] == [reply, reply, reply, "run 1"]
        assert found["calls"] == 2
        last, calls, failed, records = found["counts"]
        assert last == (1 if found["step"] <= BEFORE_THE_LINE else 2)
        assert (calls, failed, records) == (2, int(kind == "late"), 2)


def test_calls_of_an_attempt_that_is_claimed_meanwhile_are_not_sent_again(tmp_path: Path) -> None:
    for found in rounds(tmp_path, "claim"):
        assert found["runs"] == (1 if found["step"] < SENT else 2), found
        assert len(set(found["replies"][:3])) == 1
        assert found["replies"][0] == "run 2" or "closed" in found["replies"][0]
        assert found["replies"][3] == "run 1"
        assert len(found["records"]) == found["calls"]
