"""An open connection to a server: its lobby, and the episodes that are started and closed through it.

An episode is started in the lobby and played at its own address, over HTTP and embedded alike. A session at
`/tasks/{id}/mcp` would save one request, but `start_episode` takes options, returns the handle before the
sandbox opens (so that the episode can be closed whatever happens next), and reports errors in a form that
every version of the SDK passes on. An episode's own address also outlives a connection that breaks.
"""

from __future__ import annotations

import logging
import math
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel

from decathlon_client.attempts import is_players_fault, player_failure
from decathlon_client.client_episode import CallLobby, Episode, connect_episode
from decathlon_client.client_errors import ClientError, ProtocolError, error_from_reply
from decathlon_client.client_session import HttpEndpoint, OpenSession, ReconnectingSession, ServerEndpoint
from decathlon_client.client_values import JsonObject, OnProgress, Reply, as_text
from decathlon_client.cluster import CLUSTER_CODE, ClusterEndpoint, HeldEpisode
from decathlon_client.resends import ResendPolicy
from decathlon_client.task_groups import (
    INTERRUPTED_SECONDS,
    CloseBudget,
    OwnedContexts,
    is_interrupt,
    owned_contexts,
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
"""For the connection after an interrupt, when the episodes have had `INTERRUPTED_SECONDS`."""

log = logging.getLogger("decathlon.client")


class ServerConnection:
    """One connection. `open` and `aclose` are called in the same task; any task may use it in between."""

    def __init__(self, server: ServerEndpoint, resend_policy: ResendPolicy) -> None:
        self._server = server
        self._resend_policy = resend_policy
        self._stack = AsyncExitStack()
        self._cluster: ClusterEndpoint | None = None
        self._episodes_budget = CloseBudget()
        self._close_budget = CloseBudget()
        self._starting = anyio.CapacityLimiter(MAX_CONCURRENT)
        self._closing = anyio.CapacityLimiter(MAX_CONCURRENT)
        self._contexts: OwnedContexts
        self._owners: OwnedContexts
        self._lobby: ReconnectingSession

    async def open(self) -> None:
        """Connect. Raises ClientError; then nothing is left."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._server.run())
            self._contexts = await stack.enter_async_context(owned_contexts())
            try:
                await self._open_lobby(stack)
            except ClientError as error:
                if error.code != CLUSTER_CODE:
                    raise
                assert isinstance(self._server, HttpEndpoint)
                self._cluster = ClusterEndpoint(self._server.root, self._server.token)
                await stack.enter_async_context(self._cluster.run())
                await self._open_lobby(stack)
            self._owners = await stack.enter_async_context(owned_contexts())
            self._stack = stack.pop_all()

    async def _open_lobby(self, stack: AsyncExitStack) -> None:
        self._lobby = self._session(None)
        stack.push_async_callback(self._lobby.aclose, self._close_budget)
        await self._lobby.open(resend=False)

    async def aclose(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close all episodes and disconnect, after an interrupt within seconds."""
        if is_interrupt(error):
            self._episodes_budget.shorten()
            self._close_budget.shorten(INTERRUPTED_SECONDS + DISCONNECT_SECONDS)
        await self._stack.__aexit__(kind, error, trace)

    async def call_lobby(
        self, tool: str, arguments: JsonObject, *, lobby: ReconnectingSession | None = None, **options: Any
    ) -> Reply:
        """Call one of the lobby's tools. `options`: of `ReconnectingSession.request`.

        `lobby`: of a cluster's node. Raises the error of a reply that says that the arguments are wrong, and
        every other ClientError.
        """
        params = {"name": tool, "arguments": arguments}
        reply = Reply.read(await (lobby or self._lobby).request("tools/call", params, **options))
        if (error := error_from_reply(reply)) is not None:
            raise error
        return reply

    async def ask(
        self, tool: str, arguments: JsonObject, *, lobby: ReconnectingSession | None = None, **options: Any
    ) -> Reply:
        """As `call_lobby`, but a tool that fails raises ClientError too."""
        reply = await self.call_lobby(tool, arguments, lobby=lobby, **options)
        if reply.is_error:
            raise ClientError(reply.text)
        return reply

    @asynccontextmanager
    async def open_episode(
        self, arguments: JsonObject, close_budget: CloseBudget, on_progress: OnProgress | None
    ) -> AsyncGenerator[Episode]:
        """Open an episode, given the arguments of `start_episode`."""
        with close_budget.shorten_on_interrupt():
            if self._cluster is not None:
                async with self._hold(self._cluster, arguments, close_budget, on_progress) as episode:
                    yield episode
                return
            # An episode that is not wanted any more would be started before its owner knows.
            await anyio.lowlevel.checkpoint_if_cancelled()
            # Its time to close is the connection's: a user that is cancelled waits no longer, and the closing
            # of many episodes on a busy machine goes on.
            leaving: JsonObject = {}
            owner = self._owners.own(self._started(arguments, leaving))
            started: JsonObject = {}
            try:
                started = await owner.entered()
                address = as_text(started.get("address")) or str(started["episode"])
                agent_address = as_text(started.get("agent_address") or started.get("agent"))
                async with self.connect(address, close_budget, on_progress, agent_address) as episode:
                    episode.labels = arguments.get("labels") or {}
                    yield episode
            except Exception as error:
                if isinstance(error, ClientError):
                    _name_episode(error, started)
                if is_players_fault(error):
                    leaving["reason"] = f"the player failed: {player_failure(error)}"
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
            owner = self._contexts.own(held.run())
            await owner.opened()
        agent_address = as_text(held.start.get("agent_address"))
        try:
            address = str(held.start.get("address"))
            async with self.connect(address, close_budget, on_progress, agent_address, held) as episode:
                episode.labels = arguments.get("labels") or {}
                yield episode
        except ClientError as error:
            _name_episode(error, held.start)
            raise
        finally:
            with close_budget.shield(CLOSE_SECONDS):
                await owner.aclose()

    @asynccontextmanager
    async def connect(
        self,
        episode: str,
        close_budget: CloseBudget,
        on_progress: OnProgress | None = None,
        agent_address: str | None = None,
        held: HeldEpisode | None = None,
    ) -> AsyncGenerator[Episode]:
        """Connect to an episode that is started, by its handle or address."""
        session, cluster = self._session(episode), self._cluster
        async with AsyncExitStack() as stack:
            stack.push_async_callback(session.aclose, close_budget)
            ask: CallLobby = self.ask
            if cluster is not None:
                # What the lobby is asked about an episode, only its own node knows.
                lobby = self._new_session(episode, lambda owner: cluster.open_node_lobby(owner, episode))
                stack.push_async_callback(lobby.aclose, close_budget)
                ask = partial(self.ask, lobby=lobby)
                if held is not None:
                    held.end_with_node(session, lobby)
            yield await connect_episode(session, ask, agent_address, on_progress)

    @asynccontextmanager
    async def _started(self, arguments: JsonObject, leaving: JsonObject) -> AsyncGenerator[JsonObject]:
        """An episode that is started, as the result of `start_episode`, and closed on exit.

        `leaving`: arguments of `close_episode` besides the handle, such as why its user leaves it.
        """
        async with self._starting:
            # Each try is shielded: an episode that was started must be known here, or nobody would close it.
            # An episode whose starter is cancelled between two tries ends for lack of a first request.
            reply = await self.ask(
                "start_episode",
                {**arguments, "wait": False},
                limit_try=lambda: self._episodes_budget.shield(START_SECONDS),
            )
        started = reply.structured or {}
        if "episode" not in started:
            raise ProtocolError("`start_episode` gave no handle; is this a decathlon-mcp server?")
        try:
            yield dict(started)
        finally:
            await self._close({"episode": str(started["episode"]), **leaving})

    async def _close(self, arguments: JsonObject) -> None:
        """Close an episode. Bounded; never raises."""
        budget = self._episodes_budget
        # An error here would hide the error that ended the body; the lease ends the episode anyway.
        with budget.shield(CLOSE_QUEUE_SECONDS):
            async with self._closing:
                with budget.shield(CLOSE_SECONDS):
                    try:
                        await self.ask("close_episode", arguments)
                    except ClientError as error:
                        log.info("An episode could not be closed: %s", error.message)
                    return
        log.info("An episode could not be closed in time")

    def _session(self, episode: str | None) -> ReconnectingSession:
        server = self._cluster or self._server
        return self._new_session(server.address(episode), lambda owner: server.open_session(owner, episode))

    def _new_session(self, address: str, open_session: OpenSession) -> ReconnectingSession:
        return ReconnectingSession(self._contexts, address, open_session, self._resend_policy)


def _name_episode(error: ClientError, start: JsonObject) -> None:
    """Let the error say in which episode it happened, given the result of `start_episode`."""
    error.episode = error.episode or as_text(start.get("public_id"))
    error.page = error.page or as_text(start.get("page"))
