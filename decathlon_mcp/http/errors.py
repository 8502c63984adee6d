"""Errors as HTTP responses: a status and a JSON-RPC error as the body."""

from __future__ import annotations

from collections.abc import Mapping

from mcp_types import INVALID_REQUEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.http.bodies import BodyError
from decathlon_mcp.protocol.results import error_code, error_data

STATUS = {
    "unknown_task": 404,
    "unknown_episode": 404,
    "bad_request": 400,
    "not_runnable": 409,
    "at_capacity": 503,
    "access_denied": 403,
}
"""HTTP status by `DecathlonError.code`; all others are 500."""

UNAUTHORIZED = -32001


class UnauthorizedError(Exception):
    """The request has no token, or an unknown one."""


def error_response(
    status: int, code: int, message: str, *, data: object = None, headers: Mapping[str, str] | None = None
) -> Response:
    """A response whose body is a JSON-RPC error without a request id."""
    error: dict[str, object] = {"code": code, "message": message}
    if data is not None:
        error["data"] = data
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=status, headers=headers)


def session_not_found() -> Response:
    """The answer to the id of a session that belongs to another path or token."""
    # The SDK's answer for an unknown session, so that a client cannot tell the two apart. On 404 a client
    # initializes a new session, as the protocol requires; 403 would make it give up.
    return error_response(404, INVALID_REQUEST, "Session not found")


async def handle_decathlon_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of DecathlonError."""
    assert isinstance(error, DecathlonError)
    # Clients show the message and `data` to their users; programs that speak plain HTTP read the header.
    retry_after = error.data.get("retryAfterSeconds") if error.code == "at_capacity" else None
    headers = None if retry_after is None else {"Retry-After": f"{retry_after:.0f}"}
    status = STATUS.get(error.code, 500)
    return error_response(status, error_code(error), error.message, data=error_data(error), headers=headers)


async def handle_unauthorized(request: Request, error: Exception) -> Response:
    """Starlette's handler of UnauthorizedError."""
    message = "a token is needed: send it as `Authorization: Bearer TOKEN`"
    return error_response(401, UNAUTHORIZED, message, headers={"WWW-Authenticate": "Bearer"})


async def handle_body_error(request: Request, error: Exception) -> Response:
    """Starlette's handler of BodyError."""
    assert isinstance(error, BodyError)
    retry_after = error.retry_after_seconds
    headers = None if retry_after is None else {"Retry-After": str(retry_after)}
    return error_response(error.status, INVALID_REQUEST, error.message, headers=headers)
