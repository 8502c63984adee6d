"""Refusals, and lines of JSON, as HTTP responses.

A request that is refused before a service has it gets status 200 and a JSON-RPC error under its id. Other
statuses are for what is not a JSON-RPC request (GET, DELETE, a notification, a body that cannot be read) and
for what the protocol requires: 401 without a token, 413, 404 for an unknown session.
"""

# Version 1.x of the Python SDK drops the body of an HTTP error: its users get `Session terminated` or a bare
# status instead of the reason. An error without an id and with status 200 makes clients wait for ever.

from __future__ import annotations

from collections.abc import Mapping

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.http.bodies import BodyDisconnectError, BodyReader
from decathlon_mcp.protocol.headers import Headers
from decathlon_mcp.protocol.messages import McpError, RequestId, readable_id
from decathlon_mcp.protocol.results import SESSIONLESS_STATUS, STATUS, retry_after, wire_error
from decathlon_mcp.types import as_json


def json_line(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A response with JSON and a line feed, which keeps a shell's prompt off the line that curl prints."""
    return Response(as_json(value) + b"\n", status, headers, media_type="application/json")


def refusal(
    error: McpError | DecathlonError,
    request_id: RequestId | None = None,
    *,
    is_sessionless: bool = False,
    allow: str | None = None,
) -> Response:
    """The response to a request that is refused: a JSON-RPC error under its id, or with a status.

    `is_sessionless`: the request is of a revision without sessions. `allow`: the methods of the address.
    """
    if isinstance(error, DecathlonError):
        status = STATUS.get(error.code, 500) if request_id is None else 200
        error = wire_error(error)
    else:
        status, request_id = error.status, request_id if error.request_id is None else error.request_id
    if status is None and is_sessionless:
        status = SESSIONLESS_STATUS.get(error.code, 400)
    elif status is None:
        status = 400 if request_id is None else 200
    found = {
        "Retry-After": retry_after(error),
        "WWW-Authenticate": "Bearer" if status == 401 else None,
        "Allow": allow,
    }
    headers = {name: value for name, value in found.items() if value is not None}
    return json_line({"jsonrpc": "2.0", "id": request_id, "error": error.to_json()}, status, headers)


async def handle_refusal(request: Request, error: Exception) -> Response:
    """Starlette's handler of McpError and DecathlonError."""
    assert isinstance(error, McpError | DecathlonError)
    return refusal(error)


class UnknownAddress:
    """Starlette's handler of its 404 and 405: a POST comes from an MCP client with another address."""

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies

    async def __call__(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if request.method != "POST":
            return PlainTextResponse(f"{error.detail}\n", error.status_code, error.headers)
        known = "the lobby is /mcp, a task /tasks/TASK/mcp, an episode /episodes/EPISODE/mcp"
        unknown = BadRequestError(f"there is no MCP server at {request.url.path[:200]}; {known}")
        try:
            async with self._bodies.read(Headers(request.scope["headers"]), request.receive) as body:
                return refusal(unknown, readable_id(body))
        except (BodyDisconnectError, McpError):
            return refusal(unknown)  # nobody reads the response, or the body is too large to look for its id
