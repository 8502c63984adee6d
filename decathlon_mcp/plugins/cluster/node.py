"""One node of a cluster, which passes requests from the cluster's scheduler to a server on this machine.

The scheduler chooses a node for each request; the node passes `POST /episodes` to its server. All other
requests about an episode go from the client to the server directly, at the address in the first line.
"""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Awaitable, Callable

import anyio
import httpx2
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from decathlon_mcp.http.authentication import AllowedHosts
from decathlon_mcp.http.bodies import BodyReader
from decathlon_mcp.http.refusals import refusal
from decathlon_mcp.labels import LABEL_HEADER
from decathlon_mcp.plugins.cluster.held_episodes import LINES_HEADERS
from decathlon_mcp.protocol.headers import Headers
from decathlon_mcp.protocol.messages import INVALID_PARAMS, McpError, RequestId, readable_id
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import as_object

log = logging.getLogger("decathlon.node")

CLUSTER_CODE = "cluster"
"""`data.code` of the error for MCP requests to the cluster's own address."""
KEY_HEADER = "idempotency-key"
CONNECT_SECONDS = 10.0
RETURN_SECONDS = 60.0
"""How long a server that broke off is waited for: its supervisor starts it again."""
RETRY_SECONDS = 0.5
INDEX_TEXT = """A cluster of decathlon-mcp servers.

/episodes         POST: an episode on one of the nodes; it ends with the response
/nodes            the nodes' servers, each with a lobby at /mcp
/metrics/targets  the same for Prometheus (http_sd_configs)
"""


class Node:
    """Answers the requests that reach this node. `url` is its server's, as clients reach it.

    `list_nodes` returns the URLs of all nodes' servers. `names`: by which clients may call the cluster,
    beside IP addresses and loopback.
    """

    def __init__(
        self, url: str, list_nodes: Callable[[], Awaitable[list[str]]], names: tuple[str, ...] = ()
    ) -> None:
        self._url = url
        # No origins: pages may use the nodes' servers, and nothing here has the headers of CORS.
        self._hosts = AllowedHosts((*AllowedHosts().names, *names), any_address=True)
        self._list_nodes = list_nodes
        self._bodies = BodyReader()
        self._http = httpx2.AsyncClient(
            timeout=httpx2.Timeout(None, connect=CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=None),
            trust_env=False,
        )

    async def answer(self, request: Request) -> Response:
        """The response to a request."""
        refused = self._hosts.refusal(request.method, Headers(request.scope["headers"]))
        if refused is not None:
            return PlainTextResponse(refused.message, refused.status)
        match request.method, request.url.path:
            case "POST", "/episodes" | "/mcp" as path:
                try:
                    async with self._bodies.read(Headers(request.scope["headers"]), request.receive) as body:
                        if path == "/mcp":
                            return self._refuse_session(readable_id(body))
                        content = body
                except McpError as error:
                    return refusal(error)
                return self._start(request, content)
            case "GET", "/nodes":
                return JSONResponse({"nodes": await self._list_nodes()})
            case "GET", "/metrics/targets":
                targets = [url.partition("://")[2] for url in await self._list_nodes()]
                return JSONResponse([{"targets": targets, "labels": {"job": "decathlon"}}])
            case "GET", "/":
                return PlainTextResponse(INDEX_TEXT)
            case _:
                return PlainTextResponse("there is nothing here; / lists what there is\n", 404)

    async def aclose(self) -> None:
        """Close the connections to the server, which ends the episodes that they hold."""
        await self._http.aclose()

    def _start(self, request: Request, body: bytes) -> Response:
        # Of the client's headers only these: the others are about its connection to the cluster.
        headers = {"content-type": "application/json", KEY_HEADER: secrets.token_urlsafe(18)}
        for name in ("authorization", KEY_HEADER):
            if name in request.headers:
                headers[name] = request.headers[name]
        if labels := request.headers.getlist(LABEL_HEADER):
            headers[LABEL_HEADER] = ",".join(labels)
        return _ForwardedEpisode(self._http, self._url, body, headers)

    def _refuse_session(self, request_id: RequestId | None) -> Response:
        message = (
            "this is a cluster, which has no sessions of its own: connect to a node, such as "
            f"{self._url}/mcp, or start an episode with POST /episodes"
        )
        data = {"code": CLUSTER_CODE, "node": self._url}
        return refusal(McpError(INVALID_PARAMS, message, data), request_id)


class _ForwardedEpisode(Response):
    """The response of the node's server to `POST /episodes`.

    If the server dies and comes back, its next response goes on in the same stream.
    """

    def __init__(self, http: httpx2.AsyncClient, url: str, body: bytes, headers: dict[str, str]) -> None:
        self._http = http
        self._url = url
        self._body = body
        self._headers = headers
        self._episode: object = None
        self._ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_cancel_when_gone, receive, tasks.cancel_scope)
            await self._forward(scope, receive, send)
            tasks.cancel_scope.cancel()

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        url = f"{self._url}/episodes"
        while True:
            try:
                async with self._http.stream(
                    "POST", url, content=self._body, headers=self._headers
                ) as response:
                    if self._episode is None and response.status_code != 200:
                        names = ("content-type", "retry-after", "www-authenticate")
                        headers = {name: response.headers[name] for name in names if name in response.headers}
                        error = Response(await response.aread(), response.status_code, headers)
                        await error(scope, receive, send)
                        return
                    if response.status_code == 200:
                        await self._pass_lines(response, send)
            except httpx2.HTTPError as error:
                why = str(error) or type(error).__name__
                log.warning("the server broke off", extra=fields(why=why))
                if self._episode is None:
                    await PlainTextResponse(f"the node's server does not answer: {why}\n", 503)(
                        scope, receive, send
                    )
                    return
            if self._ended or not await self._returns():
                break
        await send({"type": "http.response.body", "body": b""})

    async def _pass_lines(self, response: httpx2.Response, send: Send) -> None:
        """Pass the lines on. Sets `_ended` after the last one, or if the server has another episode."""
        is_first = True
        async for line in response.aiter_lines():
            values = as_object(json.loads(line)) or {}
            if is_first and self._episode is None:
                self._episode = values.get("episode")
                await send({"type": "http.response.start", "status": 200, "headers": LINES_HEADERS})
            elif is_first and values.get("episode") != self._episode:
                # The server has forgotten the first one. Nobody knows this one, and it ends here.
                self._ended = True
                return
            elif values.get("phase") == "ended":
                self._ended = True
            is_first = False
            await send({"type": "http.response.body", "body": line.encode() + b"\n", "more_body": True})

    async def _returns(self) -> bool:
        """Wait until the server answers again. False if it does not in time."""
        with anyio.move_on_after(RETURN_SECONDS):
            while True:
                await anyio.sleep(RETRY_SECONDS)
                try:
                    (await self._http.get(f"{self._url}/healthz")).raise_for_status()
                except httpx2.HTTPError:
                    continue
                return True
        return False


async def _cancel_when_gone(receive: Receive, scope: anyio.CancelScope) -> None:
    try:
        while (await receive())["type"] != "http.disconnect":
            pass
        scope.cancel()
    except Exception:  # noqa: BLE001  (Serve's `receive` raises if the client has gone)
        scope.cancel()
