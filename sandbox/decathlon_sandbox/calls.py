"""`call`: one request relayed to a server, and its reply back as it came."""

from __future__ import annotations

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.session import Waiter

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.loop import Loop, Timer
    from decathlon_sandbox.request import Request
    from decathlon_sandbox.server import Server


class Call(Waiter):
    """From the request to its answer: a reply, a time-out, a cancellation or the server's end."""

    def __init__(
        self,
        loop: Loop,
        request: Request,
        server: Server,
        notify: Callable[[str, dict[str, Any]], object],
        on_end: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._request = request
        self._server = server
        self._notify = notify
        self._on_end = on_end
        self._deadline: Timer | None = None

    def begin(self, method: str, params: dict[str, Any], timeout_seconds: float | None) -> None:
        """`timeout_seconds` None: as long as the server's own `request_seconds`, if it has any."""
        if timeout_seconds is None:
            timeout_seconds = self._server.request_seconds
        try:
            self._number = self._server.session.request(method, params, self)
        except Fault as fault:
            self.failed(fault)
            return
        if timeout_seconds is not None:
            said = f"server {self._server.name} has not answered within {timeout_seconds:g} s"
            self._deadline = self._loop.later(
                timeout_seconds, lambda: self._give_up(Fault(wire.TIMEOUT, said))
            )
        self._request.on_cancel = lambda: self._give_up(Fault(wire.CANCELLED, "the call was given up"))

    def replied(self, message: dict[str, Any], line: bytes) -> None:
        self._end()
        self._request.relay(line)

    def failed(self, fault: Fault) -> None:
        self._end()
        self._request.fail(fault)

    def progressed(self, params: dict[str, Any]) -> None:
        self._notify(wire.PROGRESS, {"id": self._request.id, "params": params})

    def _give_up(self, fault: Fault) -> None:
        self._server.session.give_up(self._number, fault.message)
        self._server.dropped(self._number)
        self.failed(fault)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._on_end()
