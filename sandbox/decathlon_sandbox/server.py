"""One of the task's servers, however it is reached."""

from __future__ import annotations

import enum
import time

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.session import Session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


class State(enum.Enum):
    STARTING = "starting"
    UP = "up"
    ENDED = "ended"


class Server:
    """A session and the way its messages go. Ends by itself (`on_lost`, once) or is stopped."""

    def __init__(self, name: str, request_seconds: float | None) -> None:
        self.name = name
        self.request_seconds = request_seconds
        self.state = State.STARTING
        self.began_at = time.monotonic()
        self.fault = Fault(wire.SERVER, f"server {name} is not up")
        """Why it cannot be called, while it cannot."""
        self.on_lost: Callable[[Server], object] = lambda server: None
        self.on_notice: Callable[[Server, str, dict[str, Any]], object] = lambda server, method, params: None
        self.session = Session(name, self.post, lambda method, params: self.on_notice(self, method, params))

    def open(self) -> None:
        """Start it, or the way to it. Raises Fault."""
        raise NotImplementedError

    def post(self, data: bytes, number: int | None) -> None:
        """Send one message; `number` is the id where it is a request. Raises Fault."""
        raise NotImplementedError

    def stop(self, then: Callable[[], object]) -> None:
        """End it at once, with all that stems from it, then call."""
        raise NotImplementedError

    def agreed(self, protocol: str) -> None:
        """The revision that both speak from now on."""

    def dropped(self, number: int) -> None:
        """Nobody waits for this request any more."""

    def hang_up(self) -> None:
        """The polite beginning of an end: no more messages will come from us."""

    def wait(self, until: float) -> None:
        """Until what `hang_up` began is done; not past `until` (monotonic). Blocks."""

    def terminate(self) -> None:
        """The less polite sequel."""

    @property
    def alive(self) -> bool:
        """Is there a process of ours behind it?"""
        return False

    def last_words(self) -> dict[str, Any]:
        """`stderr` (last lines) and `exit_code` (negative: a signal's), where there are such."""
        return {"exit_code": None, "stderr": ""}

    def lost(self, why: str) -> None:
        """It has ended by itself: whoever waits for it is told."""
        if self.state is State.ENDED:
            return
        self.state = State.ENDED
        self.fault = Fault(wire.SERVER, f"server {self.name} {why}", server=self.name, **self.last_words())
        self.session.fail_all(self.fault)
        self.on_lost(self)

    def ended(self, fault: Fault) -> None:
        """It is being stopped: whoever waits for it gets `fault`."""
        self.state = State.ENDED
        self.fault = fault
        self.session.fail_all(fault)
