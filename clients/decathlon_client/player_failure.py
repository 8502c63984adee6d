"""What a player raised: its type, its message and where, in one line, and its traceback as a text."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path
from typing import cast

from decathlon_client.episode import MISTAKES
from decathlon_client.errors import ClientError

MAX_CHARACTERS = 400
"""Longest description. The server keeps 500 of the reason for which an episode is closed."""
MAX_TRACEBACK_CHARACTERS = 16_000
_LIBRARIES = tuple(
    Path(folder)
    for folder in {
        str(Path(__file__).parent),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
"""Folders whose code is nobody's player."""


class PlayerFailedError(Exception):
    """A player raised an error of its own, which is the `__cause__`.

    As a text: `KeyError: 'tool_calls' (agent.py:31)`. `traceback` is the end of that error's traceback.
    """

    def __init__(self, description: str, traceback: str = "") -> None:
        super().__init__(description, traceback)
        self.traceback = traceback

    def __str__(self) -> str:
        return str(self.args[0])


def player_failure(error: Exception) -> PlayerFailedError:
    """The failure of a player that raised this error."""
    if isinstance(error, PlayerFailedError):
        return error
    text = "".join(traceback.format_exception(error))
    failure = PlayerFailedError(describe(error), text[-MAX_TRACEBACK_CHARACTERS:])
    failure.__cause__ = error
    return failure


def is_players_fault(error: BaseException | None) -> bool:
    """Whether the player caused the error; for a group, whether it caused any error in it."""
    if isinstance(error, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", error)
        return any(is_players_fault(inner) for inner in group.exceptions)
    return not isinstance(error, ClientError) or isinstance(error, MISTAKES)


def describe(error: BaseException) -> str:
    """Type, message, file and line of an error, on one line of at most MAX_CHARACTERS.

    The line is the innermost one outside of libraries. A group of one error is that error. An error without a
    message, such as an assertion's, is described by the line of code.
    """
    error = _only(error)
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not any(map(Path(frame.filename).is_relative_to, _LIBRARIES))]
    frame = next(iter(reversed(own or frames)), None)
    try:
        message = str(error)
    except Exception:  # noqa: BLE001  (of a class of the player's)
        message = ""
    message = " ".join(message.split()) or (frame and frame.line) or ""
    where = "" if frame is None else f" ({Path(frame.filename).name}:{frame.lineno})"
    what = f"{type(error).__name__}{': ' if message else ''}{message}"
    described = f"{what[: MAX_CHARACTERS - len(where)]}{where}"[:MAX_CHARACTERS]
    # JSON in UTF-8 has no lone surrogates.
    return described.encode("utf-8", "replace").decode()


def _only(error: BaseException) -> BaseException:
    """The error itself; of a group with one error, that one."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    group = cast("BaseExceptionGroup[BaseException]", error)
    return _only(group.exceptions[0]) if len(group.exceptions) == 1 else group
