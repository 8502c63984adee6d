"""`stdio --url`: stdin and stdout of this process, and a server elsewhere over streamable HTTP.

Messages are relayed as they are: a line is a POST, what comes back is a line. Only what HTTP wants besides is
read off them: the session, the revision, the headers of the revision without sessions. There, cancelling a
request is closing its stream; with a handshake it is a message like any other.

Imports nothing of the server: it is run where there are no sandboxes, on any system, where only the client is
installed (with `mcp` 2.3 or later).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import quote, urlsplit

import anyio
import anyio.to_thread
import httpx2
from anyio.abc import TaskGroup
from mcp.shared.inbound import NAME_BEARING_METHODS, encode_header_value

from decathlon_client.background import background_tasks
from decathlon_client.sse import events
from decathlon_client.stdin import stdin_lines
from decathlon_client.values import JsonObject, as_object
from decathlon_mcp.errors import BadRequestError

CONNECT_SECONDS = 30.0
GOODBYE_SECONDS = 5.0
LINE_BYTES = 64 << 20
LISTEN_AGAIN_SECONDS = (1.0, 2.0, 5.0, 15.0, 30.0)
"""How long it waits before it listens for the server's own messages again, where that broke off."""
LOST: Final = -32000
PARSE_ERROR: Final = -32700
VERSION_KEY = "io.modelcontextprotocol/protocolVersion"


async def bridge(url: str, task: str | None) -> int:
    """Relay until stdin ends, or SIGTERM or SIGINT has ended it; then the session is ended with a DELETE.

    `url` is a server's, or an address of one. Raises BadRequestError where it is neither.
    """
    where = address(url, task)
    token = os.environ.get("DECATHLON_TOKEN", "")
    if token.startswith("${"):  # a program that fills in templates, and had nothing to fill this one with
        token = ""
    _say(f"stdin and stdout are a client of {where} now")
    async with httpx2.AsyncClient(
        headers={"Authorization": f"Bearer {token}"} if token else {},
        timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
        limits=httpx2.Limits(max_connections=None),
        follow_redirects=True,
    ) as http:
        async with stdin_lines(LINE_BYTES) as lines, background_tasks() as tasks:
            relay = Bridge(where, http, tasks)
            async for line in lines:
                if line.strip():
                    await relay.take(line.strip())
        await relay.leave()
    return 0


def alone(words: Sequence[str]) -> int:
    """The command where there is nothing to read command lines with; the status to exit with."""
    parser = argparse.ArgumentParser("decathlon-mcp stdio")
    parser.add_argument("--url", required=True)
    parser.add_argument("--task")
    asked = parser.parse_args(words)
    try:
        return anyio.run(bridge, asked.url, asked.task)
    except BadRequestError as error:
        _say(error.message)
        return 1


def address(url: str, task: str | None = None) -> str:
    """Where to connect: an address as it is; of a server the lobby or, with a task, that task's."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise BadRequestError(f"--url: not the address of a server, as http://127.0.0.1:8765 is one: {url!r}")
    if parts.path.startswith(("/tasks/", "/episodes/")) and task is None:
        return url
    root = url.rstrip("/").removesuffix("/mcp")
    return f"{root}/mcp" if task is None else f"{root}/tasks/{quote(task, safe='')}/mcp"


@dataclass(slots=True)
class _Session:
    """What the handshake left behind. `hello` opens another like it where the server has forgotten this."""

    id: str | None
    version: str
    hello: bytes
    listening: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def headers(self) -> dict[str, str]:
        named = {"Mcp-Session-Id": self.id} if self.id else {}
        return {**named, "MCP-Protocol-Version": self.version}


class Bridge:
    """One client's messages to one address, and what comes back."""

    def __init__(self, url: str, http: httpx2.AsyncClient, tasks: TaskGroup) -> None:
        self._url = url
        self._http = http
        self._tasks = tasks
        self._session: _Session | None = None
        self._opening = anyio.Lock()
        self._sessionless: dict[object, anyio.CancelScope] = {}
        self._given_up: set[object] = set()
        self._stdout = anyio.Lock()

    async def take(self, line: bytes) -> None:
        """One line of the client's. Requests are relayed side by side, everything else in its order."""
        try:
            message = json.loads(line)
        except ValueError:
            await self._tell(_error(None, PARSE_ERROR, "not JSON"))
            return
        told = _object_of(message)
        method, number = told.get("method"), told.get("id")
        if method == "initialize":
            await self._open(line, number)
        elif method is not None and number is not None:
            self._tasks.start_soon(self._request, line, told)
        elif method == "notifications/cancelled" and self._cancelled(told):
            pass
        else:
            await self._post(line, None, self._headers(told))
            if method == "notifications/initialized" and self._session is not None:
                self._tasks.start_soon(self._listen, self._session)

    async def leave(self) -> None:
        """End the session, if there is one; bounded."""
        if (session := self._session) is not None and session.id:
            with anyio.move_on_after(GOODBYE_SECONDS), suppress(httpx2.HTTPError):
                await self._http.delete(self._url, headers=session.headers())

    def _cancelled(self, told: JsonObject) -> bool:
        """Note that a request is cancelled; true where that is all there is to do."""
        number = _object_of(told.get("params")).get("requestId")
        if self._session is not None:
            self._given_up.add(number)
            return False
        if (scope := self._sessionless.get(number)) is not None:
            scope.cancel()
        return True

    async def _open(self, hello: bytes, number: object) -> None:
        """The handshake, before anything else: what follows belongs to its session."""
        try:
            answer, status, session = await self._greet(hello)
        except httpx2.HTTPError as error:
            await self._tell(_error(number, LOST, f"no server answers at {self._url}: {_words(error)}"))
            return
        self._session = session
        await self._hand_on(answer, number, status)

    async def _greet(self, hello: bytes) -> tuple[bytes, int, _Session | None]:
        """What the server answers to `initialize`, and the session that this opened, if it did."""
        async with self._sent(hello, {}) as response:
            answer = b""
            async for message in _messages(response):
                answer = message
        told = _object(answer)
        result = _object_of(told.get("result"))
        if "protocolVersion" not in result:
            return answer, response.status_code, None
        found = response.headers.get("mcp-session-id")
        return answer, response.status_code, _Session(found, str(result["protocolVersion"]), hello)

    async def _request(self, line: bytes, told: JsonObject) -> None:
        number, headers = told.get("id"), self._headers(told)
        with anyio.CancelScope() as scope:
            if "Mcp-Method" in headers:
                self._sessionless[number] = scope
            try:
                await self._post(line, number, headers)
            finally:
                self._sessionless.pop(number, None)

    def _headers(self, told: JsonObject) -> dict[str, str]:
        """What HTTP wants of a message: without a session its revision, its method, and whom it is for."""
        params = _object_of(told.get("params"))
        version = _object_of(params.get("_meta")).get(VERSION_KEY)
        if not isinstance(version, str):
            return self._session.headers() if self._session is not None else {}
        method = str(told.get("method"))
        name = params.get(NAME_BEARING_METHODS.get(method, ""))
        named = {"Mcp-Name": encode_header_value(name)} if isinstance(name, str) else {}
        return {"MCP-Protocol-Version": version, "Mcp-Method": method, **named}

    async def _post(
        self, line: bytes, number: object, headers: Mapping[str, str], *, again: bool = False
    ) -> None:
        """Relay a message and what is answered to it. Whoever waits for `number` is told in any case."""
        session, answered = self._session, False
        try:
            async with self._sent(line, headers) as response:
                forgotten = response.status_code == 404 and "Mcp-Session-Id" in headers
                async for message in _messages(response):
                    if not forgotten:
                        answered |= await self._hand_on(message, number, response.status_code)
            if forgotten and session is not None and not again:
                fresh = await self._opened_again(session)
                await self._post(line, number, fresh.headers(), again=True)
                return
            why = f"the server broke off (HTTP {response.status_code}); whether this was done is not known"
        except _ForgottenError:
            why = "the server has ended this session, and with it its episode: start anew"
        except httpx2.ConnectError as error:
            why = f"no server answers at {self._url}: {_words(error)}"
        except httpx2.HTTPError as error:
            why = f"lost {self._url}: {_words(error)}; whether this was done is not known"
        if not (answered or number is None or number in self._given_up):
            await self._tell(_error(number, LOST, why))

    async def _hand_on(self, message: bytes, number: object, status: int) -> bool:
        """One message of a response; was it what `number` waits for?

        What HTTP refuses with has no id, or is no JSON-RPC at all; what refuses a notification is nobody's.
        """
        told = _object(message)
        if status >= 400:
            error = told.get("error") or {"code": LOST, "message": f"HTTP {status}: {_cut(message)}"}
            if number is None:
                _say(f"the server refuses a notification: {_object_of(error).get('message')}")
                return False
            message = _dumped({"jsonrpc": "2.0", "id": number, "error": error})
        await self._tell(message)
        return "method" not in told

    @asynccontextmanager
    async def _sent(self, line: bytes, headers: Mapping[str, str]) -> AsyncGenerator[httpx2.Response]:
        asked = {
            "Content-Type": "application/json",
            "Accept": "application/json, text/event-stream",
            **headers,
        }
        async with self._http.stream("POST", self._url, content=line, headers=asked) as response:
            yield response

    async def _opened_again(self, session: _Session) -> _Session:
        """Another session in the place of one that the server does not know any more, as after its restart.

        Raises _ForgottenError where the session was an episode: another would be another attempt, and nobody
        would know.
        """
        if "/tasks/" in self._url:
            raise _ForgottenError
        async with self._opening:
            if self._session is not session and self._session is not None:
                return self._session
            session.listening.cancel()
            _, _, fresh = await self._greet(session.hello)
            if fresh is None:
                raise _ForgottenError
            self._session = fresh
            ready = b'{"jsonrpc":"2.0","method":"notifications/initialized"}'
            async with self._sent(ready, fresh.headers()):
                pass
            _say("the server had forgotten the session, and has a new one")
        self._tasks.start_soon(self._listen, fresh)
        await self._tell(b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}')
        return fresh

    async def _listen(self, session: _Session) -> None:
        """Relay what the server says of its own accord, over the session's own stream."""
        waits = iter(LISTEN_AGAIN_SECONDS)
        with session.listening:
            while session.id:
                asked = {"Accept": "text/event-stream", **session.headers()}
                with suppress(httpx2.HTTPError):
                    async with self._http.stream("GET", self._url, headers=asked) as response:
                        if 400 <= response.status_code < 500:
                            return
                        async for message in _messages(response):
                            waits = iter(LISTEN_AGAIN_SECONDS)
                            await self._tell(message)
                await anyio.sleep(next(waits, LISTEN_AGAIN_SECONDS[-1]))

    async def _tell(self, message: bytes) -> None:
        """One line for the client."""
        line = message.strip()
        if b"\n" in line or b"\r" in line:
            line = _dumped(json.loads(line))
        async with self._stdout:
            await anyio.to_thread.run_sync(_write, line + b"\n")


class _ForgottenError(Exception):
    """The session was an episode, and is over."""


async def _messages(response: httpx2.Response) -> AsyncIterator[bytes]:
    """What a response carries, each message as it came: the events of a stream, or the one of a body."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        async for message in events(response.aiter_bytes()):
            yield message
    elif body := (await response.aread()).strip():
        yield body


def _object(message: bytes) -> JsonObject:
    try:
        return _object_of(json.loads(message))
    except ValueError:
        return {}


def _object_of(value: object) -> JsonObject:
    return as_object(value) or {}


def _error(number: object, code: int, message: str) -> bytes:
    return _dumped({"jsonrpc": "2.0", "id": number, "error": {"code": code, "message": message}})


def _dumped(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def _cut(message: bytes) -> str:
    return message[:500].decode("utf-8", "replace").strip()


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def _say(text: str) -> None:
    sys.stderr.write(f"decathlon-mcp: {text}\n")
    sys.stderr.flush()
