"""All errors of the server, each with a stable code.

    DecathlonError
      caused by the request:   BadRequestError, UnknownTaskError, UnknownEpisodeError, UnknownToolError,
                               AccessDeniedError, UnansweredError
      by the episode's state:  EpisodeClaimedError, EpisodeEndedError
      by the server's load:    AtCapacityError (DiskFullError)
      by its configuration:    SuiteError, SettingsError (SchemaError), ImageError,
                               NotRunnableError, ProviderUnavailableError
      by task or sandbox:      SetUpError, SandboxLostError, SnapshotError, DriverError, CallTimeoutError,
                               LimitExceededError

A tool of a task that fails is not among them: its result has `isError` and is passed on unchanged.
`protocol/results.py` is the one place that maps these errors to MCP.
"""

from __future__ import annotations

from typing import Any, ClassVar

STDERR_CHARACTERS = 2_000
"""How much of a dead server's stderr an error quotes."""


class DecathlonError(Exception):
    """Base class of all errors of the server.

    `message` is for people, `data` holds JSON values for programs. `retryable`: the same request may succeed
    later.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.data: dict[str, Any] = data


def failure_text(error: DecathlonError) -> str:
    """What an agent reads: the message, with the end of the stderr of a task's server that died."""
    about: Any = error.data.get("about")
    stderr = str(about.get("stderr") or "").strip() if isinstance(about, dict) else ""  # pyright: ignore[reportUnknownArgumentType, reportUnknownMemberType]
    return f"{error.message}; stderr: {stderr[-STDERR_CHARACTERS:]}" if stderr else error.message


class BadRequestError(DecathlonError):
    """The arguments of a request are invalid; the message says what was expected."""

    code = "bad_request"


class UnknownTaskError(DecathlonError):
    """No suite has a task with this id; `near` lists similar ids."""

    code = "unknown_task"


class UnknownEpisodeError(DecathlonError):
    """There is no such episode, or the caller may not use it; a client cannot tell which."""

    code = "unknown_episode"


class UnknownToolError(DecathlonError):
    """The episode has no tool of this name; `near` lists similar names."""

    code = "unknown_tool"


class AccessDeniedError(DecathlonError):
    """The caller's token does not allow this request."""

    code = "access_denied"


class UnansweredError(DecathlonError):
    """The server no longer has the answer to an earlier request: the client has to send the request again."""

    code = "unanswered"


class AtCapacityError(DecathlonError):
    """The server has no capacity for another episode now; retry after `retryAfterSeconds`."""

    code = "at_capacity"
    retryable = True


class DiskFullError(AtCapacityError):
    """The server's disk cannot be written for now; the call or the step of grading can be repeated later."""


class NotRunnableError(DecathlonError):
    """The task has requirements that this server does not meet; `missing` lists them, one sentence each."""

    code = "not_runnable"


class SuiteError(DecathlonError):
    """A suite or one of its files is invalid; the message names the file, line and field."""

    code = "bad_suite"


class SettingsError(DecathlonError):
    """A setting is invalid; the message names the setting and what would be valid."""

    code = "bad_settings"


class SchemaError(SettingsError):
    """The store of the state folder is of another version; a retry cannot help."""


class ProviderUnavailableError(DecathlonError):
    """The provider cannot open a sandbox, or reach one, now, e.g. because no Docker engine answers."""

    code = "provider_unavailable"
    retryable = True


class ImageError(DecathlonError):
    """The sandbox's image is missing or cannot run the driver; the message names the image."""

    code = "bad_image"


class SetUpError(DecathlonError):
    """The set-up of an episode failed, e.g. its preprocess script or the start of an MCP server."""

    code = "set_up_failed"


class SandboxLostError(DecathlonError):
    """The sandbox ended during the episode; `cause` is the reason (e.g. out of memory), if it is known."""

    code = "sandbox_lost"


class SnapshotError(DecathlonError):
    """A sandbox could not be saved, or a saved state could not be opened; the sandbox itself goes on."""

    code = "bad_snapshot"


class DriverError(DecathlonError):
    """The driver could not carry out a request; `reason` is one of the driver protocol's codes."""

    code = "driver_error"


class CallTimeoutError(DecathlonError):
    """A tool did not answer before its deadline. The episode continues."""

    code = "call_timeout"


class EpisodeEndedError(DecathlonError):
    """The episode has ended; `reason` says why."""

    code = "episode_ended"


class EpisodeClaimedError(DecathlonError):
    """The attempt was claimed: no tool can be called any more, and `evaluate` returns the verdict."""

    code = "episode_claimed"


class LimitExceededError(DecathlonError):
    """Data from a sandbox is over a limit: a message, an archive or a result."""

    code = "limit_exceeded"
