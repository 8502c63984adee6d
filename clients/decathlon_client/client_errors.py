"""Errors by whose fault they are. Every one is a `ClientError`.

A tool of the task that fails is not an error: it is a `Reply` with `is_error`, for the agent to read.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from decathlon_client.client_values import JsonObject, Reply, as_object

ERROR_KEY = "decathlon/error"
"""Key in the `_meta` of a result that the server made from an error of its own."""


RETRY_SECONDS, MIN_RETRY_SECONDS, MAX_RETRY_SECONDS = 10.0, 0.1, 86_400.0
"""When a full server is asked again that does not say when, and the shortest and the longest pause that it
may ask for."""


class ClientError(Exception):
    """Base of all errors of this package.

    `code` is the server's error code, `data` its details for programs. `retryable`: the same request may
    succeed later. `episode` is the public id of the episode in which it happened; None if there was none.
    `page` is the address where people see it, if the server named one in its reply to the opening.
    """

    retryable: bool = False

    def __init__(self, message: str, *, code: str = "", data: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.data: JsonObject = dict(data or {})
        episode: object = self.data.get("episode")
        self.episode: str | None = episode if isinstance(episode, str) else None
        self.page: str | None = None
        if "retryable" in self.data:
            self.retryable = bool(self.data["retryable"])

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is pickled and copied by a call of its class with `args` alone: without the keywords.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(kind: type[ClientError], args: tuple[Any, ...], attributes: dict[str, Any]) -> ClientError:
    """A copy of an error."""
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ConnectionLostError(ClientError):
    """The server could not be reached for `resend_seconds`, in which the request was sent again and again.

    It is not known whether a call that was under way ran.
    """

    retryable = True


class ProtocolError(ClientError):
    """The answer is not MCP, or not what a decathlon-mcp server answers."""


@contextmanager
def reading(what: str) -> Generator[None]:
    """Let the body, which reads something that the server sent, fail with a ProtocolError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the server sent {what} that cannot be read: {error!r:.200}") from None


class InvalidReplyError(ProtocolError):
    """The result of a request is not MCP."""


class RequestError(ClientError):
    """The request was refused: its arguments are wrong, or the task's server refused it.

    `number` is the JSON-RPC error code.
    """

    def __init__(
        self, message: str, *, number: int = 0, code: str = "", data: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(message, code=code, data=data)
        self.number = number


class AccessDeniedError(ClientError):
    """The token is missing, unknown, or does not allow this."""


class UnknownTaskError(ClientError):
    """There is no such task."""

    @property
    def near(self) -> tuple[str, ...]:
        """Similar task ids."""
        return _strings(self, "near")


class UnknownToolError(ClientError):
    """The episode has no such tool."""

    @property
    def near(self) -> tuple[str, ...]:
        """Similar tool names."""
        return _strings(self, "near")


class NotRunnableError(ClientError):
    """The task requires something that the server lacks."""

    @property
    def missing(self) -> tuple[str, ...]:
        """What the server lacks, one sentence each."""
        return _strings(self, "missing")


class AtCapacityError(ClientError):
    """The server has no room for another episode now."""

    retryable = True

    @property
    def retry_after_seconds(self) -> float:
        """When to try again. What is no time for a pause is not taken from a server."""
        seconds: object = self.data.get("retryAfterSeconds")
        if isinstance(seconds, (int, float)) and MIN_RETRY_SECONDS <= seconds <= MAX_RETRY_SECONDS:
            return float(seconds)
        return RETRY_SECONDS


class SetUpError(ClientError):
    """The set-up of the episode failed; the message says where, with the last output."""


class SandboxLostError(ClientError):
    """The sandbox ended while the episode was running."""


class NodeLostError(SandboxLostError):
    """The node of a cluster on which the episode was running ended, or does not answer any more."""


class UnknownEpisodeError(ClientError):
    """There is no such episode, or it belongs to another token."""


class EpisodeEndedError(ClientError):
    """The episode has ended."""

    @property
    def reason(self) -> str:
        return str(self.data.get("reason", ""))


class CallTimeoutError(ClientError, TimeoutError):
    """There was no answer within `timeout`. The call was cancelled; the episode continues."""


class NoVerdictError(ClientError):
    """The attempt could not be graded: the infrastructure or the task failed. Never a reward of zero.

    `status` says what failed (`sandbox_lost`, `evaluator_error`, ...); `verdict` holds all details. An
    attempt that its agent may have made impossible to grade has a verdict instead, with status `forfeited`.
    """

    def __init__(self, message: str, *, status: str, verdict: JsonObject) -> None:
        super().__init__(message, code="no_verdict", data=verdict)
        self.status = status
        self.verdict = verdict


_BY_CODE: dict[str, type[ClientError]] = {
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


_ARGUMENT_FAULTS = frozenset({"bad_request", "unknown_episode", "unknown_task", "unknown_tool"})
"""Codes that the lobby's tools answer with a result, for models to read. For a program they are errors."""


def error_from_code(code: str, message: str, data: Mapping[str, Any]) -> ClientError:
    """The error for one of the server's codes; a plain ClientError for an unknown code."""
    return _BY_CODE.get(code, ClientError)(message, code=code, data=data)


def error_from_reply(reply: Reply) -> ClientError | None:
    """The error for a tool's reply that says that its arguments are wrong; None for any other reply."""
    error = as_object(reply.meta.get(ERROR_KEY)) or {}
    code = str(error.get("code"))
    return error_from_code(code, reply.text, error) if code in _ARGUMENT_FAULTS else None


def error_from_json_rpc(number: int, message: str, data: object) -> ClientError:
    """The error for a JSON-RPC error. Errors of a decathlon-mcp server have a `code` in their data."""
    details = as_object(data) or {}
    code = details.get("code")
    if isinstance(code, str):
        error = error_from_code(code, message, details)
        if isinstance(error, RequestError):
            error.number = number
        return error
    return RequestError(message, number=number, data=details)


def _strings(error: ClientError, key: str) -> tuple[str, ...]:
    value: object = error.data.get(key)
    return tuple(str(item) for item in cast("list[object]", value)) if isinstance(value, list) else ()
