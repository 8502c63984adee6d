"""The client's entry point: a server, its tasks, its episodes."""

# An episode is started in the lobby and played at its own address, over HTTP and embedded alike. A session at
# `/tasks/{id}/mcp` would save one request, but `start_episode` takes options, returns the handle before the
# sandbox opens (so that the episode can be closed whatever happens next), and reports errors in a form that
# every version of the SDK passes on. An episode's own address also outlives a connection that breaks.

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from datetime import datetime
from functools import partial
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self, Unpack, overload

import anyio
import anyio.lowlevel

from decathlon_client.background import ShieldedTasks, shielded_tasks
from decathlon_client.batch import Batch, Late, Plan, open_batch
from decathlon_client.close_budget import INTERRUPTED_SECONDS, CloseBudget, is_interrupt
from decathlon_client.cluster import CLUSTER_CODE, ClusterEndpoint, HeldEpisode
from decathlon_client.embedded import EmbeddedEndpoint
from decathlon_client.episode import CallLobby, Episode, connect_episode
from decathlon_client.episode_owner import EpisodeOwner, EpisodeOwners, episode_owners
from decathlon_client.errors import ClientError, ProtocolError, error_from_reply
from decathlon_client.labels import run_name
from decathlon_client.lockstep import Lockstep, open_lockstep
from decathlon_client.opener import RETRIES, EpisodeOpener, OpeningOptions, refuse_text
from decathlon_client.player_failure import is_players_fault, player_failure
from decathlon_client.resending import RESEND_SECONDS, ResendPolicy
from decathlon_client.resume import VerdictRecord
from decathlon_client.session import HttpEndpoint, OpenSession, ReconnectingSession, ServerEndpoint
from decathlon_client.values import (
    Filters,
    JsonObject,
    OnDifference,
    OnProgress,
    Policy,
    Reply,
    Task,
    Tool,
    as_objects,
    filter_arguments,
)

START_SECONDS = 60.0
"""How long a `start_episode` that was sent is protected from cancellation."""
CLOSE_SECONDS = 30.0
"""How long closing one episode may take; a server that does not answer ends it by its lease."""
CLOSE_QUEUE_SECONDS = 60.0
"""How long an episode waits until it is its turn to be closed."""
MAX_CONCURRENT = 16
"""Limit on `start_episode` requests sent at once, and on `close_episode` requests. A slow server would answer
the last of hundreds too late; it opens the sandboxes of started episodes in parallel anyway."""
DISCONNECT_SECONDS = 1.0
"""For the connection after an interrupt, when the episodes have had `close_budget.INTERRUPTED_SECONDS`."""
NOT_OPEN = "this Decathlon is not open: use it in `async with`"

log = logging.getLogger("decathlon.client")


class Decathlon:
    """A connection to a decathlon-mcp server: `async with Decathlon("http://127.0.0.1:8765") as d:`.

    `url` is the root of a server or of a cluster, or its lobby (`.../mcp`). Without it, the environment
    variable `DECATHLON_URL` is read; without both it is http://127.0.0.1:8765. `token` is one of its tokens,
    if it requires one; without it, `DECATHLON_TOKEN` is read. An empty one is none. Raises ValueError if
    either cannot be right.

    Enter and leave it in the same task; in between, any task may use it and its episodes.

    A request whose connection is lost is sent again until the server answers, for up to `resend_seconds` (0:
    never), and is carried out once; so is a call whose sandbox the server does not reach. Only entering fails
    at once if there is no server.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, *, resend_seconds: float = RESEND_SECONDS
    ) -> None:
        self._server: ServerEndpoint = HttpEndpoint(url, token)
        self._resend_policy = ResendPolicy(resend_seconds)
        self._default_task: str | None = None
        self._reset()

    @classmethod
    def embedded(
        cls,
        suite: str | PathLike[str] | Sequence[str | PathLike[str]] = "starter",
        provider: str | None = None,
        task: str | None = None,
        **settings: Any,
    ) -> Self:
        """Run the server in this process, without a port. Requires `decathlon-mcp[server]`, and for the
        bundled tasks `decathlon-mcp[starter]` too; ClientError on entering names what is missing.

        `task` is the task of `episode()` without arguments. `settings` are the server's settings by name
        (`state=...`, `max_sandboxes=...`). Errors in them are raised on entering.
        """
        suites = [suite] if isinstance(suite, (str, PathLike)) else list(suite)
        values = {"suite": tuple(fspath(path) for path in suites), "provider": provider, **settings}
        return cls.at_endpoint(EmbeddedEndpoint(values), task)

    @classmethod
    def at_endpoint(cls, server: ServerEndpoint, task: str | None = None) -> Self:
        """A connection to a server that lives as long as this connection; `task` as for `embedded`."""
        self = cls.__new__(cls)
        self._server = server
        self._resend_policy = ResendPolicy(0)  # such a server does not come back
        self._default_task = task
        self._reset()
        return self

    def _reset(self) -> None:
        self._stack: AsyncExitStack | None = None
        self._lobby: ReconnectingSession | None = None
        self._cluster: ClusterEndpoint | None = None
        self._tasks: ShieldedTasks | None = None
        self._owners: EpisodeOwners | None = None
        self._tools: dict[object, tuple[Tool, ...]] = {}
        self._listing = anyio.Lock()
        self._episodes_budget = CloseBudget()
        self._close_budget = CloseBudget()
        self._starting = anyio.CapacityLimiter(MAX_CONCURRENT)
        self._closing = anyio.CapacityLimiter(MAX_CONCURRENT)

    async def __aenter__(self) -> Self:
        if self._stack is not None:
            raise RuntimeError("this Decathlon is open already")
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server.run())
            self._tasks = await stack.enter_async_context(shielded_tasks())
            try:
                await self._open_lobby(stack)
            except ClientError as error:
                if error.code != CLUSTER_CODE:
                    raise
                assert isinstance(self._server, HttpEndpoint)
                self._cluster = ClusterEndpoint(self._server.root, self._server.token)
                await stack.enter_async_context(self._cluster.run())
                await self._open_lobby(stack)
            self._owners = await stack.enter_async_context(episode_owners())
            self._stack = stack.pop_all()
        return self

    async def _open_lobby(self, stack: AsyncExitStack) -> None:
        self._lobby = self._session(None)
        stack.push_async_callback(self._lobby.aclose, self._close_budget)
        await self._lobby.open(resend=False)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._stack is not None, "this Decathlon is not open"
        stack, episodes_budget, close_budget = self._stack, self._episodes_budget, self._close_budget
        self._reset()
        if is_interrupt(error):
            episodes_budget.shorten()
            close_budget.shorten(INTERRUPTED_SECONDS + DISCONNECT_SECONDS)
        await stack.__aexit__(kind, error, trace)

    async def tasks(
        self, split: str | None = None, *, prompts: bool = True, **filters: Unpack[Filters]
    ) -> list[Task]:
        """List the server's tasks, with their prompts. Opens no sandbox.

        Raises RequestError for a split or a need that no task has; the message names the valid ones.
        """
        return await self._list_tasks(split=split, prompts=prompts, **filters)

    async def tools(self, task: str | Task) -> tuple[Tool, ...]:
        """The tools that an episode of the task shows to a model: its own and `claim_done`.

        They come from the lists that the server has cached. For a task of which it has none, an episode is
        opened, listed and closed, once for each set of servers. This connection remembers the answers.
        Raises UnknownTaskError, NotRunnableError, SetUpError.
        """
        known = task
        if isinstance(known, str):
            known = next((listed for listed in await self.tasks(prompts=False) if listed.id == task), task)
        # Of an unknown task only the server can suggest similar ids: let it refuse the request.
        key: object = known if isinstance(known, str) else (known.suite, known.servers, known.local_tools)
        async with self._listing:
            if key not in self._tools:
                self._tools[key] = await self._cached_tools(known) or await self._first_tools(known)
            return self._tools[key]

    async def _cached_tools(self, task: str | Task) -> tuple[Tool, ...]:
        """The task's tools that the server knows without an episode; none if it does not know them."""
        reply = await self._ask("list_tools", {"task": task if isinstance(task, str) else task.id})
        return tuple(Tool.read(raw) for raw in as_objects((reply.structured or {}).get("tools")))

    async def _first_tools(self, task: str | Task) -> tuple[Tool, ...]:
        async with self.episode(task, **RETRIES) as episode:
            return tuple(episode.tools)

    async def sample(
        self,
        count: int = 1,
        split: str | None = None,
        *,
        seed: int | None = None,
        prompts: bool = True,
        **filters: Unpack[Filters],
    ) -> list[Task]:
        """Draw `count` runnable tasks, all different as long as there are enough.

        The same seed gives the same tasks; without a seed every draw is new. With an `order`, the seed is the
        page number (pages of `count` tasks, from 0), and without a seed each draw continues after the last
        one. Raises RequestError if no task matches.
        """
        return await self._list_tasks(sample=count, split=split, seed=seed, prompts=prompts, **filters)

    async def _list_tasks(self, **filters: Any) -> list[Task]:
        reply = await self._ask("list_tasks", filter_arguments(**filters))
        return [Task.read(raw) for raw in as_objects((reply.structured or {}).get("tasks"))]

    def episode(
        self,
        task: str | Task | None = None,
        *,
        split: str | None = None,
        seed: int | None = None,
        launch_time: datetime | str | None = None,
        max_calls: int | None = None,
        policy: Policy | None = None,
        tries: int = 1,
        patience_seconds: float = 0.0,
        labels: Mapping[str, str] | None = None,
        outside: bool = False,
        snapshots: int | None = None,
        on_progress: OnProgress | None = None,
        **filters: Unpack[Filters],
    ) -> AbstractAsyncContextManager[Episode]:
        """Open an episode of a task, or of a task drawn as by `sample`. Waits until it is ready.

        `policy` may restrict who sees the reward further than the server does. `tries`: how often opening is
        tried before its failure counts. `patience_seconds`: how long a full server is asked again, at the
        intervals that it names, and how long one that went away is waited for. `labels`: names and short
        texts by which the episode is found later, such as `run` and `step`. `outside`: with the label
        `replay_of`, also a task that reaches what episodes share. `snapshots`: the episode's state is saved
        after every so many calls, for `branch`. `on_progress` is called while waiting. On exit the episode is
        closed and its sandbox removed; a claimed attempt is still graded.
        Raises UnknownTaskError, NotRunnableError, AtCapacityError, SetUpError.
        """
        draw = filter_arguments(split=split, seed=seed, **filters)
        opener = self._opener(
            launch_time=launch_time,
            max_calls=max_calls,
            policy=policy,
            tries=tries,
            patience_seconds=patience_seconds,
            labels=labels or {},
            outside=outside,
            snapshots=snapshots,
        )
        default = None if draw else self._default_task
        return opener.open(task or default, draw=draw, on_progress=on_progress)

    @overload
    def branch(
        self,
        episode: Episode | str,
        *,
        at: int,
        count: None = None,
        on_difference: OnDifference = "refuse",
        outside: bool = False,
        snapshots: int | None = None,
        tries: int = 1,
        patience_seconds: float = 0.0,
        labels: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> AbstractAsyncContextManager[Episode]: ...

    @overload
    def branch(
        self,
        episode: Episode | str,
        *,
        at: int,
        count: int,
        on_difference: OnDifference = "refuse",
        outside: bool = False,
        snapshots: int | None = None,
        tries: int = 1,
        patience_seconds: float = 0.0,
        labels: Mapping[str, str] | None = None,
    ) -> AbstractAsyncContextManager[Lockstep]: ...

    def branch(
        self,
        episode: Episode | str,
        *,
        at: int,
        count: int | None = None,
        on_difference: OnDifference = "refuse",
        outside: bool = False,
        snapshots: int | None = None,
        tries: int = 1,
        patience_seconds: float = 0.0,
        labels: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> AbstractAsyncContextManager[Episode] | AbstractAsyncContextManager[Lockstep]:
        """Open an episode that stands where another stood after its call `at`, and wait until it does.

        The other, or its handle, may still play. If its state after this call was saved, the new one is a
        copy. Otherwise the calls after the newest saved state, or all of them, are made again, and the
        replies are compared: one that differs is a SetUpError, or with `on_difference="report"` counted in
        the verdict. `count`: open so many at once, as `lockstep` does. `outside`: also for a task that
        reaches the network, services or accounts that episodes share. `labels`: added to the other episode's
        labels. All else as for `episode`. Raises RequestError for a call after which there can be no branch,
        AccessDeniedError, UnknownEpisodeError, AtCapacityError.
        """
        opener = self._opener(
            tries=tries,
            patience_seconds=patience_seconds,
            labels=labels or {},
            outside=outside,
            snapshots=snapshots,
        )
        handle = episode if isinstance(episode, str) else episode.id
        draw = {"branch_of": handle, "at": at, "on_difference": on_difference}
        if count is not None:
            task = "" if isinstance(episode, str) else episode.task
            return open_lockstep(opener, [task] * count, draw=draw)
        return opener.open(None, draw=draw, on_progress=on_progress)

    async def snapshot(self, episode: Episode | str) -> int:
        """Save an episode's state with all its processes; returns the number of its last call.

        `branch` copies it for that `at`. A call that runs may end before, and later ones wait. Raises
        NotRunnableError where sandboxes cannot be saved, and RequestError for an attempt that is closed.
        """
        handle = episode if isinstance(episode, str) else episode.id
        reply = await self._ask("snapshot_episode", {"episode": handle})
        return int((reply.structured or {})["at"])

    def lockstep(
        self, tasks: Iterable[str | Task], **options: Unpack[OpeningOptions]
    ) -> AbstractAsyncContextManager[Lockstep]:
        """Open an episode of each task at once, for trainers that generate for all of them together.

        Waits until each is ready or has failed; a failure is its slot's (`slot.failure`). On exit all are
        closed. The server must have room for all of them.
        """
        refuse_text(tasks)
        return open_lockstep(self._opener(**options), tasks)

    def batch(
        self,
        tasks: Iterable[str | Task] | AsyncIterable[str | Task],
        *,
        concurrency: int,
        n: int = 1,
        run: str | None = None,
        progress: bool = True,
        player_seconds: float | None = None,
        group_seconds: float | None = None,
        late: Late = "truncate",
        resume: str | PathLike[str] | VerdictRecord | None = None,
        **options: Unpack[OpeningOptions],
    ) -> AbstractAsyncContextManager[Batch]:
        """Play `concurrency` episodes at a time until all tasks, which are drawn as needed, are played.

        Each task is played `n` times; these episodes are a group, with the same launch time and thus the same
        prompt. The episodes are labelled with the name of the `run` (by default the date, the time and four
        letters; printed once), their `group` and `attempt`. `progress`: show a bar on stderr (on a terminal,
        with `rich`), or else a line now and then. An attempt whose player takes longer than `player_seconds`
        is truncated: see `Episode.truncate`. `group_seconds` after the first attempt of a group began, its
        attempts in play are truncated too; attempts that are still opening or have not begun are dropped:
        their results have a TimeoutError and the fault `deadline`. With `late="drop"` every attempt without a
        verdict is dropped. The time in which the caller does not wait for a result does not count. Leaving
        early closes the open episodes, after an interrupt within 5 s.

        `resume` names a file to which each verdict is appended. A batch that is started again with it plays
        only what has no verdict there, and yields the others first, with `resumed` and without `played`.
        Entering raises ValueError if the file is not one of these, or another batch uses it; so does a task
        whose verdicts in it are of another revision of the suite, once the results that there are were taken.
        """
        refuse_text(tasks)
        plan = Plan(run or "", concurrency, n, player_seconds, group_seconds, late)

        def opener(labels: Mapping[str, str]) -> EpisodeOpener:
            return self._opener(**{**options, "labels": labels})

        labels = dict(options.get("labels") or {})
        run_name(run, labels)  # raises before the batch is entered
        return open_batch(opener, tasks, plan, labels, progress, resume)

    def _opener(self, **options: Unpack[OpeningOptions]) -> EpisodeOpener:
        return EpisodeOpener(self._start_and_connect, self._resend_policy, options)

    async def ask(
        self, tool: str, arguments: JsonObject | None = None, *, on_progress: OnProgress | None = None
    ) -> Reply:
        """Call one of the lobby's tools and return its reply, for episodes that outlive this connection.

        Raises ClientError if the server refuses the request; a tool that fails returns a reply with
        `is_error`.
        """
        return await self._call_lobby(self._lobby, tool, arguments or {}, on_progress=on_progress)

    @asynccontextmanager
    async def attach(self, episode: str) -> AsyncGenerator[Episode]:
        """Connect to an existing episode by its handle or address. It stays open on exit.

        At its agent's address it can be played, but neither evaluated nor truncated. Raises
        UnknownEpisodeError, EpisodeEndedError.
        """
        async with self._connect(episode, None, CloseBudget()) as connected:
            # Its tools are listed also after its end.
            await connected._raise_if_ended()  # pyright: ignore[reportPrivateUsage]
            yield connected

    @asynccontextmanager
    async def _start_and_connect(
        self, arguments: JsonObject, close_budget: CloseBudget, on_progress: OnProgress | None
    ) -> AsyncGenerator[Episode]:
        """Open an episode, given the arguments of `start_episode`."""
        with close_budget.shorten_on_interrupt():
            if self._cluster is not None:
                async with self._hold(self._cluster, arguments, close_budget, on_progress) as episode:
                    yield episode
                return
            if self._owners is None:
                raise RuntimeError(NOT_OPEN)
            # One that is not wanted any more would be started before its owner knows.
            await anyio.lowlevel.checkpoint_if_cancelled()
            # Its closing may come after this client's own.
            lobby = self._lobby
            # So its time to close is the client's: a user that is cancelled waits no longer, and the closing
            # of many episodes on a busy machine goes on.
            owner = EpisodeOwner(
                partial(self._start, lobby, arguments, self._episodes_budget),
                partial(self._close, lobby, self._episodes_budget),
            )
            self._owners.add(owner)
            started: JsonObject = {}
            try:
                started = await owner.started()
                address = started.get("address") or str(started["episode"])
                agent_address = started.get("agent_address") or started.get("agent")
                async with self._connect(address, on_progress, close_budget, agent_address) as episode:
                    yield episode
            except Exception as error:
                if isinstance(error, ClientError):
                    _name_episode(error, started)
                if is_players_fault(error):
                    owner.reason = f"the player failed: {player_failure(error)}"
                raise
            finally:
                with close_budget.shield(math.inf):
                    await owner.aclose()

    @asynccontextmanager
    async def _hold(
        self,
        cluster: ClusterEndpoint,
        arguments: JsonObject,
        close_budget: CloseBudget,
        on_progress: OnProgress | None,
    ) -> AsyncGenerator[Episode]:
        """An episode on one of a cluster's nodes."""
        held = cluster.hold(arguments)
        async with self._starting:
            await self._running_tasks.start(held.run)
        agent_address = held.start.get("agent_address")
        try:
            address = str(held.start["address"])
            async with self._connect(address, on_progress, close_budget, agent_address, held) as episode:
                yield episode
        except ClientError as error:
            _name_episode(error, held.start)
            raise
        finally:
            with close_budget.shield(CLOSE_SECONDS):
                await held.aclose()

    @asynccontextmanager
    async def _connect(
        self,
        episode: str,
        on_progress: OnProgress | None,
        close_budget: CloseBudget,
        agent_address: str | None = None,
        held: HeldEpisode | None = None,
    ) -> AsyncGenerator[Episode]:
        session, cluster = self._session(episode), self._cluster
        async with AsyncExitStack() as stack:
            stack.push_async_callback(session.aclose, close_budget)
            ask: CallLobby = self._ask
            if cluster is not None:
                # What the lobby is asked about an episode, only its own node knows.
                lobby = self._new_session(episode, lambda owner: cluster.open_node_lobby(owner, episode))
                stack.push_async_callback(lobby.aclose, close_budget)
                ask = partial(self._ask, lobby=lobby)
                if held is not None:
                    held.end_with_node(session, lobby)
            yield await connect_episode(session, ask, agent_address, on_progress)

    async def _start(
        self, lobby: ReconnectingSession | None, arguments: JsonObject, close_budget: CloseBudget
    ) -> JsonObject:
        """Start an episode; returns the result of `start_episode`."""
        async with self._starting:
            # Each try is shielded: an episode that was started must be known here, or nobody would close it.
            # One whose starter is cancelled between two tries ends for lack of a first request.
            reply = await self._call_lobby(
                lobby,
                "start_episode",
                {**arguments, "wait": False},
                limit_try=lambda: close_budget.shield(START_SECONDS),
            )
        if reply.is_error:
            raise ClientError(reply.text)
        started = reply.structured or {}
        if "episode" not in started:
            raise ProtocolError("`start_episode` gave no handle; is this a decathlon-mcp server?")
        return dict(started)

    async def _close(
        self,
        lobby: ReconnectingSession | None,
        close_budget: CloseBudget,
        handle: str,
        reason: str | None,
    ) -> None:
        """Close an episode. Bounded; never raises."""
        arguments = {"episode": handle, **({"reason": reason} if reason else {})}
        # An error here would hide the one that ended the body; the lease ends the episode anyway.
        with close_budget.shield(CLOSE_QUEUE_SECONDS):
            async with self._closing:
                with close_budget.shield(CLOSE_SECONDS):
                    try:
                        await self._ask("close_episode", arguments, lobby=lobby)
                    except ClientError as error:
                        log.info("An episode could not be closed: %s", error.message)
                    return
        log.info("An episode could not be closed in time")

    async def _call_lobby(
        self, lobby: ReconnectingSession | None, tool: str, arguments: JsonObject, **options: Any
    ) -> Reply:
        """Call one of the lobby's tools. `options`: of `ReconnectingSession.request`.

        Raises the error of a reply that says that the arguments are wrong, and every other ClientError.
        """
        if lobby is None:
            raise RuntimeError(NOT_OPEN)
        params = {"name": tool, "arguments": arguments}
        reply = Reply.read(await lobby.request("tools/call", params, **options))
        if (error := error_from_reply(reply)) is not None:
            raise error
        return reply

    async def _ask(
        self, tool: str, arguments: JsonObject, *, lobby: ReconnectingSession | None = None
    ) -> Reply:
        """Call one of the lobby's tools, by default of the server's. Raises ClientError if it fails."""
        reply = await self._call_lobby(lobby or self._lobby, tool, arguments)
        if reply.is_error:
            raise ClientError(reply.text)
        return reply

    def _session(self, episode: str | None) -> ReconnectingSession:
        server = self._cluster or self._server
        return self._new_session(server.address(episode), lambda owner: server.open_session(owner, episode))

    def _new_session(self, address: str, open_session: OpenSession) -> ReconnectingSession:
        return ReconnectingSession(self._running_tasks, address, open_session, self._resend_policy)

    @property
    def _running_tasks(self) -> ShieldedTasks:
        if self._tasks is None:
            raise RuntimeError(NOT_OPEN)
        return self._tasks


def _name_episode(error: ClientError, start: JsonObject) -> None:
    """Let the error say in which episode it happened, given the result of `start_episode`."""
    error.episode = error.episode or start.get("public_id")
    error.page = error.page or start.get("page")
