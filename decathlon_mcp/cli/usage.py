"""One-line messages about faults of a command line, a variable, the settings file or this machine."""

from __future__ import annotations

import errno
import math
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, cast

from cyclopts import (
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    MissingArgumentError,
    UnknownCommandError,
    UnknownOptionError,
    UnusedCliTokensError,
)
from cyclopts import ValidationError as RefusedValue
from decathlon_client.client_values import is_http_url
from pydantic import ValidationError

from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.validation import did_you_mean, find_problems, one_line

TOKEN_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")
MAX_PORT = 65_535
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}

_ENVIRONMENT = frozenset(
    {
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE),
        *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
    }
)
"""Errors that name their file and whose cause is never this program."""
_HINTS = {
    "tasks": "`decathlon-mcp tasks --search TEXT` lists some, `decathlon-mcp play TASK` plays one",
    "demo": "`decathlon-mcp demo --task TASK` plays another task, `--all` every bundled one",
    "serve": "`--suite PATH` says which tasks are served",
}
"""What was probably wanted from a command that takes only options."""
_CREDENTIALS = re.compile(r"(?<=://)\S*@")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def report(message: str) -> None:
    """Print a message on stderr, as one line without control characters, which others may have written."""
    sys.stderr.write(f"decathlon-mcp: {without_credentials(one_line(message))}\n")


def without_credentials(text: str) -> str:
    """The text with `***` for the user and the password in each address."""
    return _CREDENTIALS.sub("***@", text)


class WithValueError(ValueError):
    """What is wrong with a value, in a message that names the part of the value that is wrong."""


def _expecting(expected: str, is_right: Callable[[Any], object]) -> Callable[[object, Any], None]:
    """A validator of an option's value, which may be missing."""

    def check(kind: object, value: Any) -> None:
        if value is not None and not is_right(value):
            raise ValueError(expected)

    return check


check_token_name = _expecting("1 to 64 letters, digits and _.@- were expected", TOKEN_NAME.fullmatch)
check_positive = _expecting("a number of at least 1 was expected", lambda number: number >= 1)
check_seconds = _expecting("a number of seconds above 0 was expected", lambda number: 0 < number < math.inf)
check_port = _expecting(f"a port from 0 to {MAX_PORT} was expected", lambda port: 0 <= port <= MAX_PORT)
check_not_empty = _expecting("a value was expected", str)
check_names = _expecting("a value was expected", all)
check_url = _expecting("an address was expected, such as https://tasks.example.org", is_http_url)


def check_label_texts(kind: object, texts: tuple[str, ...]) -> None:
    try:
        parse_labels(texts)
    except BadRequestError as error:
        raise WithValueError(error.message) from None


def check_run(kind: object, run: str | None) -> None:
    if run is not None:
        check_label_texts(kind, (f"run={run}",))


def usage_message(error: CycloptsError) -> str:
    """One line about what is wrong with the command line, a variable or the settings file."""
    match error:
        case UnusedCliTokensError():
            command = " ".join(error.command_chain or ())
            hint = _HINTS.get(command, f"`decathlon-mcp {command} --help` shows what it takes")
            return f"unexpected argument: {' '.join(error.unused_tokens or ())}; {hint}"
        case UnknownCommandError():
            # Cyclopts 4 names the first eight commands only.
            beginning, _, _ = str(error).partition(" Available commands: ")
            names = sorted(name for name in error.app or () if not name.startswith("-"))
            return f"{beginning} The commands are: {', '.join(names)}"
        case UnknownOptionError(token=token, argument_collection=arguments) if token.source == "cli":
            # Every option that works is compared, and cyclopts also names options that this command's help
            # hides.
            given = token.keyword or token.value
            known = [name for argument in arguments if argument.show for name in argument.names]
            return f"unknown option: {given}{did_you_mean(given.partition('=')[0], known)}"
        case MissingArgumentError(argument=argument, keyword=None) if (
            argument is not None
            and not argument.tokens
            and not any(token.startswith("-") for token in error.unused_tokens or ())
        ):
            command = " ".join(error.command_chain or ())
            return f"{argument.name} is missing; `decathlon-mcp {command} --help` says what it is"
        case CoercionError(token=token, target_type=kind) if token is not None and kind in _KINDS:
            source = _source(token.keyword or "", token.source)
            return f"{source}: {_KINDS[kind]} was expected, not {token.value!r}"
        case RefusedValue(argument=argument) if argument is not None and argument.tokens:
            token = argument.tokens[0]
            source = _source(token.keyword or argument.name.lstrip("-").upper(), token.source)
            value = "" if isinstance(error.__cause__, WithValueError) else f", not {token.value!r}"
            return f"{source}: {error.exception_message}{value}"
        case CycloptsError(__cause__=ValidationError(), argument=argument) if argument is not None:
            return "; ".join(_invalid_settings(cast("ValidationError", error.__cause__), argument.children))
        case _:
            return str(error)


def _invalid_settings(error: ValidationError, arguments: ArgumentCollection) -> Iterator[str]:
    values = {str(fault["loc"][0]): fault["input"] for fault in error.errors() if fault["loc"]}
    for problem in find_problems(error, values):
        name = str(problem.path[0]) if problem.path else ""
        flag = f"--{name.replace('_', '-')}"
        tokens = [token for argument in arguments if flag in argument.names for token in argument.tokens]
        keyword = tokens[0].keyword if tokens and tokens[0].keyword else flag
        source = _source(keyword, tokens[0].source, name) if tokens else flag
        yield f"{source}: {problem.message}"


def _source(keyword: str, source: str, name: str = "") -> str:
    """Where a value came from: the flag, the variable, or the file with the name in it."""
    return keyword if source in ("", "cli", "env") else f"{source}: {name or keyword.strip('[]')}"


def failure_message(error: BaseException) -> str | None:
    """The message for an error that is not this program's fault; None for any other.

    Errors that task groups wrapped count if there is no other error next to them.
    """
    if isinstance(error, BaseExceptionGroup):
        inner = cast("BaseExceptionGroup[BaseException]", error).exceptions
        return failure_message(inner[0]) if len(inner) == 1 else None
    if isinstance(error, DecathlonError):
        return error.message
    if not isinstance(error, OSError):
        return None
    if error.errno in _FULL:
        where = f"{error.filename}: " if error.filename else ""
        return (
            f"{where}{error.strerror}: free some space, or choose a folder on another disk "
            "(--state, and TMPDIR for temporary files)"
        )
    return f"{error.filename}: {error.strerror}" if error.filename and error.errno in _ENVIRONMENT else None
