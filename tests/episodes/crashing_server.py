"""A server that dies at a chosen step of a call: `python -m tests.episodes.crashing_server FOLDER KIND`.

For each step a process begins a call and ends there, as `kill -9` would end it. A second process continues
the episode from its files, and a client repeats the request. Prints one JSON line for each step. KIND is
`play`, `late` (the call fails) or `claim` (the attempt is closed before the calls are resumed).
With `task` as a third argument, the first server runs its calls in tasks.

The sandbox is a folder: what was sent to it has happened, also if its server dies afterwards. As the driver
does, it runs each request once, by its id, and keeps its reply until it is acknowledged.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, cast

import anyio
import msgspec

from decathlon_mcp.app import create_registry
from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.driver_client.driver import DriverClient
from decathlon_mcp.driver_client.replies import CallParams, Reply
from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.operations import Caller
from decathlon_mcp.episodes.server_starts import ServerStarts
from decathlon_mcp.episodes.specification import EpisodeSpec
from decathlon_mcp.episodes.tools import ToolRouter, ToolSession
from decathlon_mcp.errors import CallTimeoutError, DecathlonError
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage import disk
from decathlon_mcp.storage import journal as journal_module
from decathlon_mcp.storage.journal import Journal
from tests.episodes.environment import sandbox_factory
from tests.fakes.provider import FakeProvider

STEPS = 12


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
    """Implements `DriverClient.call`, and `begin_call` with `settle_call`.

    `first`: id of this server's first request. `needs_tasks`: no call can be sent without waiting.
    """

    def __init__(self, folder: Path, crash: Crash, first: int, *, needs_tasks: bool) -> None:
        self._folder = folder
        self._crash = crash
        self._next = first
        self._needs_tasks = needs_tasks
        self._arguments: dict[int, Any] = {}
        folder.mkdir(exist_ok=True)

    async def call(
        self,
        server: str,
        method: str,
        params: Any,
        *,
        request_id: int | None = None,
        before_send: Callable[[int], None],
        on_reply: Callable[[Any], None],
        **options: Any,
    ) -> Any:
        if request_id is None:
            request_id, self._next = self._next, self._next + 1
        before_send(request_id)
        self._run(request_id, params)
        await anyio.lowlevel.checkpoint()
        return self._answer(request_id, on_reply)

    def begin_call(
        self,
        server: str,
        method: str,
        params: Any,
        *,
        before_send: Callable[[int], None],
        on_change: Callable[[], None],
        **options: Any,
    ) -> int | None:
        if self._needs_tasks:
            return None
        request_id, self._next = self._next, self._next + 1
        before_send(request_id)
        self._run(request_id, params)
        asyncio.get_running_loop().call_soon(on_change)
        return request_id

    def settle_call(self, request_id: int, server: str, on_reply: Callable[[Any], None]) -> bool:
        self._answer(request_id, on_reply)
        return True

    def _run(self, request_id: int, params: Any) -> None:
        """The request arrives, and its tool runs unless it has run before."""
        self._crash.step()
        self._arguments[request_id] = json.loads(bytes(params["arguments"]))
        if not (seen := self._folder / f"seen-{request_id}").exists():
            seen.touch()
            runs = self._folder / "runs"
            count = int(runs.read_text()) + 1 if runs.exists() else 1
            runs.write_text(str(count))
            result = {"content": [{"type": "text", "text": f"run {count}"}]}
            self._reply(request_id).write_text(json.dumps({"result": result}))

    def _answer(self, request_id: int, on_reply: Callable[[Any], None]) -> Reply:
        """The reply arrives, and is acknowledged."""
        self._crash.step()
        reply = self._reply(request_id)
        answer = Reply.from_result(msgspec.json.encode(json.loads(reply.read_text())["result"]))
        if self._arguments[request_id] == {"late": True}:
            raise CallTimeoutError("the tool took too long")
        on_reply(answer)
        self._crash.step()
        reply.unlink()
        self._crash.step()
        return answer

    def _reply(self, request_id: int) -> Path:
        return self._folder / f"reply-{request_id}"


def episode_of(folder: Path, journal: Journal) -> Episode:
    factory = sandbox_factory(folder, FakeProvider())
    settings = Settings.model_validate({"state": folder / "state"})
    registry = create_registry(Catalogue([factory.suite]), {factory.suite.name: factory}, settings, folder)
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
    metrics = registry.metrics.episode(factory.suite.name, spec.task_name)
    return Episode(spec, sandbox_factory=factory, ticket=ticket, journal=journal, metrics=metrics)


def tools(folder: Path, crash: Crash, generation: int, *, needs_tasks: bool = False) -> ToolSession:
    folder_driver = FolderDriver(folder / "sandbox", crash, generation << 32 | 1, needs_tasks=needs_tasks)
    driver = cast("DriverClient", folder_driver)
    starts = ServerStarts(driver, start_seconds=5, running=["probe"])
    return ToolSession(driver, ToolRouter({"probe": [{"name": "tool"}]}, "decathlon"), starts)


async def begin(folder: Path, step: int, arguments: Any, needs_tasks: bool) -> None:
    """The first server: a call that is answered, and one in which the server dies."""
    episode, crash = episode_of(folder, Journal(folder / "journal")), Crash(step)
    episode.mark_opening()
    episode.become_ready(tools(folder, Crash(0), 1, needs_tasks=needs_tasks))
    async with episode.running_calls():
        await episode.call("probe__tool", CallParams.of({}), caller=Caller(operation="before"))
        session = tools(folder, crash, 2, needs_tasks=needs_tasks)
        episode._tool_session = session  # pyright: ignore[reportPrivateUsage]
        journal_module.write_all = crash.write_all
        with suppress(CallTimeoutError):
            await episode.call("probe__tool", CallParams.of(arguments), caller=Caller(operation="one"))


async def resume(folder: Path, kind: str, arguments: Any) -> Any:
    """The next server, and its client."""
    episode = episode_of(folder, Journal.reopen(folder / "journal"))
    await episode.restore_calls()
    counts = [episode.calls]
    episode.mark_opening()
    replies: list[str] = []

    async def repeat(operation: str, arguments: Any) -> None:
        try:
            reply = await episode.call(
                "probe__tool", CallParams.of(arguments), caller=Caller(operation=operation)
            )
            replies.append(reply.decoded()["result"]["content"][0]["text"])
        except DecathlonError as error:
            replies.append(error.message)

    async with episode.running_calls():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(repeat, "one", arguments)
            await anyio.lowlevel.checkpoint()
            episode.become_ready(tools(folder, Crash(0), 3))
            if kind == "claim":
                await episode.claim_done(None)
            episode.resume_calls()
            tasks.start_soon(repeat, "one", arguments)
        await repeat("one", arguments)
        await repeat("before", {})
    records = [(call.seq, call.failed, call.result) for call in episode.attempt().calls]
    counted = episode.attempt().call_counts
    counts += [counted.calls, counted.failed, len(records)]
    events = [event["event"] for event in episode.journal.events("call")]
    runs = int((folder / "sandbox" / "runs").read_text())
    return {"replies": replies, "runs": runs, "counts": counts, "calls": len(events), "records": records}


def fork(run: Callable[[], None]) -> int:
    """Run a function in a process of its own and return its exit code."""
    if (child := os.fork()) == 0:
        try:
            run()
        except BaseException as error:  # noqa: BLE001  (the parent's exit handlers must not run here)
            print(repr(error), file=sys.stderr, flush=True)  # noqa: T201
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(folder: Path, kind: str, *, needs_tasks: bool) -> None:
    arguments = {"late": True} if kind == "late" else {"x": 1}
    for step in range(1, STEPS + 1):
        life = folder / str(step)
        life.mkdir()
        begins = partial(begin, life, step, arguments, needs_tasks)
        first = fork(partial(anyio.run, begins))

        def second(life: Path = life, first: int = first, step: int = step) -> None:
            found = anyio.run(resume, life, kind, arguments)
            print(json.dumps({"step": step, "first": first, **found}), flush=True)  # noqa: T201

        assert fork(second) == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], needs_tasks="task" in sys.argv[3:])
