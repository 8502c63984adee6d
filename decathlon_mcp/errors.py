"""What can go wrong, and whose fault it is.

A task's own tool that fails is not an error here: it is a result with `isError`, relayed as it came.
Everything below is ours or the operator's, has a stable `code`, and says whether the same request may
help if it is sent again. One place, the edge, maps these to MCP.
"""

from __future__ import annotations

from typing import Any, ClassVar


class DecathlonError(Exception):
    """Base of every error of this project.

    `data` holds JSON values that a program can act on; the message is for people.
    """

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **data: Any) -> None:
        super().__init__(message)
        self.message = message
        self.data: dict[str, Any] = data


class BadRequestError(DecathlonError):
    """The caller's arguments do not fit; the message says what was expected."""

    code = "bad_request"


class UnknownTaskError(DecathlonError):
    """No suite has a task of that id; `near` lists ids that look like it."""

    code = "unknown_task"


class UnknownEpisodeError(DecathlonError):
    """No such episode, or not one that this caller may know of (the two are never told apart)."""

    code = "unknown_episode"


class UnknownToolError(DecathlonError):
    """The episode has no tool of that name; `near` lists names that look like it."""

    code = "unknown_tool"


class AccessDeniedError(DecathlonError):
    """The caller's token does not allow this."""

    code = "access_denied"


class AtCapacityError(DecathlonError):
    """No room for another episode now; `retryAfterSeconds` says when to ask again."""

    code = "at_capacity"
    retryable = True


class NotRunnableError(DecathlonError):
    """The task needs something that this server lacks; `missing` lists what, one sentence each."""

    code = "not_runnable"


class SuiteError(DecathlonError):
    """A suite, or a file of it, is not what Toolathlon's layout says; names file, line and field."""

    code = "bad_suite"


class SettingsError(DecathlonError):
    """A setting has a value that cannot work; says which, from where, and what would."""

    code = "bad_settings"


class ProviderUnavailableError(DecathlonError):
    """Sandboxes cannot be opened at all now, e.g. no Docker engine answers."""

    code = "provider_unavailable"
    retryable = True


class ImageError(DecathlonError):
    """The sandbox's image is missing or cannot run the driver; names the image."""

    code = "bad_image"


class SetUpError(DecathlonError):
    """An episode could not be made ready: its preprocess failed, a server of its task did not come up, ..."""

    code = "set_up_failed"


class SandboxLostError(DecathlonError):
    """The sandbox ended under the episode; `cause` says why where the provider knows (out of memory, ...)."""

    code = "sandbox_lost"


class DriverError(DecathlonError):
    """The driver could not do what was asked; `reason` is one of the wire's closed table."""

    code = "driver_error"


class CallTimeoutError(DecathlonError):
    """A tool did not answer within its deadline. The episode goes on."""

    code = "call_timeout"


class EpisodeEndedError(DecathlonError):
    """The episode is over; `reason` says how it ended."""

    code = "episode_ended"


class EpisodeClaimedError(DecathlonError):
    """The attempt is closed to tools: it was claimed, and `evaluate` gives the verdict."""

    code = "episode_claimed"


class LimitExceededError(DecathlonError):
    """Something out of a sandbox is larger than allowed: a line, an archive, a result."""

    code = "limit_exceeded"
