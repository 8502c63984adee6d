"""Refusals as HTTP responses.

A request that is refused before it reaches MCP gets status 200 and a JSON-RPC error under its id. Other
statuses are for what is not a JSON-RPC request (GET, DELETE, a notification, a body that cannot be read) and
for what the protocol requires: 401 without a token, 413, 404 for an unknown session.
"""

# Version 1.x of the Python SDK drops the body of an HTTP error: its users get `Session terminated` or a bare
# status instead of the reason. An error without an id and with status 200 makes clients wait for ever.

from __future__ import annotations

from collections.abc import Mapping

from mcp_types import INVALID_REQUEST, ErrorData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from decathlon_mcp.errors import AtCapacityError, BadRequestError, DecathlonError
from decathlon_mcp.http.bodies import BodyDisconnectError, BodyError, BodyReader
from decathlon_mcp.protocol.requests import RequestId, request_id_of
from decathlon_mcp.protocol.results import error_code, error_data

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


class UnauthorizedError(Exception):
    """The request has no token, or an unknown one."""


def error_response(
    status: int,
    error: ErrorData,
    *,
    request_id: RequestId | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """A response whose body is a JSON-RPC error; the status is 200 if it has the id of a request."""
    content = {"jsonrpc": "2.0", "id": request_id, "error": error.model_dump(exclude_none=True)}
    return JSONResponse(content, status_code=status if request_id is None else 200, headers=headers)


def session_not_found() -> Response:
    """The answer to the id of a session that belongs to another path or token."""
    # The SDK's answer for an unknown session, so that a client cannot tell the two apart. On 404 a client
    # initializes a new session, as the protocol requires; 403 would make it give up.
    return error_response(404, ErrorData(code=INVALID_REQUEST, message="Session not found"))


class Refusals:
    """Starlette's handler of DecathlonError, which is raised before a request's body is read."""

    def __init__(self, bodies: BodyReader) -> None:
        self._bodies = bodies

    async def __call__(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, DecathlonError)
        try:
            request_id = await self._request_id(request)
        except BodyError as body_error:
            return await handle_body_error(request, body_error)
        return _refusal(error, STATUS.get(error.code, 500), request_id)

    async def handle_unknown_address(self, request: Request, error: Exception) -> Response:
        """Starlette's handler of its 404 and 405: a POST comes from an MCP client with another address."""
        assert isinstance(error, HTTPException)
        if request.method != "POST":
            return PlainTextResponse(error.detail, error.status_code, headers=error.headers)
        known = "the lobby is /mcp, a task /tasks/TASK/mcp, an episode /episodes/EPISODE/mcp"
        return await self(
            request, BadRequestError(f"there is no MCP server at {request.url.path[:200]}; {known}")
        )

    async def _request_id(self, request: Request) -> RequestId | None:
        """The id of the JSON-RPC request in a POST; None if there is none. Raises BodyError."""
        if request.method != "POST":
            return None
        try:
            async with self._bodies.read(request) as body:
                return request_id_of(body)
        except BodyDisconnectError:
            return None  # nobody reads the response


async def handle_unauthorized(request: Request, error: Exception) -> Response:
    """Starlette's handler of UnauthorizedError."""
    problem = "this server has no such token" if "authorization" in request.headers else "a token is needed"
    message = f"{problem}: send it as `Authorization: Bearer TOKEN`"
    details = ErrorData(code=UNAUTHORIZED, message=message)
    return error_response(401, details, headers={"WWW-Authenticate": "Bearer"})


async def handle_body_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of BodyError."""
    assert isinstance(error, BodyError)
    if error.retry_after_seconds is not None:
        full = AtCapacityError(error.message, retryAfterSeconds=float(error.retry_after_seconds))
        return _refusal(full, error.status, error.request_id)
    details = ErrorData(code=INVALID_REQUEST, message=error.message)
    return error_response(error.status, details, request_id=error.request_id)


def refuse(error: DecathlonError) -> Response:
    """The response to a request that is not JSON-RPC, or whose body has been read."""
    return _refusal(error, STATUS.get(error.code, 500), None)


def _refusal(error: DecathlonError, status: int, request_id: RequestId | None) -> Response:
    # Clients show the message and `data` to their users; programs that speak plain HTTP read the header.
    retry_after = error.data.get("retryAfterSeconds") if error.code == "at_capacity" else None
    return error_response(
        status,
        ErrorData(code=error_code(error), message=error.message, data=error_data(error)),
        request_id=request_id,
        headers=None if retry_after is None else {"Retry-After": f"{retry_after:.0f}"},
    )
