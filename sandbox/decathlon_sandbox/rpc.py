"""Requests from the server: their parameters, their errors, and exactly one response for each."""

from __future__ import annotations

import threading

from decathlon_sandbox import wire
from decathlon_sandbox.strict_json import as_list, as_object, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.event_loop import EventLoop

MAX_NUMBER = 1e9
"""Largest number of seconds; no clock or timer overflows with it."""


class RequestError(Exception):
    """Failure of a request, with a code of the wire's table. `data` holds JSON values."""

    def __init__(self, code: int, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data or {}

    def to_json(self) -> dict[str, Any]:
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.data:
            error["data"] = self.data
        return error


def describe_error(error: Exception) -> str:
    """Return an exception's message; for an OSError with the file concerned."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def error_response(request_id: int | None, error: RequestError) -> bytes:
    return encode({"jsonrpc": "2.0", "id": request_id, "error": error.to_json()})


class Request:
    """A request from its arrival to its response.

    `params` is None if they are no object. `on_cancel` is called when the server cancels the request; it must
    lead to a response. `max_bytes` is the length of the longest response; room for `reserved_bytes` is kept.
    """

    __slots__ = (
        "_answered",
        "_on_response",
        "id",
        "max_bytes",
        "method",
        "on_cancel",
        "params",
        "reserved_bytes",
    )

    def __init__(
        self,
        request_id: int,
        method: str,
        params: dict[str, Any] | None,
        max_bytes: int,
        on_response: Callable[[Request, bytes], object],
    ) -> None:
        self.id = request_id
        self.method = method
        self.params = params
        self.max_bytes = self.reserved_bytes = max_bytes
        self._on_response = on_response
        self._answered = False
        self.on_cancel: Callable[[], object] | None = None

    def reply(self, result: dict[str, Any]) -> None:
        try:
            data = encode(result)
        except (ValueError, RecursionError) as error:
            self.fail(RequestError(wire.INTERNAL, f"the result cannot be encoded as JSON: {error}"))
        else:
            self.reply_encoded(data)

    def reply_encoded(self, result: bytes, overlong: bytes | None = None) -> None:
        """Reply with a result that is JSON already. `overlong`: JSON about a result that was shortened."""
        if overlong is None:
            self._respond(b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (self.id, result))
        else:
            parts = (self.id, overlong, result)
            self._respond(b'{"jsonrpc":"2.0","id":%d,"overlong":%b,"result":%b}' % parts)

    def fail(self, error: RequestError) -> None:
        self._respond(error_response(self.id, error))

    def cancel(self) -> None:
        if self.on_cancel is not None:
            self.on_cancel()

    def _respond(self, data: bytes) -> None:
        if self._answered:
            return
        if len(data) > self.max_bytes:
            message = f"the response has {len(data)} bytes, more than the limit of {self.max_bytes} bytes"
            data = error_response(self.id, RequestError(wire.TOO_LONG, message))
        self._answered = True
        self.on_cancel = None
        self._on_response(self, data)


def answer_in_thread(loop: EventLoop, request: Request, work: Callable[[], Callable[[], object]]) -> None:
    """Run `work`, which may block, in a thread, then in the loop what it returns or the answer to its error.

    RequestError, and OSError, ValueError and RecursionError as FILES, are expected errors.
    """

    def run() -> None:
        try:
            answer = work()
        except RequestError as error:
            failure = error
        except (OSError, ValueError, RecursionError) as error:
            failure = RequestError(wire.FILES, describe_error(error))
        except Exception as error:  # noqa: BLE001  (the request must be answered in any case)
            failure = RequestError(wire.INTERNAL, f"{type(error).__name__}: {error}")
        else:
            loop.call_soon_threadsafe(answer)
            return
        loop.call_soon_threadsafe(lambda: request.fail(failure))

    threading.Thread(target=run, daemon=True).start()


class Params:
    """Typed access to an object of parameters. Every method raises RequestError (BAD_PARAMS)."""

    __slots__ = ("_values",)

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __contains__(self, name: str) -> bool:
        """Whether the parameter is present, even if it is null."""
        return name in self._values

    def names(self) -> list[str]:
        return sorted(self._values)

    def has(self, name: str) -> bool:
        """Whether the parameter is present and not null."""
        return self._values.get(name) is not None

    def string(self, name: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or "\0" in value:
            raise _invalid(name, "a string")
        return value

    def path(self, name: str) -> str:
        value = self.string(name)
        if not value.startswith("/"):
            raise _invalid(name, "an absolute path")
        return value

    def number(self, name: str) -> float:
        value = self._values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_NUMBER:
            raise _invalid(name, f"a number from 0 to {MAX_NUMBER:.0f}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def integer(self, name: str, *, minimum: int = 0, maximum: int) -> int:
        value = self._values.get(name)
        if type(value) is not int or not minimum <= value <= maximum:
            raise _invalid(name, f"an integer from {minimum} to {maximum}")
        return value

    def boolean(self, name: str) -> bool:
        value = self._values.get(name, False)
        if not isinstance(value, bool):
            raise _invalid(name, "true or false")
        return value

    def one_of(self, name: str, *choices: str) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or value not in choices:
            raise _invalid(name, f"one of {', '.join(choices)}")
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        value = as_object(self._values.get(name, {}))
        if value is None:
            raise _invalid(name, "an object")
        return value

    def string_mapping(self, name: str) -> dict[str, str]:
        """An object of strings that can be used as environment variables or headers."""
        value = self.mapping(name)
        for key, item in value.items():
            if not isinstance(item, str) or "\0" in key + item or not key or "=" in key:
                raise _invalid(name, "an object of strings")
        return value

    def strings(self, name: str) -> list[str]:
        value = as_list(self._values.get(name, []))
        if value is None or not all(isinstance(item, str) and "\0" not in item for item in value):
            raise _invalid(name, "a list of strings")
        return value

    def integers(self, name: str, *, minimum: int, maximum: int) -> list[int]:
        value = as_list(self._values.get(name, []))
        if value is None or not all(type(item) is int and minimum <= item <= maximum for item in value):
            raise _invalid(name, f"a list of integers from {minimum} to {maximum}")
        return value

    def objects(self, name: str) -> list[Params]:
        value = as_list(self._values.get(name, []))
        if value is None or not all(isinstance(item, dict) for item in value):
            raise _invalid(name, "a list of objects")
        return [Params(item) for item in value]


def _invalid(name: str, expected: str) -> RequestError:
    return RequestError(wire.BAD_PARAMS, f"`{name}` must be {expected}")
