"""What can go wrong, by whose fault it is. All of it is a `ClientError`.

A task's tool that failed is none of these: it is a `Reply` with `is_error`, for the agent to read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from decathlon_client.values import JsonObject, as_object


class ClientError(Exception):
    """Base of every error of this package.

    `code` is the server's word for it, `data` what a program can act on. `retryable`: the same request may
    work later.
    """

    retryable: bool = False

    def __init__(self, message: str, *, code: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.data: JsonObject = dict(data or {})
        if "retryable" in self.data:
            self.retryable = bool(self.data["retryable"])


class ConnectionLostError(ClientError):
    """The server cannot be reached, or no longer. Whether a call that was under way ran is not known."""

    retryable = True


class ProtocolError(ClientError):
    """What came back is not what MCP, or this server, answers; is it a decathlon-mcp server?"""


class RequestError(ClientError):
    """A request was refused for a reason of its own: wrong arguments, or the task's server said so.

    `number` is the JSON-RPC error code.
    """

    def __init__(self, message: str, *, number: int = 0, **more: Any) -> None:
        super().__init__(message, **more)
        self.number = number


class AccessDeniedError(ClientError):
    """The token is missing, unknown, or does not allow this."""


class UnknownTaskError(ClientError):
    """There is no such task."""

    @property
    def near(self) -> tuple[str, ...]:
        """Ids that look like it."""
        return _words(self, "near")


class UnknownToolError(ClientError):
    """The episode has no such tool."""

    @property
    def near(self) -> tuple[str, ...]:
        """Names that look like it."""
        return _words(self, "near")


class NotRunnableError(ClientError):
    """The task needs something that the server lacks."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What, a sentence each."""
        return _words(self, "missing")


class AtCapacityError(ClientError):
    """The server has no room for another episode now."""

    retryable = True

    @property
    def retry_after_seconds(self) -> float:
        """When to ask again."""
        return float(self.data.get("retryAfterSeconds", 10.0))


class SetUpError(ClientError):
    """The episode could not be made ready; the message says what failed, with its last words."""


class SandboxLostError(ClientError):
    """The sandbox ended under the episode."""


class UnknownEpisodeError(ClientError):
    """There is no such episode, or it is somebody else's."""


class EpisodeEndedError(ClientError):
    """The episode is over."""

    @property
    def reason(self) -> str:
        return str(self.data.get("reason", ""))


class CallTimeoutError(ClientError, TimeoutError):
    """There was no answer within the `timeout` given. The call was cancelled; the episode goes on."""


class NoVerdictError(ClientError):
    """The attempt could not be graded: an infrastructure failure, never a reward of zero.

    `status` says what failed (`evaluator_error`, `timeout`, `sandbox_lost`, ...), `verdict` is all there is.
    """

    def __init__(self, message: str, *, status: str, verdict: JsonObject) -> None:
        super().__init__(message, code="no_verdict", data=verdict)
        self.status = status
        self.verdict = verdict


_KINDS: dict[str, type[ClientError]] = {
    "access_denied": AccessDeniedError,
    "at_capacity": AtCapacityError,
    "bad_request": RequestError,
    "episode_ended": EpisodeEndedError,
    "not_runnable": NotRunnableError,
    "sandbox_lost": SandboxLostError,
    "set_up_failed": SetUpError,
    "unknown_episode": UnknownEpisodeError,
    "unknown_task": UnknownTaskError,
    "unknown_tool": UnknownToolError,
}


def error_from_code(code: str, message: str, data: Mapping[str, Any]) -> ClientError:
    """The error for one of the server's codes; a code that is not known makes a plain ClientError."""
    return _KINDS.get(code, ClientError)(message, code=code, data=data)


def error_from_json_rpc(number: int, message: str, data: object) -> ClientError:
    """The error for a JSON-RPC error; ours say `code` in their data."""
    told = as_object(data) or {}
    code = told.get("code")
    if isinstance(code, str):
        error = error_from_code(code, message, told)
        if isinstance(error, RequestError):
            error.number = number
        return error
    return RequestError(message, number=number, data=told)


def _words(error: ClientError, key: str) -> tuple[str, ...]:
    value: object = error.data.get(key)
    return tuple(str(word) for word in cast("list[object]", value)) if isinstance(value, list) else ()
