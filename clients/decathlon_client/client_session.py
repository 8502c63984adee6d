"""MCP sessions with a server: their owner, opening them again, and addresses of servers."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    nullcontext,
)
from typing import Protocol, TypeAlias

import anyio

from decathlon_client.client_errors import (
    AccessDeniedError,
    CallTimeoutError,
    ClientError,
    ConnectionLostError,
    InvalidReplyError,
    ProtocolError,
    RequestError,
    error_from_json_rpc,
)
from decathlon_client.client_values import (
    TOKEN_VARIABLE,
    JsonObject,
    OnProgress,
    authorization,
    server_token,
    server_url,
)
from decathlon_client.resends import ResendPolicy, Resends, absent_seconds, check_call, with_operation
from decathlon_client.sdk import (
    CLOSED_STREAM_ERRORS,
    ErrorResponse,
    SdkError,
    Session,
    ValidationError,
    cause_of,
    http_session,
    json_rpc_error,
)
from decathlon_client.task_groups import CloseBudget, OwnedContexts

CLOSE_SECONDS = 10.0
"""How long the end of a session may take; the server ends a silent session by itself."""
CONNECTION_CLOSED = -32000
SESSION_TERMINATED = (-32600, 32600)
"""What the SDK (2.x, 1.x) answers for a server that no longer knows the session."""
UNAVAILABLE = frozenset({502, 503, 504})
"""Statuses with which a proxy answers for a server that is gone. This server's own have a JSON-RPC error."""
LOBBY = "/mcp"


class SessionLostError(ConnectionLostError):
    """The server does not know the session any more and has not looked at the request."""


class SessionOwner:
    """One MCP session, owned by one task; requests from any task use it.

    `address` is for messages, `server_info` is the result of `initialize`, `loss` says why the session ended.
    """

    # An SDK client that is entered in one task and left in another breaks anyio's cancel scopes, so none of
    # the SDK's scopes is ever in a task of this package's user.

    def __init__(self, address: str, open_session: OpenSession, contexts: OwnedContexts) -> None:
        self.address = address
        self.server_info: JsonObject = {}
        self.loss: ClientError | None = None
        self._open_session = open_session
        self._session: Session | None = None
        self._error_response: ErrorResponse | None = None
        self._request_scopes: set[anyio.CancelScope] = set()
        self.is_silent = False
        """Whether the session sends nothing any more. A notification of cancellation or a DELETE of a session
        that was lost would cancel the calls that are sent again in the next session."""
        self._owned = contexts.own(self._run())

    async def opened(self) -> None:
        """Wait until the session is open. Raises ClientError if it cannot be opened."""
        await self._owned.opened()

    @asynccontextmanager
    async def _run(self) -> AsyncGenerator[None]:
        try:
            async with self._open_session(self) as session:
                self.server_info = await session.initialize()
                self._session = session
                try:
                    yield
                except BaseException:
                    self.is_silent = True
                    raise
        except Exception as error:  # noqa: BLE001
            loss = self.loss or self._translate(error)
            if self._session is None:
                raise loss from None
            self.loss = loss
        finally:
            self.lose("the connection is closed")

    async def request(self, method: str, params: JsonObject, on_progress: OnProgress | None) -> JsonObject:
        """Send one request and return its result. Raises ClientError; cancellation cancels the request."""
        if self.loss is not None or self._session is None:
            raise self.loss or ConnectionLostError("not connected")
        with anyio.CancelScope() as scope:
            self._request_scopes.add(scope)
            try:
                return await self._session.request(method, params, on_progress)
            except (SdkError, ValidationError, *CLOSED_STREAM_ERRORS) as error:
                translated = self._translate(error)
                if isinstance(translated, ConnectionLostError):
                    self.lose(translated)
                raise translated from None
            finally:
                self._request_scopes.discard(scope)
        raise self.loss or ConnectionLostError("the connection is closed")

    async def aclose(self, close_budget: CloseBudget) -> None:
        """End the session with a DELETE. Bounded; raises only if cancelled."""
        with close_budget.shield(CLOSE_SECONDS):
            await self._owned.aclose()

    def lose(self, reason: str | ClientError) -> None:
        """Give up the session; requests that wait for a reply fail with the reason."""
        self.is_silent = True
        self.loss = self.loss or (reason if isinstance(reason, ClientError) else ConnectionLostError(reason))
        self._owned.leave()
        for scope in self._request_scopes:
            scope.cancel()

    def note_error_response(self, response: ErrorResponse) -> None:
        """Keep an HTTP error of a POST, which the SDK does not always pass on."""
        self._error_response = response

    def note_truncation(self) -> None:
        """Give up the session because the stream of a reply broke off."""
        self.lose("the server broke off in the middle of an answer")

    def _translate(self, error: Exception) -> ClientError:
        response, self._error_response = self._error_response, None
        if response is not None:
            return error_from_response(response)
        cause = cause_of(error)
        if isinstance(cause, ClientError):
            return cause
        if isinstance(cause, SdkError):
            number, message, data = json_rpc_error(cause)
            if number == CONNECTION_CLOSED:
                return ConnectionLostError(f"lost the connection to {self.address}: {message}")
            if number in SESSION_TERMINATED and message == "Session terminated":
                return SessionLostError("the server does not know this session any more")
            return error_from_json_rpc(number, message, data)
        if isinstance(cause, ValidationError):
            return InvalidReplyError(f"the server's answer is not MCP: {' '.join(str(cause).split())[:500]}")
        if isinstance(cause, RuntimeError):
            return ProtocolError(str(cause))
        reason = str(cause) or type(cause).__name__
        if self._session is None:
            reason += "; `decathlon-mcp serve` starts one"
            return ConnectionLostError(f"no server answers at {self.address}: {reason}")
        return ConnectionLostError(f"lost the connection to {self.address}: {reason}")


OpenSession: TypeAlias = Callable[[SessionOwner], AbstractAsyncContextManager[Session]]
"""Opens a session and reports to its owner what the session itself cannot report."""


def error_from_response(response: ErrorResponse) -> ClientError:
    """The error for an HTTP response that is one."""
    message = str(response.error.get("message") or response.text or f"HTTP status {response.status}")
    if response.status == 401:
        message += f"; this client sends its argument `token`, or else {TOKEN_VARIABLE}"
    if response.status in (401, 403):
        return AccessDeniedError(message, code="access_denied")
    if response.status == 413:
        return RequestError(message, code="bad_request")
    data: object = response.error.get("data")
    if response.error and data is not None:
        number: object = response.error.get("code")
        return error_from_json_rpc(number if isinstance(number, int) else 0, message, data)
    if response.status == 404 and response.error:
        return SessionLostError(message)
    if response.status in UNAVAILABLE and not response.error:
        return ConnectionLostError(f"no server answers: HTTP status {response.status}: {message}")
    return ProtocolError(f"the server refused with HTTP status {response.status}: {message}")


class ReconnectingSession:
    """Requests to one address, with a new session whenever the last one was lost.

    A request whose session was lost is sent again in the next one, as long as `policy` allows, and a call
    under the same operation id; so is a call whose sandbox the server does not reach. A request that the
    server answered otherwise is never sent again, whatever the answer.
    """

    def __init__(
        self, contexts: OwnedContexts, address: str, open_session: OpenSession, policy: ResendPolicy
    ) -> None:
        self.address = address
        self._contexts = contexts
        self._open_session = open_session
        self._policy = policy
        self._opening = anyio.Lock()
        self._owner: SessionOwner | None = None
        self._closing = anyio.Event()
        self.loss: ClientError | None = None
        """Why it was given up, if it was."""

    def give_up(self, loss: ClientError) -> None:
        """Let all requests fail with this error, now and from now on."""
        self.loss = loss
        self._closing.set()
        if self._owner is not None:
            self._owner.lose(loss)

    async def open(self, *, resend: bool = True) -> JsonObject:
        """Open a session; returns the server's answer to `initialize`.

        `resend`: whether a server that cannot be reached is waited for.
        """
        resends = Resends(self._policy)
        while True:
            try:
                return (await self._connect()).server_info
            except ConnectionLostError as loss:
                if not resend:
                    raise
                await self._pause(resends, loss, None)

    async def request(
        self,
        method: str,
        params: JsonObject,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
        limit_try: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> JsonObject:
        """Send one request and return its result.

        `timeout` is in seconds and includes all tries; None waits without limit. `limit_try` makes the
        context of each try; a try that it cancels is lost. Raises CallTimeoutError and every other
        ClientError.
        """
        if timeout is not None and math.isnan(timeout):
            raise ValueError("a timeout must be a number")  # NaN would disorder the event loop's timers
        if method == "tools/call":
            check_call(params)
            params = with_operation(params)
        resends, was_forgotten = Resends(self._policy), False
        with anyio.move_on_after(timeout):
            while True:
                sent_at: float | None = None
                try:
                    with limit_try():
                        owner = await self._connect()
                        sent_at = anyio.current_time()
                        result = await owner.request(method, params, on_progress)
                        self._policy.note_answer()
                        return result
                    loss = ConnectionLostError(f"{self.address} did not answer in time")
                except ConnectionLostError as error:
                    loss = error
                except ClientError as error:
                    if absent_seconds(error) is None:
                        raise
                    loss = error
                # A server that has forgotten the session has not looked at the request.
                if isinstance(loss, SessionLostError) and not was_forgotten:
                    was_forgotten = True
                    continue
                await self._pause(resends, loss, sent_at)
                was_forgotten = False
        raise CallTimeoutError(f"{params.get('name', method)}: no answer within {timeout:g} s")

    async def _pause(self, resends: Resends, loss: ClientError, sent_at: float | None) -> None:
        try:
            await resends.pause(loss, self._closing, sent_at)
        except ClientError:
            raise (self.loss or loss) from None

    async def aclose(self, close_budget: CloseBudget) -> None:
        """End the session, if one is open, and open no other."""
        self._closing.set()
        if self._owner is not None:
            await self._owner.aclose(close_budget)

    async def _connect(self) -> SessionOwner:
        async with self._opening:
            if self._closing.is_set():
                raise self.loss or ConnectionLostError("this was closed: use it before its `async with` ends")
            if self._owner is None or self._owner.loss is not None:
                owner = SessionOwner(self.address, self._open_session, self._contexts)
                await owner.opened()
                self._policy.note_answer()
                self._owner = owner
            return self._owner


class ServerEndpoint(Protocol):
    """A server that sessions can be opened with: at a URL, or in this process (`local_server.py`)."""

    def run(self) -> AbstractAsyncContextManager[None]:
        """Keep the endpoint ready for sessions. Raises ClientError if the server cannot be started."""
        ...

    def address(self, episode: str | None) -> str:
        """The address of the lobby, or of an episode given by its handle or its address."""
        ...

    def open_session(self, owner: SessionOwner, episode: str | None) -> AbstractAsyncContextManager[Session]:
        """Open a session with the lobby or with an episode."""
        ...


class HttpEndpoint:
    """A server at a URL, given as its root or its lobby. `root` is its root."""

    def __init__(self, url: str | None, token: str | None) -> None:
        """None: see `values.server_url`. Raises ValueError."""
        self.root = server_url(url, is_root=True).rstrip("/").removesuffix(LOBBY)
        self.token = server_token(token)

    @asynccontextmanager
    async def run(self) -> AsyncGenerator[None]:
        yield

    def address(self, episode: str | None) -> str:
        if episode is None:
            return self.root + LOBBY
        return episode if "://" in episode else f"{self.root}/episodes/{episode}{LOBBY}"

    def open_session(self, owner: SessionOwner, episode: str | None) -> AbstractAsyncContextManager[Session]:
        address = self.address(episode)
        return http_session(
            address,
            authorization(self.token),
            may_send=lambda: not owner.is_silent,
            on_error_response=owner.note_error_response,
            on_truncation=owner.note_truncation,
        )
