"""The addon that makes `mitmdump` a recording proxy; `proxy.py` starts it and documents its options.

It runs from a copy, since mitmproxy loads a script again, without its state, when the file changes.

Every connection comes from the server and begins with a request of the server (`exchanges.py`). Any other is
closed. The modes of the proxy:

- `regular`: clients that use HTTP_PROXY and HTTPS_PROXY;
- `reverse:http` and `reverse:https`: clients that were led here by name resolution, whose requests have only
  a path; they name the site in `Host`.
"""

from __future__ import annotations

import asyncio
import gc
import hmac
import json
import os
import re
import secrets
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from mitmproxy import connection, ctx, http, tls
from mitmproxy.net.http import http1
from mitmproxy.proxy import server_hooks

# The last entry: only what mitmproxy's own environment does not have is found there.
sys.path.append(os.environ["DECATHLON_WEB_PACKAGES"])

from decathlon_mcp.plugins.web.connections import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    Client,
    LimitedReader,
    Sandbox,
)
from decathlon_mcp.plugins.web.exchanges import (
    MAX_LINE_BYTES,
    MAX_SHOWN,
    Configuration,
    Counts,
    EpisodeCounts,
    Headers,
    Ready,
    RefusedTargetError,
    SessionSpec,
    WebRequest,
    WebResponse,
    check_port,
    host_name,
    named_address,
    public_address,
)
from decathlon_mcp.plugins.web.recording import Recording, RecordingError, Rollout
from decathlon_mcp.plugins.web.sandbox_session import (
    PendingExchange,
    Session,
    SharedRecording,
    refused_response,
    requests_digest,
)

PENDING = "decathlon_pending"
REFUSED = "decathlon_refused"
MAX_PATH_BYTES = 16 << 10
RESOLVE_SECONDS = 20.0
"""How long the name of a site may take to be resolved. A sandbox has `MAX_RESOLVING` at a time."""
RESOLVERS = 32
FIRST_LINE_SECONDS = 30.0
"""How long a connection may take to send the server's request, which a busy machine sends in a second."""
GARBAGE_BYTES = 8 << 20
CANCELLED = "connection cancelled"
"""mitmproxy's error of a connection to a site that nobody waits for any more."""
CONDITIONS = ("If-None-Match", "If-Modified-Since", "If-Match", "If-Unmodified-Since", "If-Range")
"""Removed from requests: the recording needs the whole response, and a replay ignores them."""


class RecordingProxy:
    """The addon: mitmproxy's hooks, and the requests of the server."""

    def __init__(self) -> None:
        # Nothing else may write there.
        self._output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
        self._configuration: Configuration | None = None
        self._recordings: dict[Path, SharedRecording] = {}
        self._sandboxes: dict[str, Sandbox] = {}
        self._clients: dict[str, Client] = {}
        self._names: dict[str, tuple[str, int]] = {}  # by server connection, while it is being opened
        self._token = secrets.token_hex(16)
        self._garbage_bytes = 0

    # The server's requests

    def running(self) -> None:
        """mitmproxy listens."""
        gc.freeze()  # so that `_collect_garbage` is short
        # Every executor's thread of the loop may wait for a resolver.
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(RESOLVERS))
        self._serving = asyncio.create_task(self._serve())

    async def _serve(self) -> None:
        try:
            reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
            loop = asyncio.get_running_loop()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
            self._configuration = Configuration(**json.loads(await reader.readline()))
            self._output.write(json.dumps(asdict(self._ready())) + "\n")
            self._output.flush()
            await reader.read()
        finally:
            for recording in self._recordings.values():
                recording.close()
            ctx.master.shutdown()

    def _ready(self) -> Ready:
        servers = ctx.master.addons.get("proxyserver").servers
        names = {"": "proxy", "http:/": "http", "https:": "https"}
        listeners = {names[server.mode.data[:6]]: server.listen_addrs[0][:2] for server in servers}
        authority = Path(ctx.options.confdir).expanduser() / "mitmproxy-ca-cert.pem"
        return Ready(listeners, authority.read_text("ascii"), self._token)

    async def client_connected(self, client: connection.Client) -> None:
        """Answer the request with which a connection begins. Only a sandbox's goes on after that."""
        client.error = "the connection is no sandbox's"
        streams = _streams(client, client)
        try:
            async with asyncio.timeout(FIRST_LINE_SECONDS):
                token, _, line = (await streams.reader.readline()).partition(b" ")
        except (OSError, ValueError):  # it has not come, or is too long
            return
        if not hmac.compare_digest(token, self._token.encode()):
            return
        requests = {
            "open": self._open,
            "connect": partial(self._connect, client),
            "counts": self._counts,
            "close": self._close,
        }
        request = json.loads(line)
        try:
            answer = await requests[request.pop("do")](**request)
        except (RecordingError, KeyError, ValueError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        streams.writer.write(json.dumps(answer).encode() + b"\n")

    async def _open(self, **arguments: Any) -> dict[str, Any]:
        assert self._configuration is not None
        spec, configuration = SessionSpec(**arguments), self._configuration
        path = Path(spec.recording)
        recording = self._recordings.setdefault(
            path, SharedRecording(path, configuration.max_recording_bytes)
        )
        session = Session(spec.episode, spec.mode, spec.part, recording, configuration.max_response_bytes)
        self._sandboxes[spec.session] = Sandbox(session, configuration.request_seconds)
        try:
            await recording.run(lambda opened: opened.id)
        except RecordingError:
            self._release(spec.session)
            raise
        return {}

    def _release(self, name: str) -> None:
        """End a session, and close its recording if no other uses it."""
        recording = self._sandboxes.pop(name).session.recording
        if all(sandbox.session.recording is not recording for sandbox in self._sandboxes.values()):
            recording.close()
            del self._recordings[recording.path]

    async def _connect(self, client: connection.Client, session: str) -> dict[str, Any]:
        """Let a connection be the session's. Raises ValueError if it has too many."""
        sandbox = self._sandboxes[session]
        await sandbox.turn()
        if len(sandbox.clients) >= MAX_CONNECTIONS:
            raise ValueError(f"the sandbox has {MAX_CONNECTIONS} connections already")
        client.error = None
        streams = _streams(client, client)
        ours = Client(sandbox, streams.writer.transport.get_write_buffer_size)
        ours.transports.add(streams.writer.transport)
        streams.reader = LimitedReader(ours, streams.reader)
        sandbox.clients.add(ours)
        self._clients[client.id] = ours
        return {}

    def _sessions(self, episode: str) -> dict[str, Session]:
        found = {name: sandbox.session for name, sandbox in self._sandboxes.items()}
        return {name: session for name, session in found.items() if session.episode == episode}

    async def _counts(self, episode: str) -> dict[str, Any]:
        sessions = self._sessions(episode).values()
        await asyncio.gather(*(session.settled() for session in sessions))
        counts = sum((session.counts for session in sessions), Counts())
        problem = next((session.problem for session in sessions if session.problem), "")
        return asdict(EpisodeCounts(counts, problem))

    async def _close(self, episode: str) -> dict[str, Any]:
        answer = await self._counts(episode)
        sessions, counts = self._sessions(episode), Counts(**answer["counts"])
        # A regrading has only the evaluator's requests, which say nothing about another rollout.
        if counts != Counts() and any(session.part == "agent" for session in sessions.values()):
            digest, now = requests_digest(sessions.values()), datetime.now(UTC).isoformat()
            first = next(iter(sessions.values()))
            rollout = Rollout(episode, first.mode, digest, counts, now)
            await first.recording.run(Recording.add_rollout, rollout)
        for name, session in sessions.items():
            for key, count in session.missed.items():
                await session.recording.run(Recording.add_unanswered, session.part, key, count)
            self._release(name)
        return answer

    # mitmproxy's hooks

    def client_disconnected(self, client: connection.Client) -> None:
        if (ours := self._clients.pop(client.id, None)) is not None:
            ours.sandbox.clients.discard(ours)
            ours.close()
            self._collect_garbage(ours.received_bytes)

    def requestheaders(self, flow: http.HTTPFlow) -> None:
        client, request = self._clients.get(flow.client_conn.id), flow.request
        if client is None:
            flow.kill()
            return
        # Without the characters that a client may leave out: a space in each header, and CR in each line.
        spare = 2 * len(request.headers.fields) + 2
        client.head_complete(len(http1.assemble_request_head(request)) - spare)
        if (http1.expected_http_body_size(request) or 0) > MAX_BODY_BYTES:
            client.sandbox.session.refuse(f"a request had a body over {MAX_BODY_BYTES >> 20} MiB")
            flow.kill()
            return
        flow.metadata[REFUSED] = "the request cannot be read"
        try:
            _set_target(flow)
            del flow.metadata[REFUSED]
        except RefusedTargetError as error:
            flow.metadata[REFUSED] = str(error)
        for name in CONDITIONS:
            request.headers.pop(name, None)
        # What is recorded is decoded, which has no bounds for other encodings.
        accepted = request.headers.get("Accept-Encoding", "").lower()
        request.headers["Accept-Encoding"] = "gzip" if "gzip" in accepted else "identity"

    async def request(self, flow: http.HTTPFlow) -> None:
        client, request = self._clients.get(flow.client_conn.id), flow.request
        if client is None:
            flow.kill()
            return
        client.request_complete(len(request.raw_content or b""))
        session = client.sandbox.session
        if REFUSED in flow.metadata:
            session.refuse()
            flow.response = _http_response(refused_response(flow.metadata[REFUSED]), request.method)
            return
        # Without a response, an error here would send the request to the site.
        flow.response = http.Response.make(502, "The request cannot be answered\n")
        try:
            answer = await session.answer(_web_request(request), client.sandbox.room)
        except RecordingError as error:
            session.problem = str(error)
            flow.response = http.Response.make(502, f"The recording cannot be read: {error}\n")
            return
        if isinstance(answer, PendingExchange):
            flow.metadata[PENDING], flow.response = answer, None
        else:
            client.answer_bytes = len(answer.body)
            flow.response = _http_response(answer, request.method)

    def responseheaders(self, flow: http.HTTPFlow) -> None:
        client, response = self._clients.get(flow.client_conn.id), flow.response
        assert response is not None
        if client is None:
            return
        if client.is_worn:
            response.headers["Connection"] = "close"
        if PENDING in flow.metadata:
            client.collect(b"")
            # A stream may never end.
            if not response.headers.get("Content-Type", "").startswith("text/event-stream"):
                client.body = bytearray()
            response.stream = client.collect

    async def response(self, flow: http.HTTPFlow) -> None:
        client, response = self._clients.get(flow.client_conn.id), flow.response
        assert response is not None
        if client is None:
            return
        if (pending := flow.metadata.pop(PENDING, None)) is not None:
            found = None
            if client.body is not None:
                headers = _headers(response.headers)
                found = WebResponse(response.status_code, response.reason, headers, bytes(client.body))
            await client.sandbox.session.store(pending, found)
        client.response_complete()
        self._collect_garbage(len(flow.request.raw_content or b"") + len(response.raw_content or b""))

    def _collect_garbage(self, size: int) -> None:
        """Free the bodies of earlier flows, from time to time. `size`: of the bodies of one more."""
        # Flows and connections belong to reference cycles, and Python's collector counts objects, not bytes.
        self._garbage_bytes += size
        if self._garbage_bytes > GARBAGE_BYTES:
            self._garbage_bytes = 0
            gc.collect()

    async def error(self, flow: http.HTTPFlow) -> None:
        client = self._clients.get(flow.client_conn.id)
        if client is None:
            return
        client.response_complete()
        if (pending := flow.metadata.pop(PENDING, None)) is not None:
            message = flow.error.msg if flow.error is not None else ""
            # It may also be an error of the sandbox's connection, which says nothing about the site.
            failure = client.failure if client.failure and client.failure in message else ""
            await client.sandbox.session.fail(pending, failure)

    def server_connect_error(self, data: server_hooks.ServerConnectionHookData) -> None:
        self._note_failure(data.client, data.server)

    def tls_failed_server(self, data: tls.TlsData) -> None:
        self._note_failure(data.context.client, data.conn)

    def _note_failure(self, client: connection.Client, server: connection.Connection) -> None:
        self._names.pop(server.id, None)
        if server.error and server.error != CANCELLED and client.id in self._clients:
            self._clients[client.id].failure = server.error

    async def server_connect(self, data: server_hooks.ServerConnectionHookData) -> None:
        client, configuration = self._clients.get(data.client.id), self._configuration
        if client is None or configuration is None or client.sandbox.session.mode == "replay":
            # Requests are answered before; this is for whatever is not HTTP.
            data.server.error = "there is no live web"
            return
        host, port = data.server.address[:2]
        try:
            check_port(port)
            found = named_address(configuration.addresses, host, port)
            if found is None:
                async with client.sandbox.resolving:
                    found = await _public_address(host, port), port
        except RefusedTargetError as error:
            data.server.error = str(error)
            return
        self._names[data.server.id] = host, port
        data.server.address = found

    def server_connected(self, data: server_hooks.ServerConnectionHookData) -> None:
        # mitmproxy looks by its name for a connection that it can use again. It would open one for each
        # request, and not the sixth. (It does not allow to set the address of an open connection.)
        vars(data.server)["address"] = self._names.pop(data.server.id)
        client = self._clients.get(data.client.id)
        if client is not None:
            streams = _streams(data.client, data.server)
            client.transports.add(streams.writer.transport)
            streams.reader = LimitedReader(client, streams.reader, is_site=True)


async def _public_address(host: str, port: int) -> str:
    """Raises RefusedTargetError."""
    loop = asyncio.get_running_loop()
    try:
        found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), RESOLVE_SECONDS)
    except (OSError, TimeoutError, UnicodeError) as error:
        raise RefusedTargetError(f"{host} cannot be resolved: {error}") from None
    return public_address(host, [str(entry[4][0]) for entry in found])


def _streams(client: connection.Client, which: connection.Connection) -> Any:
    """mitmproxy's reader and writer of a connection: of the client's, or of one to a site for it."""
    return ctx.master.addons.get("proxyserver").connections[client.id].transports[which]


def _set_target(flow: http.HTTPFlow) -> None:
    """Make the request's address name the site that it is sent to, in the form of `host_name`.

    Raises RefusedTargetError if the request names another site anywhere: a site, or a server in front of many
    sites, may answer for that.
    """
    request, sni = flow.request, flow.client_conn.sni
    if flow.client_conn.proxy_mode.type_name == "reverse":
        # The host of the mode is a placeholder.
        host = host_name(sni or request.headers.get("Host", ""))
    else:
        host = host_name(f"[{request.host}]" if ":" in request.host else request.host)
    for name in (*request.headers.get_all("Host"), request.authority, sni):
        if name and host_name(name) != host:
            raise RefusedTargetError(f"the request is sent to {host} and names {name[:MAX_SHOWN]}")
    if request.http_version not in ("HTTP/1.0", "HTTP/1.1") or not request.path.startswith("/"):
        raise RefusedTargetError("the request has no path, or is not of HTTP/1")
    if not re.fullmatch(rb"[A-Z][A-Z-]*", request.data.method):
        raise RefusedTargetError("the method is not a word in upper case")
    if len(request.data.path) > MAX_PATH_BYTES:
        raise RefusedTargetError(f"the address is longer than {MAX_PATH_BYTES} bytes")
    request.data.host, request.data.authority = host, b""
    # Without it, a server with several sites answers with any of them.
    request.headers.setdefault("Host", host)


def _web_request(request: http.Request) -> WebRequest:
    host = f"[{request.host}]" if ":" in request.host else request.host
    # What is sent to the site as it is, but would be no part of a parsed address, or no text.
    path = re.sub(
        rb"[#\x00-\x20\x7f-\xff]", lambda match: b"%%%02X" % match[0][0], request.data.path
    ).decode()
    url = f"{request.scheme}://{host}:{request.port}{path}"
    return WebRequest(request.method, url, _headers(request.headers), request.raw_content or b"")


def _headers(headers: http.Headers) -> Headers:
    return Headers(tuple(headers.items(multi=True)))


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
