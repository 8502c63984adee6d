"""One connection to one address, owned by a task of its own; requests from any task borrow it.

Entering an SDK client in one task and leaving it in another is an error of cancel scopes, so no scope of the
SDK's is ever in the task of whoever uses this package.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager, contextmanager

import anyio
from anyio.abc import TaskGroup, TaskStatus

from decathlon_client.close_budget import CloseBudget
from decathlon_client.errors import (
    AccessDeniedError,
    CallTimeoutError,
    ClientError,
    ConnectionLostError,
    ProtocolError,
    error_from_json_rpc,
)
from decathlon_client.sdk import CLOSED, Refusal, SdkError, Session, ValidationError, cause_of, json_rpc
from decathlon_client.values import JsonObject, OnProgress

CLOSE_SECONDS = 10.0
CONNECTION_CLOSED = -32000
INVALID_REQUEST = (-32600, 32600)
"""What the SDK answers on behalf of a server that no longer knows the session (2.x, 1.x)."""


class SessionGoneError(ConnectionLostError):
    """The server does not know this session any more; the request was not looked at."""


class Connection:
    """One MCP session. `where` is for messages; `info` is what the server said at the handshake."""

    def __init__(self, where: str, dial: Dial) -> None:
        self.where = where
        self.info: JsonObject = {}
        self.loss: ClientError | None = None
        self._dial = dial
        self._session: Session | None = None
        self._refusal: Refusal | None = None
        self._waiting: set[anyio.CancelScope] = set()
        self._stop = anyio.Event()
        self._ended = anyio.Event()

    async def run(self, *, task_status: TaskStatus[None]) -> None:
        """Connect, then stay until closed or lost. Raises ClientError where it could not connect."""
        try:
            async with self._dial(self) as session:
                self.info = await session.initialize()
                self._session = session
                task_status.started()
                await self._stop.wait()
        except Exception as error:  # noqa: BLE001
            loss = self.loss or self._translated(error)
            if self._session is None:
                raise loss from None
            self.loss = loss
        finally:
            self.lose("the connection is closed")
            self._ended.set()

    async def request(self, method: str, params: JsonObject, on_progress: OnProgress | None) -> JsonObject:
        """The result of one request. Raises ClientError; being cancelled cancels the request."""
        with self._while_alive() as session:
            try:
                return await session.request(method, params, on_progress)
            except (SdkError, ValidationError, *CLOSED) as error:
                told = self._translated(error)
                if isinstance(told, ConnectionLostError):
                    self.lose(told)
                raise told from None

    async def aclose(self, close_budget: CloseBudget) -> None:
        """End the session, with a DELETE. Bounded; never raises but for being cancelled afterwards."""
        self._stop.set()
        with close_budget.shielded(CLOSE_SECONDS):
            await self._ended.wait()

    def lose(self, why: str | ClientError) -> None:
        """Give up the connection; who waits for an answer is told."""
        self.loss = self.loss or (why if isinstance(why, ClientError) else ConnectionLostError(why))
        self._stop.set()
        for scope in self._waiting:
            scope.cancel()

    def note_refusal(self, refusal: Refusal) -> None:
        """A POST was refused: the SDK does not always say how."""
        self._refusal = refusal

    def note_cut(self) -> None:
        """The stream of a reply broke off."""
        self.lose("the server broke off in the middle of an answer")

    @contextmanager
    def _while_alive(self) -> Generator[Session]:
        if self.loss is not None or self._session is None:
            raise self.loss or ConnectionLostError("not connected")
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                yield self._session
            finally:
                self._waiting.discard(scope)
        if scope.cancelled_caught:
            raise self.loss or ConnectionLostError("the connection is closed")

    def _translated(self, error: Exception) -> ClientError:
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            return _refused(refusal)
        cause = cause_of(error)
        if isinstance(cause, ClientError):
            return cause
        if isinstance(cause, SdkError):
            number, message, data = json_rpc(cause)
            if number == CONNECTION_CLOSED:
                return ConnectionLostError(f"lost the connection to {self.where}: {message}")
            if number in INVALID_REQUEST and message == "Session terminated":
                return SessionGoneError("the server does not know this session any more")
            return error_from_json_rpc(number, message, data)
        if isinstance(cause, ValidationError):
            return ProtocolError(f"the server's answer is not MCP: {' '.join(str(cause).split())[:500]}")
        if isinstance(cause, RuntimeError):
            return ProtocolError(str(cause))
        said = str(cause) or type(cause).__name__
        lost = "no server answers at" if self._session is None else "lost the connection to"
        return ConnectionLostError(f"{lost} {self.where}: {said}")


def _refused(refusal: Refusal) -> ClientError:
    message = str(refusal.error.get("message") or refusal.text or f"HTTP status {refusal.status}")
    if refusal.status in (401, 403):
        return AccessDeniedError(message, code="access_denied")
    data: object = refusal.error.get("data")
    if refusal.error and data is not None:
        return error_from_json_rpc(int(refusal.error.get("code", 0)), message, data)
    if refusal.status == 404 and refusal.error:
        return SessionGoneError(message)
    return ProtocolError(f"the server refused with HTTP status {refusal.status}: {message}")


class Line:
    """A way to one address that is dialled again when it broke.

    A call under way when it breaks is lost, and that is said; the next one goes over a new connection. What
    the server did not look at, since it had forgotten the session, is sent again.
    """

    def __init__(self, tasks: TaskGroup, where: str, dial: Dial) -> None:
        self.where = where
        self._tasks = tasks
        self._dial = dial
        self._dialling = anyio.Lock()
        self._connection: Connection | None = None
        self._closed = False

    async def open(self) -> JsonObject:
        """Connect; what the server said at the handshake."""
        return (await self._connected()).info

    async def request(
        self,
        method: str,
        params: JsonObject,
        *,
        on_progress: OnProgress | None = None,
        timeout: float | None = None,
    ) -> JsonObject:
        """The result of one request. `timeout` in seconds; None waits as long as it takes.

        Raises CallTimeoutError, and any other ClientError.
        """
        with anyio.move_on_after(timeout):
            try:
                return await (await self._connected()).request(method, params, on_progress)
            except SessionGoneError:
                return await (await self._connected()).request(method, params, on_progress)
        raise CallTimeoutError(f"{params.get('name', method)}: no answer within {timeout:g} s")

    async def aclose(self, close_budget: CloseBudget) -> None:
        """End the session if there is one; there will be no other."""
        self._closed = True
        if self._connection is not None:
            await self._connection.aclose(close_budget)

    async def _connected(self) -> Connection:
        async with self._dialling:
            if self._closed:
                raise ConnectionLostError("this was closed")
            if self._connection is None or self._connection.loss is not None:
                connection = Connection(self.where, self._dial)
                await self._tasks.start(connection.run)
                self._connection = connection
            return self._connection


Dial = Callable[[Connection], AbstractAsyncContextManager[Session]]
"""Opens a session for a connection, which is told of what the session cannot tell."""
