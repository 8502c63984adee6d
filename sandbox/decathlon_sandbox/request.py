"""A request of the server's while it lives: answered exactly once."""

from __future__ import annotations

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.strict_json import encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class Request:
    """`on_cancel` is called when the server gives the request up; it has to lead to an answer."""

    __slots__ = ("_answer", "answered", "id", "on_cancel")

    def __init__(self, number: int, answer: Callable[[Request, bytes], object]) -> None:
        self.id = number
        self._answer = answer
        self.answered = False
        self.on_cancel: Callable[[], object] | None = None

    def answer(self, result: dict[str, Any]) -> None:
        try:
            data = encode(result)
        except (ValueError, RecursionError) as error:
            self.fail(Fault(wire.INTERNAL, f"the result cannot be written: {error}"))
        else:
            self.relay(data)

    def relay(self, line: bytes) -> None:
        """Answer with a result that is JSON already."""
        self._finish(b'{"jsonrpc":"2.0","id":%d,"result":%b}\n' % (self.id, line))

    def fail(self, fault: Fault) -> None:
        self._finish(failure(self.id, fault))

    def cancel(self) -> None:
        if self.on_cancel is not None:
            self.on_cancel()

    def _finish(self, data: bytes) -> None:
        if self.answered:
            return
        if len(data) > wire.MAX_LINE_BYTES:
            data = failure(self.id, Fault(wire.TOO_LONG, f"the answer has {len(data)} bytes"))
        self.answered = True
        self.on_cancel = None
        self._answer(self, data)


def failure(number: int | None, fault: Fault) -> bytes:
    return encode({"jsonrpc": "2.0", "id": number, "error": fault.to_json()}) + b"\n"
