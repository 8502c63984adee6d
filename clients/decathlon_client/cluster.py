"""Episodes on a cluster: each is one HTTP request, whose response stays open as long as the episode.

The scheduler of the cluster (Ray Serve) chooses a node for the request. The response's first line has the
episode's address there, and all further requests go to it directly. A line every few seconds says that the
node lives; closing the response ends the episode.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import anyio

from decathlon_client.client_errors import (
    AtCapacityError,
    ClientError,
    ConnectionLostError,
    NodeLostError,
    ProtocolError,
    reading,
)
from decathlon_client.client_session import (
    LOBBY,
    HttpEndpoint,
    ReconnectingSession,
    SessionOwner,
    error_from_response,
)
from decathlon_client.client_values import JsonObject, as_object, authorization
from decathlon_client.resends import check_params
from decathlon_client.sdk import ErrorResponse, Session, http_client, httpx
from decathlon_client.task_groups import background_tasks

CLUSTER_CODE = "cluster"
"""`code` of the error with which a cluster answers to MCP at its own address."""
START_SECONDS = 30.0
"""How long a cluster may take to start an episode: it is full, or has given the start to a frozen node."""
SILENCE_SECONDS = 20.0
"""How long a response may be silent until its node counts as lost: four heartbeats."""
RETRY_SECONDS = 1.0
"""When a cluster that is full is asked again."""


class ClusterEndpoint:
    """A cluster at a URL, its root.

    Sessions with the lobby are with one of its nodes, which is chosen when they are opened.
    """

    def __init__(self, url: str, token: str) -> None:
        self._root = url
        self._token = token
        self._http: httpx.AsyncClient | None = None

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Keep the connections to the cluster."""
        async with http_client(authorization(self._token)) as self._http:
            yield

    def address(self, episode: str | None) -> str:
        if episode is None:
            return self._root + LOBBY
        if "://" not in episode:
            raise ValueError("on a cluster, an episode is reached by its address, not by its handle")
        return episode

    def open_session(self, owner: SessionOwner, episode: str | None) -> AbstractAsyncContextManager[Session]:
        if episode is not None:
            return self._node(episode).open_session(owner, episode)
        return self._open_lobby(owner)

    def open_node_lobby(self, owner: SessionOwner, episode: str) -> AbstractAsyncContextManager[Session]:
        """A session with the lobby of the node that has an episode, which is given by its address."""
        return self._node(episode).open_session(owner, None)

    @asynccontextmanager
    async def _open_lobby(self, owner: SessionOwner) -> AsyncGenerator[Session]:
        response = await self._client.get(f"{self._root}/nodes", timeout=START_SECONDS)
        response.raise_for_status()
        with reading("a list of nodes"):
            nodes = list(map(str, response.json()["nodes"]))
        if not nodes:
            raise ConnectionLostError("the cluster has no node now")
        async with HttpEndpoint(nodes[0], self._token).open_session(owner, None) as session:
            yield session

    def _node(self, episode: str) -> HttpEndpoint:
        return HttpEndpoint(episode.partition("/episodes/")[0], self._token)

    def hold(self, arguments: JsonObject) -> HeldEpisode:
        """An episode to be started, with the arguments of `start_episode`. Raises RequestError."""
        check_params(arguments)
        return HeldEpisode(self._client, f"{self._root}/episodes", arguments)

    @property
    def _client(self) -> httpx.AsyncClient:
        assert self._http is not None, "the endpoint runs"
        return self._http


class HeldEpisode:
    """One episode on a cluster, owned by a task of its own. `start` has the first line of the response."""

    def __init__(self, client: httpx.AsyncClient, url: str, arguments: JsonObject) -> None:
        self.start: JsonObject = {}
        self._client = client
        self._url = url
        self._arguments = arguments
        self._sessions: list[ReconnectingSession] = []
        self._loss: NodeLostError | None = None

    def end_with_node(self, *sessions: ReconnectingSession) -> None:
        """Give these sessions up if the node is lost: their requests would wait for its return."""
        self._sessions += sessions
        if self._loss is not None:
            self._lose(self._loss)

    def _lose(self, loss: NodeLostError) -> None:
        self._loss = loss
        for session in self._sessions:
            session.give_up(loss)

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        """Start the episode, and end it by closing the response. Raises ClientError if it cannot start."""
        try:
            async with self._request() as lines, background_tasks() as tasks:
                tasks.start_soon(self._watch, lines)
                yield
        except (TimeoutError, httpx.HTTPError, ProtocolError) as error:
            if self.start:
                return  # of closing the response
            if not isinstance(error, TimeoutError):
                raise ConnectionLostError(f"the cluster broke off: {error or type(error).__name__}") from None
            raise AtCapacityError(
                f"the cluster did not start the episode within {START_SECONDS:g} s: all nodes are full, or "
                "one does not answer",
                data={"retryAfterSeconds": RETRY_SECONDS},
            ) from None

    async def _watch(self, lines: AsyncGenerator[JsonObject]) -> None:
        """Wait until the episode ends, or give its sessions up because its node is lost."""
        reason = "its node broke off"
        try:
            while True:
                with anyio.fail_after(SILENCE_SECONDS):
                    status = await anext(lines, None)
                if status is None:
                    break
                if status.get("phase") == "ended":
                    return
        except TimeoutError:
            reason = f"its node was silent for {SILENCE_SECONDS:g} s"
        except (httpx.HTTPError, ProtocolError) as error:
            reason = f"its node broke off: {error or type(error).__name__}"
        self._lose(NodeLostError(f"the episode is lost: {reason}", code="sandbox_lost"))

    @asynccontextmanager
    async def _request(self) -> AsyncGenerator[AsyncGenerator[JsonObject]]:
        """The lines after the first one, which becomes `start`."""
        with anyio.fail_after(START_SECONDS) as limit:
            async with self._client.stream("POST", self._url, json=self._arguments) as response:
                if response.status_code != 200:
                    raise _refusal(ErrorResponse(response.status_code, await response.aread()))
                lines = _objects(response)
                first = await anext(lines, None)
                if first is None or "episode" not in first:
                    raise ConnectionLostError("the cluster broke off before the episode started")
                if not str(first.get("address")).startswith(("http://", "https://")):
                    raise ProtocolError("the cluster started an episode without an address")
                self.start = first
                limit.deadline = float("inf")
                yield lines


async def _objects(response: httpx.Response) -> AsyncGenerator[JsonObject]:
    """The lines of a response. Raises ProtocolError."""
    async for line in response.aiter_lines():
        try:
            value = as_object(json.loads(line))
        except (ValueError, RecursionError):
            value = None
        if value is None:
            raise ProtocolError("a line of the response is not a JSON object")
        yield value


def _refusal(response: ErrorResponse) -> ClientError:
    """The error for a start that was refused: by a node's server, or by the scheduler."""
    if response.error:
        return error_from_response(response)
    message = f"the cluster refused with HTTP status {response.status}: {response.text}"
    if response.status == 503:
        return AtCapacityError(message, data={"retryAfterSeconds": RETRY_SECONDS})
    # What Serve answers for a node that is about to be lost.
    may_pass = response.status >= 500 or response.status == 408
    return ConnectionLostError(message) if may_pass else ProtocolError(message)
