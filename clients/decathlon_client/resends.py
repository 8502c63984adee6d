"""Requests: limits on their content, and sending them again under one operation id.

JSON has to be what every parser between a model and a task's server accepts. The SDK cannot send anything
else, and some of it ends the session with all its calls: half of a surrogate pair, an integer of thousands of
digits. So each request is checked before the SDK sees it.

A request is sent again after its connection was lost, and while the server does not reach the sandbox. The
server keeps the first reply of an operation and gives it to everyone who sends the operation again, so that a
call runs once however often its connection breaks.
"""

from __future__ import annotations

import json
import logging
import random
import secrets
import time
from collections.abc import Collection
from typing import Any, cast

import anyio

from decathlon_client.client_errors import ClientError, RequestError
from decathlon_client.client_values import JsonObject, as_object

MAX_DEPTH = 128
"""Depth of nested arrays and objects in one message; the server accepts no more."""
PARAMS_DEPTH = 2
MAX_NODES = 100_000
"""Values and keys in one message; the server accepts no more."""
MAX_DIGITS = 4_300
"""Digits of an integer; Python reads no more."""
SHOWN_CHARACTERS = 20

_TOO_DEEP = f"the request is nested deeper than {MAX_DEPTH} levels"
_TOO_MANY_DIGITS = f"an integer has more than {MAX_DIGITS:,} digits"
OPERATION_KEY = "decathlon/operation"
"""Key of the operation id in the `_meta` of a request."""
RESEND_SECONDS = 330.0
"""How long a lost server is waited for: 30 s longer than its sandboxes wait for the next one."""
FIRST_PAUSE_SECONDS = 0.25
"""Pause after the first loss of an outage; doubled after each further one."""
MAX_ABSENT_SECONDS = 86_400.0
"""Longest absence of a sandbox that a server's error may name, a day: the client waits that much longer."""
MAX_PAUSE_SECONDS = 5.0
"""Longest mean pause: a server that comes back is found within seconds."""
STEADY_SECONDS = 10.0
"""A request that was connected for this long ends an outage: its loss is the first of the next one."""
WARNING_SECONDS = 60.0
"""Shortest time between two warnings of one client: an outage loses the requests of all its episodes."""
log = logging.getLogger("decathlon.client")


def parse_arguments(text: str) -> object:
    """Decode the JSON text that a model wrote; empty text is an empty object. Raises RequestError."""
    if not text.strip():
        return {}
    try:
        return cast("object", json.loads(text))
    except json.JSONDecodeError as error:
        raise _refusal(f"the arguments are not JSON: {error}") from None
    except RecursionError:
        raise _refusal(_TOO_DEEP) from None
    except ValueError:
        raise _refusal(_TOO_MANY_DIGITS) from None


def check_call(params: JsonObject) -> None:
    """Check the parameters of a `tools/call`. Raises RequestError, with a text for the model."""
    name, arguments = params.get("name"), params.get("arguments")
    if not isinstance(name, str):
        raise _refusal(f"the name of a tool must be a text, not {type(name).__name__}")
    if not isinstance(arguments, dict):
        raise _refusal("the arguments must be a JSON object")
    check_params(params)


def check_params(params: JsonObject) -> None:
    """Check the parameters of a request. Raises RequestError; cyclic values are too deep."""
    nodes, containers = 0, list[Any]([params])
    # Level by level and not recursive: a value may be deeper than Python's stack.
    for _ in range(PARAMS_DEPTH, MAX_DEPTH + 1):
        values: list[Any] = []
        for container in containers:
            if isinstance(container, dict):
                nodes += len(cast("dict[Any, Any]", container))
                values += _values(cast("dict[Any, Any]", container))
            else:
                values += container
            if nodes + len(values) > MAX_NODES:
                raise _refusal(f"the request has more than {MAX_NODES:,} values and keys")
        nodes += len(values)
        containers = [value for value in values if _is_container(value)]
        if not containers:
            break
    else:
        raise _refusal(_TOO_DEEP)
    try:
        json.dumps(params, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        shown = ascii(error.object[max(0, error.start - SHOWN_CHARACTERS) : error.start + 1])
        raise _refusal(f"{shown} ends in half of a surrogate pair: write the whole character") from None
    except TypeError as error:
        raise _refusal(f"{error}") from None
    except ValueError as error:
        is_long = "digits" in str(error)
        raise _refusal(_TOO_MANY_DIGITS if is_long else "numbers must be finite in JSON") from None


def _is_container(value: object) -> bool:
    return isinstance(value, (dict, list, tuple))


def _values(members: dict[Any, Any]) -> Collection[Any]:
    """The values of an object. Raises RequestError for a key that JSON does not have, but `json` converts."""
    for key in members:
        if not isinstance(key, str):
            raise _refusal(f"a key of an object must be a text, not {type(key).__name__}")
    return members.values()


def _refusal(message: str) -> RequestError:
    return RequestError(message, number=-32602, code="bad_request")


class ResendPolicy:
    """How long requests are sent again, and since when in vain. Shared by the sessions of one client."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: longest outage that a request is sent again after; 0 for never. Raises ValueError."""
        if not seconds >= 0:
            raise ValueError(f"resend_seconds must be at least 0, not {seconds}")
        self.seconds = seconds
        self._lost_at: float | None = None
        self._warned_at: float | None = None

    @property
    def away_seconds(self) -> float | None:
        """How long the server has not been reached; None while it answers."""
        # Not the event loop's clock: the synchronous client reads this in a thread without a loop.
        return None if self._lost_at is None else time.monotonic() - self._lost_at

    def note_loss(self) -> None:
        """Note that a request found no server."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()

    def note_answer(self) -> None:
        """Note that the server answered."""
        self._lost_at = None

    def warn(self, loss: ClientError) -> None:
        now = anyio.current_time()
        if self._warned_at is None or now - self._warned_at >= WARNING_SECONDS:
            self._warned_at = now
            log.warning("%s; requests are sent again for up to %g s", loss.message, self.seconds)


class Resends:
    """When one request is sent again."""

    _deadline: float | None = None
    _pause_seconds = FIRST_PAUSE_SECONDS

    def __init__(self, policy: ResendPolicy) -> None:
        self._policy = policy

    async def pause(self, loss: ClientError, closing: anyio.Event, connected_at: float | None) -> None:
        """Wait before the request is sent again. Raises the loss once it is not to be, or at `closing`.

        `loss`: a ConnectionLostError, or an error with `absent_seconds`. `connected_at`: when the request was
        sent on a connection that worked, by the event loop's clock; None if there was none.
        """
        now = anyio.current_time()
        if connected_at is not None and now - connected_at >= STEADY_SECONDS:
            self._deadline, self._pause_seconds = None, FIRST_PAUSE_SECONDS
        if (seconds := absent_seconds(loss)) is not None:
            self._deadline = now + self._policy.seconds - seconds
        else:
            self._policy.note_loss()
            if self._deadline is None:
                self._deadline = now + self._policy.seconds
        if now >= self._deadline or closing.is_set():
            raise loss
        self._policy.warn(loss)
        # Spread out, so that the episodes of a batch do not all come back at the same moment.
        pause_seconds = min(self._pause_seconds * random.uniform(0.5, 1.5), self._deadline - now)
        self._pause_seconds = min(2 * self._pause_seconds, MAX_PAUSE_SECONDS)
        with anyio.move_on_after(pause_seconds):
            await closing.wait()
            raise loss


def absent_seconds(error: ClientError) -> float | None:
    """How long the server has not reached the sandbox of a call that goes on; None for any other error."""
    seconds: object = error.data.get("absentSeconds")
    if error.code != "provider_unavailable" or not isinstance(seconds, (int, float)):
        return None
    return float(seconds) if 0 <= seconds <= MAX_ABSENT_SECONDS else None


def with_operation(params: JsonObject) -> JsonObject:
    """The parameters of a `tools/call` with an operation id of its own. Unguessable: it gives the reply."""
    meta = as_object(params.get("_meta")) or {}
    return {**params, "_meta": {OPERATION_KEY: secrets.token_urlsafe(18), **meta}}
