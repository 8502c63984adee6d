"""The client's entry point: a server, its tasks, its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from datetime import datetime
from os import PathLike, fspath
from types import TracebackType
from typing import Any, Self, Unpack, overload

import anyio

from decathlon_client.attempts import Late, Plan
from decathlon_client.batch import Batch, open_batch, run_name
from decathlon_client.client_episode import Episode
from decathlon_client.client_errors import NoVerdictError, RequestError, SandboxLostError, SetUpError, reading
from decathlon_client.client_session import HttpEndpoint, ServerEndpoint
from decathlon_client.client_values import (
    ALONG,
    Filters,
    JsonObject,
    OnDifference,
    OnProgress,
    Policy,
    Reply,
    Task,
    Tool,
    Verdict,
    as_objects,
    filter_arguments,
)
from decathlon_client.connection import ServerConnection
from decathlon_client.local_server import EmbeddedEndpoint
from decathlon_client.lockstep import Lockstep, open_lockstep
from decathlon_client.opener import (
    PATIENCE_SECONDS,
    RETRIES,
    TRIES,
    EpisodeOpener,
    OpeningOptions,
    refuse_text,
)
from decathlon_client.resends import RESEND_SECONDS, ResendPolicy
from decathlon_client.resume import VerdictRecord
from decathlon_client.sdk import cause_of
from decathlon_client.task_groups import CloseBudget, OwnedContext

MAX_CALLS = 1_000_000
"""Most calls of an attempt: a log of 256 MiB has fewer."""
NOT_OPEN = "this Decathlon is not open: use it in `async with`"


class Decathlon:
    """A connection to a decathlon-mcp server: `async with Decathlon("http://127.0.0.1:8765") as d:`.

    `url` is the root of a server or of a cluster, or its lobby (`.../mcp`). Without it, the environment
    variable `DECATHLON_URL` is read; without both it is http://127.0.0.1:8765. `token` is one of its tokens,
    if it requires one; without it, `DECATHLON_TOKEN` is read. An empty token is none. Raises ValueError if
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
        self._opened: ServerConnection | None = None
        self._tools: dict[object, tuple[Tool, ...]] = {}
        self._listing = anyio.Lock()

    async def __aenter__(self) -> Self:
        if self._opened is not None:
            raise RuntimeError("this Decathlon is open already")
        connection = ServerConnection(self._server, self._resend_policy)
        await connection.open()
        self._opened = connection
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        connection = self._connection
        self._reset()
        await connection.aclose(kind, error, trace)

    @property
    def _connection(self) -> ServerConnection:
        if self._opened is None:
            raise RuntimeError(NOT_OPEN)
        return self._opened

    async def tasks(
        self, split: str | None = None, *, prompts: bool = True, **filters: Unpack[Filters]
    ) -> list[Task]:
        """List the server's tasks, with their prompts. Opens no sandbox.

        Raises RequestError for a split or a need that no task has; the message names the valid values.
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
        reply = await self._connection.ask("list_tools", {"task": task if isinstance(task, str) else task.id})
        with reading("a list of tools"):
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
        reply = await self._connection.ask("list_tasks", filter_arguments(**filters))
        with reading("a list of tasks"):
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
        intervals that it names, and how long an absent server is waited for. `labels`: names and short texts
        by which the episode is found later, such as `run` and `step`. `outside`: with the label `replay_of`,
        also a task that reaches what episodes share. `snapshots`: the episode's state is saved after every so
        many calls, for `branch`. `on_progress` is called while waiting. On exit the episode is closed and its
        sandbox removed; a claimed attempt is still graded. Raises UnknownTaskError, NotRunnableError,
        AtCapacityError, SetUpError.
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
        replies are compared: a different reply is a SetUpError, or with `on_difference="report"` counted in
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

        `branch` copies it for that `at`. A call that runs may end before, and later calls wait. Raises
        NotRunnableError where sandboxes cannot be saved, and RequestError for an attempt that is closed.
        """
        handle = episode if isinstance(episode, str) else episode.id
        reply = await self._connection.ask("snapshot_episode", {"episode": handle})
        with reading("a number of a call"):
            return int((reply.structured or {})["at"])

    async def rewards_along(
        self, episode: Episode | str, *, concurrency: int = 8, outside: bool = False
    ) -> list[Verdict | None]:
        """The verdicts that a finished attempt would have had, had it ended after each of its calls.

        The first is for no call at all, the last for all of them. Each is of a branch, which is graded as it
        stands, without an answer; `concurrency` of them play at a time, and none counts in the numbers of a
        run. None stands for a call after which there can be no branch, whose repetition had another reply,
        or whose branch was lost. `outside` is as for `branch`. Raises AccessDeniedError, UnknownEpisodeError,
        and ValueError for a `concurrency` below 1.
        """
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        handle = episode if isinstance(episode, str) else episode.id
        status = (await self._connection.ask("episode_status", {"episode": handle})).structured or {}
        with reading("a number of calls"):
            if (calls := int(status.get("calls") or 0)) > MAX_CALLS:
                raise ValueError(calls)
        verdicts: list[Verdict | None] = [None] * (calls + 1)
        places = anyio.Semaphore(concurrency)

        async def end_after(at: int) -> None:
            async with places:
                with suppress(RequestError, SetUpError, SandboxLostError, NoVerdictError):
                    async with self.branch(
                        handle,
                        at=at,
                        labels={ALONG: str(at)},
                        outside=outside,
                        tries=TRIES,
                        patience_seconds=PATIENCE_SECONDS,
                    ) as branch:
                        verdicts[at] = await branch.evaluate()

        try:
            async with anyio.create_task_group() as tasks:
                for at in range(len(verdicts)):
                    tasks.start_soon(end_after, at)
        except ExceptionGroup as group:
            raise cause_of(group) from None
        return verdicts

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
        prompt: the time of the `Task`, if it has one, or else now. The episodes are labelled with the name of
        the `run` (by default the date, the time and four letters; printed once), their `group` and `attempt`.
        `progress`: show a bar on stderr (on a terminal, with `rich`), or else a line now and then. An attempt
        whose player takes longer than `player_seconds` is truncated: see `Episode.truncate`. `group_seconds`
        after the first attempt of a group began, its attempts in play are truncated too; attempts that are
        still opening or have not begun are dropped: their results have a TimeoutError and the fault
        `deadline`. With `late="drop"` every attempt without a verdict is dropped. The time in which the
        caller does not wait for a result does not count. Leaving early closes the open episodes, after an
        interrupt within 5 s.

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
        return EpisodeOpener(self._open_episode, self._resend_policy, options)

    def _open_episode(
        self, arguments: JsonObject, close_budget: CloseBudget, on_progress: OnProgress | None
    ) -> AbstractAsyncContextManager[Episode]:
        return self._connection.open_episode(arguments, close_budget, on_progress)

    async def call_lobby(
        self, tool: str, arguments: JsonObject | None = None, *, on_progress: OnProgress | None = None
    ) -> Reply:
        """Call one of the lobby's tools and return its reply, for episodes that outlive this connection.

        Raises ClientError if the server refuses the request; a tool that fails returns a reply with
        `is_error`.
        """
        return await self._connection.call_lobby(tool, arguments or {}, on_progress=on_progress)

    @asynccontextmanager
    async def attach(self, episode: str) -> AsyncGenerator[Episode]:
        """Connect to an existing episode by its handle or address. It stays open on exit.

        At its agent's address it can be played, but neither evaluated nor truncated. Raises
        UnknownEpisodeError, EpisodeEndedError.
        """
        async with self._connection.connect(episode, CloseBudget()) as connected:
            # Its tools are listed also after its end.
            await connected._raise_if_ended()  # pyright: ignore[reportPrivateUsage]
            yield connected


_managing: set[asyncio.Task[None]] = set()


class ManagedEpisode:
    """An open episode with a connection of its own; made by `open`, and open until `close`.

    For hooks of frameworks that use asyncio: it may be opened in one task and closed in another.
    """

    def __init__(self, owned: OwnedContext[Episode]) -> None:
        self._owned = owned
        # asyncio itself keeps only weak references to tasks.
        owner = asyncio.create_task(owned.run())
        _managing.add(owner)
        owner.add_done_callback(_managing.discard)

    @classmethod
    async def open(
        cls,
        task: str | Task,
        *,
        url: str | None = None,
        token: str | None = None,
        **options: Unpack[OpeningOptions],
    ) -> Self:
        """Open an episode with retries, as a batch does. `url` and `token` are as for `Decathlon`.

        Raises the error of the last try; cancelled, it leaves no episode.
        """
        managed = cls(OwnedContext(_connected_episode(Decathlon(url, token), task, {**RETRIES, **options})))
        await managed._owned.opened()
        return managed

    @property
    def episode(self) -> Episode:
        """The episode."""
        return self._owned.value

    async def close(self) -> None:
        """Close the episode; a claimed attempt is still graded. Never raises; may be called again."""
        await self._owned.aclose()


@asynccontextmanager
async def _connected_episode(
    decathlon: Decathlon, task: str | Task, options: OpeningOptions
) -> AsyncGenerator[Episode]:
    async with decathlon as d, d.episode(task, **options) as episode:
        yield episode
