"""`POST /episodes`: starts an episode that ends with the response to the request.

The body has the arguments of `start_episode`. The response is a stream of JSON lines: what `start_episode`
returns, then the episode's phase every few seconds, and at last how the episode ended. The client that reads
it knows that the server lives, and ends the episode by closing it: nothing else has to be closed.
Schedulers that place requests, such as Ray Serve, place episodes by it.

A request with an `Idempotency-Key` can be sent again, after a restart of the server too: it gets the same
episode, which then ends with the newest response.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager

import anyio
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from decathlon_mcp.episodes.call import MAX_OPERATION_CHARACTERS
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.http.authentication import Tokens
from decathlon_mcp.http.bodies import BodyReader
from decathlon_mcp.http.protocol import HELD_KEY
from decathlon_mcp.http.refusals import refusal
from decathlon_mcp.labels import LABEL_HEADER, read_label_header
from decathlon_mcp.protocol.headers import Headers
from decathlon_mcp.protocol.lobby_tools import describe_start, start_tool
from decathlon_mcp.protocol.responses import CONNECTION_KEY
from decathlon_mcp.types import JsonObject, as_object

HEARTBEAT_SECONDS = 5.0
"""Time between two lines of a response."""
LINES_HEADERS = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class HeldEpisodes:
    """The endpoint `/episodes` of one server."""

    def __init__(
        self,
        registry: EpisodeRegistry,
        tokens: Tokens,
        bodies: BodyReader,
        public_url: str | None,
        *,
        has_page: bool,
    ) -> None:
        self._registry = registry
        self._tokens = tokens
        self._bodies = bodies
        self._public_url = public_url.rstrip("/") if public_url else None
        self._has_page = has_page
        self._newest: dict[str, object] = {}
        """The newest response of each episode, by the episode's id."""

    async def serve(self, request: Request) -> Response:
        """Start the episode, and hold it as long as the response is read.

        Raises McpError.
        """
        principal = self._tokens.require(request.headers.get("authorization"))
        headers = Headers(request.scope["headers"])
        async with self._bodies.read(headers, request.receive, principal.share_key) as body:
            content = body
        try:
            call = start_tool().from_arguments(_arguments(content))
            operation = _operation(request.headers.get("idempotency-key"))
            labels = read_label_header(",".join(request.headers.getlist(LABEL_HEADER)))
            episode = await call.start(
                self._registry, principal, operation=operation, labels=labels, ends_with_response=True
            )
        except DecathlonError as error:
            return refusal(error)
        base_url = self._public_url or str(request.base_url).rstrip("/")
        request.scope[HELD_KEY] = True
        start = describe_start(self._registry, episode, base_url, has_page=self._has_page)
        return _HeldResponse(episode, start, self._holding(episode))

    @contextmanager
    def _holding(self, episode: Episode) -> Generator[None]:
        """The episode ends with the context, unless a newer response holds it."""
        response = self._newest[episode.id] = object()
        # A client that had lost the connection is back.
        episode.lease.acquire(use=False).release()
        try:
            yield
        finally:
            if self._newest.get(episode.id) is response:
                del self._newest[episode.id]
                if not self._registry.shutdown.handing_over:
                    episode.close(Ending.CLIENT_LOST)


class _HeldResponse(Response):
    """A response that lasts as long as the episode, or as its client reads it. `start`: the first line."""

    def __init__(self, episode: Episode, start: JsonObject, holding: AbstractContextManager[None]) -> None:
        self._episode = episode
        self._start = start
        self._holding = holding

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Not one of Starlette's responses: they notice that the client is gone by the next line at the
        # earliest.
        with self._holding:
            with anyio.CancelScope() as connected:
                scope[CONNECTION_KEY].watch(connected.cancel)
                await self._send_lines(send)

    async def _send_lines(self, send: Send) -> None:
        state = self._episode.state
        await send({"type": "http.response.start", "status": 200, "headers": LINES_HEADERS})
        await _send_line(send, self._start)
        while state.phase is not Phase.ENDED:
            with anyio.move_on_after(HEARTBEAT_SECONDS):
                await state.reach(Phase.ENDED)
            await _send_line(send, _status(self._episode))
        await send({"type": "http.response.body", "body": b""})


async def _send_line(send: Send, value: JsonObject) -> None:
    line = json.dumps(value, ensure_ascii=False).encode() + b"\n"
    await send({"type": "http.response.body", "body": line, "more_body": True})


def create(
    registry: EpisodeRegistry, tokens: Tokens, bodies: BodyReader, public_url: str | None, *, has_page: bool
) -> Route:
    """The route of one server."""
    held = HeldEpisodes(registry, tokens, bodies, public_url, has_page=has_page)
    name = "POST: an episode that ends with the response"
    return Route("/episodes", held.serve, methods=["POST"], name=name)


def _arguments(body: bytes) -> JsonObject:
    """The request's body. Raises BadRequestError."""
    try:
        arguments = as_object(json.loads(body or b"{}"))
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if arguments is None:
        raise BadRequestError("the body must be a JSON object: the arguments of `start_episode`")
    return arguments


def _operation(key: str | None) -> str | None:
    """The id of a request's operation. Raises BadRequestError."""
    if key is not None and not 0 < len(key) <= MAX_OPERATION_CHARACTERS:
        raise BadRequestError(f"Idempotency-Key must have 1 to {MAX_OPERATION_CHARACTERS} characters")
    return key


def _status(episode: Episode) -> JsonObject:
    state = episode.state
    status: JsonObject = {"phase": str(state.phase)}
    if state.phase is Phase.ENDED:
        status["ending"] = str(state.ending)
    if state.cause is not None:
        status["cause"] = state.cause.message
    return status
