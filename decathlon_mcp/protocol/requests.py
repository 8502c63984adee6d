"""Requests as services see them, and what a service is; the same over HTTP and stdio, in every revision."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeAlias, cast, get_args

import msgspec
from msgspec import UnsetType
from starlette.types import Receive, Scope, Send

from decathlon_mcp.driver.replies import CallParams, Reply
from decathlon_mcp.episodes.call import Waiter, check_operation
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.lease import Hold
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import AtCapacityError, BadRequestError, DecathlonError, LimitExceededError
from decathlon_mcp.labels import LABEL_HEADER
from decathlon_mcp.protocol.headers import Headers
from decathlon_mcp.protocol.messages import (
    CALL,
    DISCOVER,
    ENVELOPE_PREFIX,
    INITIALIZE,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    LIST,
    LIST_PROMPTS,
    LOG_LEVEL_KEY,
    METHOD_NOT_FOUND,
    OPERATION_KEY,
    PING,
    PROGRESS_TOKEN,
    SESSIONLESS_VERSIONS,
    SET_LEVEL,
    Kind,
    McpError,
    Message,
    Params,
    RequestId,
    request_id_text,
)
from decathlon_mcp.protocol.results import (
    SERVER_INFO,
    envelope_members,
    error_result,
    relayed_error,
    wire_error,
)
from decathlon_mcp.protocol.sessions import LOG_LEVELS, Address, Session
from decathlon_mcp.storage.trajectory import RequestKeys
from decathlon_mcp.suites.prompts import CLAIM, EVALUATE, LOCAL, spell
from decathlon_mcp.types import JsonObject, Names, as_json, as_object, json_kind

_log = logging.getLogger("decathlon.protocol")

START_TOOL = "start_episode"
NESTED_CALL = "call_tool"
"""The lobby's tool that calls another tool."""
_CLAIM_TOOLS = {spell(names, LOCAL, CLAIM) for names in get_args(Names)}
_LONG_TOOLS = frozenset({*_CLAIM_TOOLS, EVALUATE, START_TOOL, "list_tools"})
"""This server's tools that can be silent for long."""
_CACHEABLE = frozenset({LIST, LIST_PROMPTS, DISCOVER})
"""Methods whose results have a time to live in revisions without sessions."""
MAX_WAITING = 256
"""Requests of one session that wait for their answers."""
_NO_PARAMS = Params()
Result: TypeAlias = JsonObject | Reply
"""What a service answers: a result, or the reply of a task's server."""
Respond: TypeAlias = Callable[["Request"], Awaitable[Result]]


class RequestContext(msgspec.Struct, eq=False):
    """What is known of a request apart from its message."""

    principal: Principal = msgspec.field(default_factory=Principal)
    address: Address = Address()
    headers: Headers = msgspec.field(default_factory=Headers)
    """The headers of the HTTP request; empty for a line."""
    asgi: tuple[Scope, Receive, Send] | None = None
    """The HTTP request, whose body has been read; None for a line."""
    body_bytes: int = 0
    public_url: str | None = None
    """The server's URL as configured."""
    has_page: bool = False
    """Whether the server shows its episodes to people."""
    start: Callable[[], Episode] | None = None
    """Starts the episode of `initialize` at a task's address."""
    access: EpisodeAccess | None = None
    """Access to the episode of the address, or to the episode that the session is."""
    by_agent_id: bool = False
    """Whether the address has an agent's id, which needs no token."""
    started: list[Episode] = msgspec.field(default_factory=list[Episode])
    """The episodes that the request has started, which only its reply makes known."""
    awaited: tuple[Episode, Hold] | None = None
    """The episode that the request waits for, if its client may send it again on any connection."""
    abandoned: bool = False
    """Whether the client went away without a reply."""
    may_return: bool = False
    """Whether the client can come back for the reply."""
    called_at: float = 0.0
    """When the call was made, by `perf_counter`; 0 without a call."""
    replied_at: float = 0.0
    """When the reply came, by `perf_counter`; 0 without a reply."""

    @property
    def share_key(self) -> str | None:
        """The token whose share of the server the request uses, for an agent that of its episode's owner."""
        if self.by_agent_id and self.access is not None:
            return self.access.episode.spec.owner.share_key
        return self.principal.share_key

    @property
    def http(self) -> tuple[Scope, Receive, Send]:
        """The HTTP request, where there is one."""
        assert self.asgi is not None
        return self.asgi

    @property
    def base_url(self) -> str | None:
        """The server's public URL if configured, else the client's URL for the server; None without HTTP."""
        if self.public_url or self.asgi is None:
            return self.public_url
        scope = self.asgi[0]
        return f"{scope['scheme']}://{self.headers.text(b'host')}{scope.get('root_path', '')}"

    @property
    def label_header(self) -> str:
        """The header with labels, which counts only where an episode starts."""
        name = LABEL_HEADER.encode()
        if name not in self.headers.repeated or self.asgi is None:
            return self.headers.text(name) or ""
        return ",".join(value.decode("latin-1") for key, value in self.asgi[0]["headers"] if key == name)

    def add_started(self, episode: Episode) -> None:
        """The request has started an episode, which only its reply makes known."""
        self.started.append(episode)
        if self.abandoned:
            self.abandon()

    @contextmanager
    def awaiting(self, episode: Episode) -> Generator[None]:
        """Hold the lease of an episode that the request waits for, as long as its client is there."""
        hold = episode.lease.acquire(use=False)
        self.awaited = episode, hold
        if self.abandoned:
            self.abandon()
        try:
            yield
        finally:
            hold.release()

    def abandon(self) -> None:
        """The client gets no reply: end the episodes that nobody knows.

        An episode that the client may ask for again ends after the grace.
        """
        self.abandoned = True
        for episode in self.started:
            if self.may_return:
                episode.lease.lose_client()
            else:
                episode.close(Ending.CLIENT_LOST)
        if self.awaited is not None:
            episode, hold = self.awaited
            hold.release(answered=False)
            if episode not in self.started:
                episode.lease.lose_client(until_ready=True)


class Request(Waiter, ABC):
    """A request on its way. `session`: None in revisions without sessions."""

    params = _NO_PARAMS
    """The parameters, except for a call's, whose arguments may have megabytes."""
    name = ""
    arguments: bytes | None = None
    """The name and the arguments of a call."""
    can_stream = True
    """Whether notifications can be sent before the result."""
    is_replaced = False
    """Whether it ended because its connection broke, while another request waits for the same answer."""
    _request_keys: RequestKeys | None = None
    _progress = 0.0
    """The progress that was reported last."""

    def __init__(
        self, message: Message, context: RequestContext, session: Session | None, version: str
    ) -> None:
        """Raises McpError for a call whose name or arguments have a wrong type."""
        self.id = cast("RequestId", message.id)
        self.method = message.method
        self.meta = message.meta
        self.context = context
        self.session = session
        self.version = version
        if self.method != CALL:
            self.params = message.params or _NO_PARAMS
            return
        name = None if message.params is None else message.params.name
        if not isinstance(name, str):
            raise McpError(INVALID_PARAMS, f"tools/call: `name` must be a string, not {json_kind(name)}")
        self.name, self.arguments = name, message.arguments()

    @property
    def operation(self) -> str | None:
        """The id that the client has chosen for the request. Raises BadRequestError."""
        return check_operation(self.meta[OPERATION_KEY]) if OPERATION_KEY in self.meta else None

    @property
    def event_key(self) -> str | None:
        """What names the response for a client that comes back; None if it cannot."""
        return None

    @property
    def keys(self) -> RequestKeys:
        """The keys by which the client comes back to the request's call. Raises BadRequestError."""
        if self._request_keys is None:
            session_id = None if self.session is None else self.session.id
            self._request_keys = RequestKeys(self.operation, session_id, self.event_key)
        return self._request_keys

    @property
    def last_key(self) -> str | None:
        """The key that a client has which comes back for the answer; None if it cannot come back."""
        return next(reversed(self.keys.texts), None)

    @property
    def call_params(self) -> CallParams:
        """The parameters of a call, as the task's server gets them."""
        relayed = {
            key: value
            for key, value in self.meta.items()
            if key != OPERATION_KEY and not key.startswith(ENVELOPE_PREFIX)
        }
        return CallParams(self.arguments, relayed)

    def decoded_arguments(self) -> JsonObject | None:
        """The arguments of a call, decoded. Raises BadRequestError."""
        if self.arguments is None:
            return None
        try:
            return as_object(json.loads(self.arguments))
        except (ValueError, RecursionError) as error:
            raise BadRequestError(f"the arguments are not valid JSON: {error}") from None

    # what comes before the answer

    async def on_notification(self, params: JsonObject, *, is_progress: bool) -> None:
        if is_progress:
            await self.report_progress(params)
            return
        # 2026-07-28 asks request by request and gets none by default.
        minimum = self.meta.get(LOG_LEVEL_KEY) if self.session is None else self.session.log_level
        level = params.get("level")
        if level in LOG_LEVELS and minimum in LOG_LEVELS[: LOG_LEVELS.index(level) + 1]:
            # A reply in JSON cannot carry it; then the session's own stream does, if there is one.
            await self.notify("notifications/message", params, with_reply=self.can_stream)

    @property
    def reports_progress(self) -> bool:
        """Whether the client asked for progress, and can get it."""
        return self.can_stream and self.meta.get(PROGRESS_TOKEN) is not None

    async def report_progress(self, params: JsonObject) -> None:
        """Send progress, the server's own or a task's server's, under the client's token.

        The progress on one token must not decrease. A request that waits for its episode and then for a tool
        has notifications of both, and a request that another server process continues starts to wait again.
        """
        if self.reports_progress:
            self._progress = max(params["progress"], self._progress)
            params = {**params, "progress": self._progress, PROGRESS_TOKEN: self.meta[PROGRESS_TOKEN]}
            await self.notify("notifications/progress", params)

    async def accepted(self, kind: Kind, *, agent: str = "") -> None:
        """The request is on record where it must be: from now on its client may come back for the answer.

        `agent`: the agent's id of the episode, for a request at the lobby.
        """
        return  # over streams, nobody comes back

    @abstractmethod
    async def notify(self, method: str, params: JsonObject, *, with_reply: bool = True) -> None:
        """Send a notification, before the reply or on the session's own stream."""

    @abstractmethod
    def cancel(self, *, session_ended: bool = False) -> None:
        """End the request: its client has cancelled it, or the session ends."""

    # the answer

    def answer(self, result: Result) -> bytes:
        """The JSON-RPC message with a result. Raises McpError for a reply that is an error."""
        if isinstance(result, Reply):
            if result.result is None:
                raise relayed_error(result.error or {})
            text = result.result
            if self.session is None:
                text = result.result_with(envelope_members(result.meta))
        else:
            if self.session is None:
                caching = {"ttlMs": 0, "cacheScope": "private"} if self.method in _CACHEABLE else {}
                members = envelope_members(as_object(result.get("_meta")) or {})
                result = {**result, **caching, **members}
            text = as_json(result)
        return b'{"jsonrpc":"2.0","id":%b,"result":%b}' % (request_id_text(self.id).encode(), text)

    async def outcome(self, respond: Respond) -> tuple[bytes, McpError | None]:
        """The message that answers the request, and its error if it has one."""
        try:
            return self.answer(await respond(self)), None
        except McpError as error:
            # Its frames have the request, which may be megabytes, and refer to the error: a cycle.
            fault = error.with_traceback(None)
        except DecathlonError as error:
            fault = wire_error(error)
        except Exception:  # noqa: BLE001  (the client gets an answer, whatever fails)
            _log.exception("a request failed")
            fault = McpError(INTERNAL_ERROR, "Internal server error")
        return error_message(fault, self.id), fault

    def too_long(self, size_bytes: int, limit_bytes: int, taker: str) -> bytes:
        """The message with an error instead of an answer that is longer than what its `taker` allows."""
        limit = LimitExceededError(
            f"the reply has {size_bytes} bytes, more than the {limit_bytes} that {taker}",
            limit_bytes=limit_bytes,
        )
        if self.method == CALL:
            return self.answer(error_result(limit))
        return error_message(wire_error(limit), self.id)

    def end(self, *, handed_over: bool) -> None:
        """The response is over. `handed_over`: the client was there for all of it."""
        if self.session is not None:
            self.session.requests.pop(self, None)
        if self.call is not None:
            self.call.remove(self, handed_over=handed_over)


def require_room(waiting: int) -> None:
    """Raise AtCapacityError if so many requests of a client that wait for their answers are too many."""
    if waiting >= MAX_WAITING:
        raise AtCapacityError(f"{MAX_WAITING} requests wait for their answers", retryAfterSeconds=1.0)


def error_message(error: McpError, request_id: RequestId | None) -> bytes:
    """The JSON-RPC message with an error."""
    return as_json({"jsonrpc": "2.0", "id": request_id, "error": error.to_json()})


def prefers_events(message: Message) -> bool:
    """Whether an answer is better sent as events than as one JSON body, where the client cannot come back."""
    # JSON is faster, but carries nothing before the result. Events are needed for progress, and for requests
    # that can be silent for long: after 300 s without a byte the Python client closes its whole connection.
    if message.method in (INITIALIZE, LIST) or PROGRESS_TOKEN in message.meta:
        return True
    if message.method != CALL or message.params is None:
        return False
    name, arguments = message.params.name, message.params.arguments
    if name == NESTED_CALL and not isinstance(arguments, UnsetType):
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            name = _decode_named(arguments).name
    return isinstance(name, str) and name in _LONG_TOOLS


_decode_named = msgspec.json.Decoder(Params).decode


class Service(ABC):
    """What serves an address. `respond` serves a request, in a span if the server makes spans.

    All methods raise McpError and DecathlonError.
    """

    methods: frozenset[str] = frozenset({LIST, CALL})
    """What `serve` serves."""
    capabilities: JsonObject = {"logging": {}, "tools": {"listChanged": True}}  # noqa: RUF012  (never changed)

    def __init__(self, registry: EpisodeRegistry) -> None:
        self._registry, spans = registry, registry.spans
        self.respond: Respond = self._respond if spans is None else partial(spans.serve, self._respond)

    async def _respond(self, request: Request) -> Result:
        method, session = request.method, request.session
        if method in self.methods:
            if request.params.cursor is not None and method in _CACHEABLE:
                raise McpError(INVALID_PARAMS, f"{method}: there is no such cursor; lists have one page")
            return await self.serve(request)
        if session is None and method == DISCOVER:
            return await self.discover(request)
        if session is not None and method == INITIALIZE:
            return await self._initialize(request)
        if session is not None and method == SET_LEVEL:
            level = request.params.level
            if level not in LOG_LEVELS:
                levels = ", ".join(LOG_LEVELS)
                raise McpError(INVALID_PARAMS, f"logging/setLevel: `level` must be one of {levels}")
            session.log_level = level
            session.save()
            return {}
        if session is not None and method == PING:
            return {}
        raise McpError(METHOD_NOT_FOUND, "Method not found", method if len(method) < 200 else None)

    async def _initialize(self, request: Request) -> JsonObject:
        params = request.params
        members = (params.capabilities, params.client_info)
        if not isinstance(params.protocol_version, str) or any(as_object(each) is None for each in members):
            raise McpError(
                INVALID_PARAMS,
                "initialize: `protocolVersion` must be a string, `capabilities` and `clientInfo` objects",
            )
        result = await self.initialize(request)
        return {
            "protocolVersion": request.version,
            "capabilities": self.capabilities,
            "serverInfo": SERVER_INFO,
            **result,
        }

    @abstractmethod
    async def initialize(self, request: Request) -> JsonObject:
        """The result of `initialize`, without what all services have."""

    async def discover(self, request: Request) -> JsonObject:
        """The result of `server/discover`."""
        capabilities = {**self.capabilities, "tools": {"listChanged": False}}
        return {"supportedVersions": list(SESSIONLESS_VERSIONS), "capabilities": capabilities}

    @abstractmethod
    async def serve(self, request: Request) -> Result:
        """Serve a request of one of `methods`."""

    @abstractmethod
    async def serve_again(self, request: Request, kind: Kind, agent: str) -> Result:
        """The answer to an earlier request, for a client that comes back for it."""

    def schema_with_headers(self, context: RequestContext, tool: str) -> Mapping[str, Any] | None:
        """The input schema of a tool some of whose arguments must be repeated in headers; None for others."""
        return None


def episode_address(base_url: str | None, episode_id: str) -> str | None:
    """URL at which an episode is served to every revision and any connection; None without HTTP."""
    return f"{base_url}/episodes/{episode_id}/mcp" if base_url else None


def page_address(base_url: str | None, public_id: str, *, has_page: bool) -> str | None:
    """URL of the page that shows an episode to people; None if the server has none, or without HTTP."""
    return f"{base_url}/e/{public_id}" if base_url and has_page else None
