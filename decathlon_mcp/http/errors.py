"""Refusals as HTTP responses.

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
from starlette.responses import Response

from decathlon_mcp.errors import AtCapacityError, BadRequestError, DecathlonError
from decathlon_mcp.http.authentication import UnauthorizedError
from decathlon_mcp.http.bodies import BodyDisconnectError, BodyError, BodyReader
from decathlon_mcp.http.lines import TextLine
from decathlon_mcp.protocol.headers import Headers
from decathlon_mcp.protocol.messages import INVALID_REQUEST, McpError, RequestId, readable_id
from decathlon_mcp.protocol.requests import error_message
from decathlon_mcp.protocol.results import wire_error

STATUS = {
    "unknown_task": 404,
    "unknown_episode": 404,
    "bad_request": 400,
    "not_runnable": 409,
    "at_capacity": 503,
    "access_denied": 403,
}
"""HTTP status by `DecathlonError.code`, for what is not a JSON-RPC request; all others are 500."""

UNAUTHORIZED = -32001
REFUSALS = (UnauthorizedError, BodyError, McpError, DecathlonError)
"""With what a request is refused."""


def mcp_refusal(status: int, error: McpError, *, allow: str | None = None) -> Response:
    """A response with a JSON-RPC error. `allow`: the methods of the address."""
    return _response(status, error, error.request_id, {} if allow is None else {"Allow": allow})


def refusal(error: DecathlonError, request_id: RequestId | None = None) -> Response:
    """The response to a request that is refused: under its id, or with a status."""
    # Clients show the message and `data` to their users; programs that speak plain HTTP read the header.
    retry_after = error.data.get("retryAfterSeconds") if error.code == "at_capacity" else None
    headers = {} if retry_after is None else {"Retry-After": f"{retry_after:.0f}"}
    status = STATUS.get(error.code, 500) if request_id is None else 200
    return _response(status, wire_error(error), request_id, headers)


def body_refusal(error: BodyError) -> Response:
    """The response to a body that is not read."""
    if error.retry_after_seconds is not None:
        full = AtCapacityError(error.message, retryAfterSeconds=float(error.retry_after_seconds))
        return refusal(full, error.request_id)
    status = error.status if error.request_id is None else 200
    return _response(status, McpError(INVALID_REQUEST, error.message), error.request_id, {})


def response_to(error: Exception) -> Response:
    """The response to a request that is refused with one of REFUSALS."""
    match error:
        case UnauthorizedError():
            problem = "this server has no such token" if error.has_token else "a token is needed"
            text = f"{problem}: send it as `Authorization: Bearer TOKEN`"
            return _response(401, McpError(UNAUTHORIZED, text), None, {"WWW-Authenticate": "Bearer"})
        case BodyError():
            return body_refusal(error)
        case McpError():
            return mcp_refusal(error.status or 400, error)
        case DecathlonError():
            return refusal(error)
        case _:
            raise error


async def handle_refusal(request: Request, error: Exception) -> Response:
    """Starlette's handler of REFUSALS."""
    return response_to(error)


def _response(
    status: int, error: McpError, request_id: RequestId | None, headers: Mapping[str, str]
) -> Response:
    content = error_message(error, request_id)
    return Response(content + b"\n", status, headers=headers, media_type="application/json")


class UnknownAddress:
    """Starlette's handler of its 404 and 405: a POST comes from an MCP client with another address."""

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies

    async def __call__(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if request.method != "POST":
            return TextLine(error.detail, error.status_code, headers=error.headers)
        known = "the lobby is /mcp, a task /tasks/TASK/mcp, an episode /episodes/EPISODE/mcp"
        unknown = BadRequestError(f"there is no MCP server at {request.url.path[:200]}; {known}")
        try:
            async with self._bodies.read(Headers(request.scope["headers"]), request.receive) as body:
                return refusal(unknown, readable_id(body))
        except BodyDisconnectError:
            return refusal(unknown)  # nobody reads the response
        except BodyError as body_error:
            return body_refusal(body_error)
