"""Events of a server, as they happen, for the plug-ins that listen, such as metrics and spans.

Everything is reported on the event loop. A listener returns at once, and raises nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias

import msgspec

CallOutcome = Literal["ok", "error", "lost", "cancelled"]
"""`error`: the reply is an error or has `isError`. `lost`: no reply came, as the sandbox or the server in it
ended. `cancelled`: the client gave up."""
RecoveryResult = Literal["continued", "graded", "started_over", "ended"]
"""What became of an episode of a dead server."""
Opening = Literal["warm", "copied", "cold"]
"""Whether a sandbox had been opened ahead, or is a copy of a saved state."""


class Event(msgspec.Struct, frozen=True, gc=False):
    """Something that has happened."""


class Started(Event, frozen=True):
    """A client has started an episode; not for an episode of a dead server."""


class Admitted(Event, frozen=True):
    """The episode has a place and its opening begins."""


class Ready(Event, frozen=True):
    """The episode's tools can be called."""


class Called(Event, frozen=True):
    """A call has ended that was sent at that time of `perf_counter`."""

    outcome: CallOutcome
    sent_at: float


class Claimed(Event, frozen=True):
    """The attempt is closed and will be graded."""


class Judged(Event, frozen=True):
    """There is a verdict, with this status, and with a reward and its success if it has them."""

    status: str
    reward: float | None = None
    success: bool | None = None


class Ended(Event, frozen=True):
    """The episode is over."""

    ending: str


class Recovered(Event, frozen=True):
    """It is known what became of an episode of a dead server."""

    result: RecoveryResult


class SandboxTaken(Event, frozen=True):
    """An agent or a grader gets a sandbox."""

    opening: Opening


class Swept(Event, frozen=True):
    """A sweep over one server's sandboxes is over and has removed as many."""

    sandboxes: int


class ResponseOver(Event, frozen=True):
    """An HTTP response is over. Bytes are counted in bodies; in requests' bodies only at MCP addresses."""

    status: int
    request_bytes: int = 0
    response_bytes: int = 0
    call_seconds: tuple[float, float] | None = None
    """Of a call that has a reply: the time until the episode had the call, and from the reply on."""


Emit: TypeAlias = Callable[[Event], None]


class Listener(Protocol):
    """Listens to one server."""

    def on_event(self, event: Event) -> None:
        """An event of the server."""
        ...

    def episode(self, suite: str, task: str, public_id: str) -> Emit:
        """Takes the events of an episode that begins, or of a dead server's episode."""
        ...


class Spans(Listener, Protocol):
    """Makes the spans of one server."""

    async def serve(self, serve: Callable[[Any], Awaitable[Any]], request: Any) -> Any:
        """What `serve` returns for a `protocol.requests.Request`, whose `_meta` may get more members."""
        ...

    async def end(self) -> bool:
        """Send what has not been sent yet, within a limit of time; whether that was enough."""
        ...


class Events:
    """Passes the events of one server on."""

    def __init__(self, listeners: Sequence[Listener] = ()) -> None:
        self.listeners = listeners
        self.open_connections = 0
        """Number of open HTTP connections."""

    def emit(self, event: Event) -> None:
        """Pass on an event of the server."""
        for listener in self.listeners:
            listener.on_event(event)

    def episode(self, suite: str, task: str, public_id: str) -> Emit:
        """What passes on the events of an episode."""
        listeners = [listener.episode(suite, task, public_id) for listener in self.listeners]

        def emit(event: Event) -> None:
            for listen in listeners:
                listen(event)

        return emit
