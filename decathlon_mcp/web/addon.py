"""The addon that makes `mitmdump` a recording proxy; `proxy.py` starts it and documents its options.

It runs from a copy, since mitmproxy loads a script again, without its state, when the file changes.

Every connection comes from the server, which announces the port that it will come from and the session that
it belongs to. Any other is closed. The modes of the proxy:

- `regular`: clients that use HTTP_PROXY and HTTPS_PROXY;
- `reverse:http` and `reverse:https`: clients that were led here by name resolution, whose requests have only
  a path; the site is the one that they name in `Host`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mitmproxy import connection, ctx, http
from mitmproxy.proxy import server_hooks

# The last entry: only what mitmproxy's own environment does not have is found there.
sys.path.append(os.environ["DECATHLON_WEB_PACKAGES"])

from decathlon_mcp.web.control import MAX_LINE_BYTES, Configuration, Ready
from decathlon_mcp.web.exchanges import Counts, Headers, WebRequest, WebResponse
from decathlon_mcp.web.recording import Recording, RecordingError, Rollout
from decathlon_mcp.web.session import (
    Filling,
    PendingExchange,
    Session,
    requests_digest,
)
from decathlon_mcp.web.targets import RefusedTargetError, Targets, check_port, public_address

PENDING = "decathlon_pending"
RESOLVE_SECONDS = 20.0
CONDITIONS = ("If-None-Match", "If-Modified-Since", "If-Match", "If-Unmodified-Since", "If-Range")
"""Removed from requests: the recording needs the whole response, and a replay ignores them."""


class OpenRecording:
    """A recording and the sessions that use it."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.filling = Filling()
        self.sessions: set[str] = set()


class RecordingProxy:
    """The addon: mitmproxy's hooks, and the requests of the server."""

    def __init__(self) -> None:
        # Nothing else may write to the control channel.
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._configuration: Configuration | None = None
        self._targets = Targets()
        self._recordings: dict[Path, OpenRecording] = {}
        self._sessions: dict[str, Session] = {}
        self._episodes: dict[str, list[Session]] = {}
        self._announced: dict[int, Session] = {}
        self._connections: dict[str, Session] = {}
        self._control: asyncio.Task[None] | None = None

    # The server's requests

    def running(self) -> None:
        """mitmproxy listens."""
        self._control = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            self._configuration = Configuration.from_json(json.loads(await reader.readline()))
            self._targets = Targets(self._configuration.addresses)
            self._send({"ready": self._ready().to_json()})
            while line := await reader.readline():
                request = json.loads(line)
                try:
                    answer = await self._handle(request)
                except (RecordingError, KeyError, ValueError) as error:
                    answer = {"error": f"{type(error).__name__}: {error}"}
                self._send({"id": request["id"], **answer})
        finally:
            for opened in self._recordings.values():
                opened.recording.close()
            ctx.master.shutdown()

    def _send(self, message: dict[str, Any]) -> None:
        self._output.write(json.dumps(message) + "\n")
        self._output.flush()

    def _ready(self) -> Ready:
        servers = ctx.master.addons.get("proxyserver").servers
        listening = {server.mode.data[:6]: server.listen_addrs[0][:2] for server in servers}
        authority = Path(ctx.options.confdir).expanduser() / "mitmproxy-ca-cert.pem"
        return Ready(listening[""], listening["http:/"], listening["https:"], authority.read_text("ascii"))

    async def _handle(self, request: dict[str, Any]) -> dict[str, Any]:
        match request["do"]:
            case "open":
                await self._open(request)
                return {}
            case "connect":
                self._announced[request["port"]] = self._sessions[request["session"]]
                return {}
            case "counts":
                return self._counts(request["episode"])
            case "close":
                counts = self._counts(request["episode"])
                await self._close(request["episode"])
                return counts
            case other:
                raise ValueError(f"there is no request {other!r}")

    async def _open(self, request: dict[str, Any]) -> None:
        assert self._configuration is not None
        path = Path(request["recording"])
        if path not in self._recordings:
            limit = self._configuration.max_recording_bytes
            recording = await asyncio.to_thread(Recording.open, path, max_bytes=limit)
            self._recordings[path] = OpenRecording(recording)
        opened = self._recordings[path]
        session = Session(
            request["session"],
            request["mode"],
            request["part"],
            opened.recording,
            opened.filling,
            self._configuration.max_response_bytes,
        )
        opened.sessions.add(session.id)
        self._sessions[session.id] = session
        self._episodes.setdefault(request["episode"], []).append(session)

    def _counts(self, episode: str) -> dict[str, Any]:
        sessions = self._episodes.get(episode, [])
        counts = sum((session.counts for session in sessions), Counts())
        problem = next((session.problem for session in sessions if session.problem), "")
        return {"counts": counts.to_json(), "problem": problem}

    async def _close(self, episode: str) -> None:
        sessions = self._episodes.pop(episode, [])
        if not sessions:
            return
        counts = sum((session.counts for session in sessions), Counts())
        rollout = Rollout(
            episode, sessions[0].mode, requests_digest(sessions), counts, datetime.now(UTC).isoformat()
        )
        # A regrading has only the evaluator's requests, which say nothing about another rollout.
        if counts != Counts() and any(session.part == "agent" for session in sessions):
            await asyncio.to_thread(sessions[0].recording.add_rollout, rollout)
        for session in sessions:
            self._sessions.pop(session.id, None)
            for path, opened in tuple(self._recordings.items()):
                opened.sessions.discard(session.id)
                if not opened.sessions:
                    del self._recordings[path]
                    await asyncio.to_thread(opened.recording.close)

    # mitmproxy's hooks

    def client_connected(self, client: connection.Client) -> None:
        session = self._announced.pop(client.peername[1], None)
        if session is None:
            client.error = "the connection was not announced"
        else:
            self._connections[client.id] = session

    def client_disconnected(self, client: connection.Client) -> None:
        self._connections.pop(client.id, None)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        if flow.client_conn.proxy_mode.type_name == "reverse":
            # The host of the mode is a placeholder. Setting it would replace the header too.
            header = flow.request.host_header
            flow.request.host = flow.request.pretty_host
            flow.request.host_header = header
        for name in CONDITIONS:
            flow.request.headers.pop(name, None)

    async def request(self, flow: http.HTTPFlow) -> None:
        session = self._connections.get(flow.client_conn.id)
        if session is None:
            flow.kill()
            return
        try:
            answer = await session.answer(_web_request(flow.request))
        except RecordingError as error:
            session.problem = str(error)
            flow.response = http.Response.make(502, f"The recording cannot be read: {error}\n")
            return
        if isinstance(answer, PendingExchange):
            flow.metadata[PENDING] = session, answer
        else:
            flow.response = _http_response(answer, flow.request.method)

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        assert flow.response is not None
        if flow.response.headers.get("Content-Type", "").startswith("text/event-stream"):
            # It may never end.
            flow.response.stream = True

    async def response(self, flow: http.HTTPFlow) -> None:
        if PENDING not in flow.metadata:
            return
        session, pending = flow.metadata.pop(PENDING)
        assert flow.response is not None
        await session.store(pending, None if flow.response.stream else _web_response(flow.response))

    def error(self, flow: http.HTTPFlow) -> None:
        if PENDING in flow.metadata:
            session, pending = flow.metadata.pop(PENDING)
            session.fail(pending)

    async def server_connect(self, data: server_hooks.ServerConnectionHookData) -> None:
        session = self._connections.get(data.client.id)
        if session is None or session.mode == "replay":
            # Requests are answered before; this is for whatever is not HTTP.
            data.server.error = "there is no live web"
            return
        host, port = data.server.address[:2]
        try:
            check_port(port)
            if (named := self._targets.named(host, port)) is not None:
                data.server.address = named
                return
            data.server.address = (await _public_address(host, port), port)
        except RefusedTargetError as error:
            data.server.error = str(error)


async def _public_address(host: str, port: int) -> str:
    """Raises RefusedTargetError."""
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), RESOLVE_SECONDS)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise RefusedTargetError(f"{host} cannot be resolved: {error}") from None
    return public_address(host, [str(entry[4][0]) for entry in found])


def _web_request(request: http.Request) -> WebRequest:
    return WebRequest(request.method, request.pretty_url, _headers(request.headers), _content(request))


def _web_response(response: http.Response) -> WebResponse:
    return WebResponse(response.status_code, response.reason, _headers(response.headers), _content(response))


def _headers(headers: http.Headers) -> Headers:
    return Headers(tuple(headers.items(multi=True)))


def _content(message: http.Message) -> bytes:
    """The body without its content encoding; as it was sent if it cannot be decoded, or was passed on."""
    with contextlib.suppress(ValueError):
        return message.get_content(strict=False) or b""
    return message.raw_content or b""


def _http_response(response: WebResponse, method: str) -> http.Response:
    fields = [
        (name.encode("utf-8", "surrogateescape"), value.encode("utf-8", "surrogateescape"))
        for name, value in response.headers.items
    ]
    made = http.Response.make(response.status, b"" if method == "HEAD" else response.body, fields)
    made.reason = response.reason or made.reason
    if method == "HEAD" and (length := response.headers.get("content-length")):
        made.headers["Content-Length"] = length
    return made


addons = [RecordingProxy()]
