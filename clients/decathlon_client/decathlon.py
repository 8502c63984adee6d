"""The way in: a server, its tasks, its episodes.

An episode is started in the lobby and played at an address of its own, over HTTP and in this process alike.
A session at `/tasks/{id}/mcp` would be an episode with one request fewer, but the lobby's `start_episode`
takes options, answers with the handle before the sandbox opens (so that it can be closed whatever happens
next), and says why an episode cannot be had in a form that every version of the SDK passes on; and an address
of its own outlives a connection that breaks.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import datetime
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self, Unpack

import anyio
from anyio.abc import TaskGroup

from decathlon_client.background import background_tasks
from decathlon_client.batch import Batch, batching
from decathlon_client.close_budget import CloseBudget, is_interruption
from decathlon_client.connection import Line
from decathlon_client.embedded import EmbeddedServer
from decathlon_client.episode import Episode, attached
from decathlon_client.errors import ClientError, ConnectionLostError, ProtocolError
from decathlon_client.filters import Filters, said
from decathlon_client.lockstep import Lockstep, lockstep
from decathlon_client.opener import EpisodeOpener, OpeningOptions
from decathlon_client.server import HttpServer, Server
from decathlon_client.values import JsonObject, OnProgress, Policy, Reply, Task, as_objects

START_SECONDS = 60.0
CLOSE_SECONDS = 10.0
TURN_SECONDS = 60.0
PACE = 16
"""Episodes being started at once, and as many being closed: of hundreds that are sent together, a slow server
would answer the last too late. What was started is opened by the server beside what follows."""
INTERRUPTED_SECONDS = 1.0

log = logging.getLogger("decathlon.client")


class Decathlon:
    """A connection to a decathlon-mcp server: `async with Decathlon("http://127.0.0.1:8765") as d:`.

    `url` is the server's root or its lobby (`.../mcp`), `token` one of its tokens, if it wants any. Entered
    and left in one task; what is in between, episodes too, can be used from any.
    """

    def __init__(self, url: str, token: str | None = None) -> None:
        self._server: Server = HttpServer(url, token)
        self._task: str | None = None
        self._reset()

    @classmethod
    def embedded(
        cls,
        suite: str | PathLike[str] | Sequence[str | PathLike[str]] = "starter",
        provider: str | None = None,
        task: str | None = None,
        **settings: Any,
    ) -> Self:
        """The same with the server in this process, without a port; needs `decathlon-mcp[server]`.

        `task` is what `episode()` plays when it is not told. `settings` are the server's, by name
        (`state=...`, `max_sandboxes=...`). Raises on entering what the server says of them.
        """
        given = [suite] if isinstance(suite, (str, PathLike)) else list(suite)
        self = cls.__new__(cls)
        self._server = EmbeddedServer(
            {"suite": tuple(fspath(each) for each in given), "provider": provider, **settings}
        )
        self._task = task
        self._reset()
        return self

    def _reset(self) -> None:
        self._stack: AsyncExitStack | None = None
        self._lobby: Line | None = None
        self._tasks: TaskGroup | None = None
        self._parting = CloseBudget()
        self._starting = anyio.CapacityLimiter(PACE)
        self._closing = anyio.CapacityLimiter(PACE)

    async def __aenter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError("this Decathlon is open already")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server.running())
            self._tasks = await stack.enter_async_context(background_tasks())
            self._lobby = self._line(None)
            stack.push_async_callback(self._lobby.aclose, self._parting)
            await self._lobby.open()
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stack is not None, "this Decathlon is not open"
        stack, close_budget = self._stack, self._parting
        self._reset()
        if is_interruption(error):
            close_budget.hurry(INTERRUPTED_SECONDS)
        await stack.__aexit__(kind, error, trace)

    async def tasks(
        self, split: str | None = None, *, prompts: bool = True, **filters: Unpack[Filters]
    ) -> list[Task]:
        """The tasks there are, with their prompts; no sandbox is opened for them.

        Raises RequestError, naming what there is, for a split or a need that no task has.
        """
        return await self._listed(split=split, prompts=prompts, **filters)

    async def sample(
        self,
        count: int = 1,
        split: str | None = None,
        *,
        seed: int | None = None,
        prompts: bool = True,
        **filters: Unpack[Filters],
    ) -> list[Task]:
        """So many of the tasks that can run, all different as long as there are enough.

        The same for the same seed; without one a new draw each time. With an `order`, the seed is the number
        of the page of `count` tasks, from 0, and without one each draw goes on where the last has stopped.
        Raises RequestError where there is nothing to draw from.
        """
        return await self._listed(sample=count, split=split, seed=seed, prompts=prompts, **filters)

    async def _listed(self, **asked: Any) -> list[Task]:
        reply = await self._ask("list_tasks", said(**asked))
        return [Task.read(raw) for raw in as_objects((reply.structured or {}).get("tasks"))]

    @asynccontextmanager
    async def episode(
        self,
        task: str | Task | None = None,
        *,
        split: str | None = None,
        seed: int | None = None,
        launch_time: datetime | str | None = None,
        max_calls: int | None = None,
        policy: Policy | None = None,
        on_progress: OnProgress | None = None,
        **filters: Unpack[Filters],
    ) -> AsyncGenerator[Episode]:
        """An episode of the task, or of one drawn, as `sample` draws it.

        `policy`: who sees the reward, if it is to be fewer than the server says. Waits until it is ready;
        `on_progress` hears of the waiting. On exit it is closed: its sandbox goes; an attempt that was
        claimed is graded all the same. Raises UnknownTaskError, NotRunnableError, AtCapacityError,
        SetUpError.
        """
        drawn = said(split=split, seed=seed, **filters)
        named = task.id if isinstance(task, Task) else task or (None if drawn else self._task)
        asked = {**drawn, "task": named, "launch_time": launch_time, "max_calls": max_calls, "policy": policy}
        async with self._started(asked, CloseBudget(), on_progress) as episode:
            yield episode

    def opened(
        self, task: str | Task, **options: Unpack[OpeningOptions]
    ) -> AbstractAsyncContextManager[Episode]:
        """An episode opened as those of a batch are: with patience, and more than one try."""
        return EpisodeOpener(self._opened, options).opened(task)

    @asynccontextmanager
    async def episodes(
        self, tasks: Iterable[str | Task], **options: Unpack[OpeningOptions]
    ) -> AsyncGenerator[Lockstep]:
        """An episode of each of these tasks, all at once and held together, for whoever generates for all.

        Waits until each is ready or has failed; a failure is its own slot's (`slot.failure`). On exit all are
        closed. The server must have room for all of them.
        """
        async with lockstep(EpisodeOpener(self._opened, options), tasks) as managed:
            yield managed

    @asynccontextmanager
    async def batch(
        self,
        tasks: Iterable[str | Task] | AsyncIterable[str | Task],
        *,
        concurrency: int,
        progress: bool = True,
        player_seconds: float | None = None,
        **options: Unpack[OpeningOptions],
    ) -> AsyncGenerator[Batch]:
        """So many episodes at a time until the tasks, which are drawn as they are needed, are played.

        `progress`: a bar on stderr (with `rich`, on a terminal), or else a line now and then. An attempt
        whose player takes longer than `player_seconds` is truncated, and graded as it is. Left early or
        interrupted, it closes what is open, when interrupted within 5 s.
        """
        opener = EpisodeOpener(self._opened, options)
        async with batching(opener, tasks, concurrency, progress, player_seconds) as batch:
            yield batch

    async def ask(
        self, tool: str, arguments: JsonObject | None = None, *, on_progress: OnProgress | None = None
    ) -> Reply:
        """One of the lobby's own tools, its reply as it came: for episodes that outlive this connection.

        Raises ClientError where the server refuses; a reply with `is_error` is the tool's own.
        """
        if self._lobby is None:
            raise RuntimeError("this Decathlon is not open: use it in `async with`")
        params = {"name": tool, "arguments": arguments or {}}
        return Reply.read(await self._lobby.request("tools/call", params, on_progress=on_progress))

    @asynccontextmanager
    async def attach(self, episode: str) -> AsyncGenerator[Episode]:
        """An episode that is there already, by its handle or address; it goes on when this is left.

        By its agent's address it can be played, and neither evaluated nor truncated. Raises
        UnknownEpisodeError, EpisodeEndedError.
        """
        async with self._attached(episode, None, CloseBudget()) as found:
            yield found

    def _opened(
        self, task: str, *, close_budget: CloseBudget, **asked: Any
    ) -> AbstractAsyncContextManager[Episode]:
        return self._started({"task": task, **asked}, close_budget, None)

    @asynccontextmanager
    async def _started(
        self, asked: JsonObject, close_budget: CloseBudget, on_progress: OnProgress | None
    ) -> AsyncGenerator[Episode]:
        with close_budget.hurried():
            told = await self._start(asked, close_budget)
            handle = str(told["episode"])
            agent_address = told.get("agent_address") or told.get("agent")
            try:
                address = told.get("address") or handle
                async with self._attached(address, on_progress, close_budget, agent_address) as episode:
                    yield episode
            finally:
                await self._close(handle, close_budget)

    @asynccontextmanager
    async def _attached(
        self,
        episode: str,
        on_progress: OnProgress | None,
        close_budget: CloseBudget,
        agent_address: str | None = None,
    ) -> AsyncGenerator[Episode]:
        line = self._line(episode)
        try:
            yield await attached(line, self._ask, agent_address=agent_address, on_progress=on_progress)
        finally:
            await line.aclose(close_budget)

    async def _start(self, asked: JsonObject, close_budget: CloseBudget) -> JsonObject:
        """Start an episode. Cannot be cancelled between its start and our knowing."""
        when = asked.get("launch_time")
        told = {**asked, "launch_time": when.isoformat() if isinstance(when, datetime) else when}
        arguments = {key: value for key, value in told.items() if value is not None}
        started: JsonObject = {}
        async with self._starting:
            with close_budget.shielded(START_SECONDS) as scope:
                started |= (await self._ask("start_episode", {**arguments, "wait": False})).structured or {}
        if scope.cancelled_caught:
            raise ConnectionLostError(f"the server did not answer within {START_SECONDS:g} s")
        if "episode" not in started:
            raise ProtocolError("`start_episode` gave no handle; is this a decathlon-mcp server?")
        return started

    async def _close(self, handle: str, close_budget: CloseBudget) -> None:
        """Bounded, never raising: what ended the body is the better error, and the lease ends it anyway."""
        with close_budget.shielded(TURN_SECONDS):
            async with self._closing:
                with close_budget.shielded(CLOSE_SECONDS):
                    try:
                        await self._ask("close_episode", {"episode": handle})
                    except ClientError as error:
                        log.info("An episode could not be closed: %s", error.message)

    async def _ask(self, tool: str, arguments: JsonObject) -> Reply:
        """One of the lobby's tools. Raises ClientError where it says no."""
        if self._lobby is None:
            raise RuntimeError("this Decathlon is not open: use it in `async with`")
        reply = Reply.read(await self._lobby.request("tools/call", {"name": tool, "arguments": arguments}))
        if reply.is_error:
            raise ClientError(reply.text)
        return reply

    def _line(self, episode: str | None) -> Line:
        if self._tasks is None:
            raise RuntimeError("this Decathlon is not open: use it in `async with`")
        server = self._server
        return Line(self._tasks, server.where(episode), lambda connection: server.dial(connection, episode))
