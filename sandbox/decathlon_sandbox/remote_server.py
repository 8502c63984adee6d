"""What servers reached by URL have in common: messages go out in order, replies come in from threads."""

from __future__ import annotations

import http.client
import queue
import threading
import time

from decathlon_sandbox import params as read
from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault, reason
from decathlon_sandbox.server import Server
from decathlon_sandbox.site import Site
from decathlon_sandbox.strict_json import as_object, parse

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, TypeVar

    T = TypeVar("T")

    from decathlon_sandbox.loop import Loop
    from decathlon_sandbox.site import Exchange
    from decathlon_sandbox.streams import Gate

NOTICE_SECONDS = 10.0
"""For an exchange that no caller waits for."""
REFUSED_SECONDS = 5.0
"""How long a server that was just started may refuse connections."""
RETRY_SECONDS = 0.2
ERROR_BYTES = 4096
UNHANDLED = 16
"""Messages that the loop has not taken yet, before threads wait for it."""
LIMIT_BYTES = wire.MAX_LINE_BYTES - 1024
TROUBLES = (OSError, http.client.HTTPException, ValueError)


class RemoteServer(Server):
    def __init__(self, loop: Loop, gate: Gate, settings: dict[str, Any]) -> None:
        super().__init__(read.text(settings, "name"), read.optional_number(settings, "request_seconds"))
        self._loop = loop
        self._gate = gate
        self._site = Site(read.text(settings, "url"), read.named_strings(settings, "headers"))
        self._outbox: queue.SimpleQueue[tuple[bytes, int | None] | None] = queue.SimpleQueue()
        self._slots = threading.Semaphore(UNHANDLED)
        self._given_up: set[int] = set()
        self._closing = threading.Event()
        self._sender = threading.Thread(target=self._send_all, daemon=True)

    def post(self, data: bytes, number: int | None) -> None:
        self._outbox.put((data, number))

    def dropped(self, number: int) -> None:
        self._given_up.add(number)
        self._site.abort(number)

    def lost(self, why: str) -> None:
        super().lost(why)
        self.hang_up()

    def hang_up(self) -> None:
        self._closing.set()
        self._site.abort_all()
        self._outbox.put(None)

    def wait(self, until: float) -> None:
        if self._sender.ident is not None:
            self._sender.join(max(0.0, until - time.monotonic()))

    def stop(self, then: Callable[[], object]) -> None:
        self.hang_up()
        then()

    # in threads

    def _send_all(self) -> None:
        """Requests each in a thread of its own, anything else before what comes after it."""
        while (item := self._outbox.get()) is not None:
            data, number = item
            if number is None:
                self._tell(data)
            else:
                self._ask_beside(data, number)
        self._say_goodbye()

    def _ask_beside(self, data: bytes, number: int) -> None:
        try:
            threading.Thread(target=self._ask, args=(data, number), daemon=True).start()
        except RuntimeError as error:  # the sandbox has no room for another thread
            fault = self._fault(f"cannot be asked: {error}")
            self._in_loop(lambda: self.session.fail(number, fault))

    def _ask(self, data: bytes, number: int) -> None:
        try:
            fault = self._exchange(data, number)
        except Fault as raised:
            fault = raised
        except TROUBLES as error:
            fault = self._fault(f"cannot be reached: {reason(error)}")
        self._given_up.discard(number)
        if fault is not None:
            self._in_loop(lambda: self.session.fail(number, fault))

    def _tell(self, data: bytes) -> None:
        try:
            self._exchange(data, None)
        except (*TROUBLES, Fault):
            pass  # a server that is gone: its calls say so

    def _exchange(self, data: bytes, number: int | None) -> Fault | None:
        """Send one message, hand over what comes back; why a request gets no reply, if it is known."""
        raise NotImplementedError

    def _say_goodbye(self) -> None:
        pass

    def _persist(self, attempt: Callable[[], T]) -> T:
        """Try again while connections are refused and the server is young."""
        while True:
            try:
                return attempt()
            except ConnectionRefusedError:
                if time.monotonic() - self.began_at > REFUSED_SECONDS or self._closing.wait(RETRY_SECONDS):
                    raise

    def _hear(self, data: bytes) -> Any:
        """Hand a message over to the session; the message, None where it is not JSON."""
        # Outside of its strings JSON may hold line ends, and inside it cannot.
        line = data.replace(b"\r", b" ").replace(b"\n", b" ")
        try:
            message, line = parse(line)
        except ValueError:
            self._in_loop(lambda: self.session.receive(line))
            return None
        self._in_loop(lambda: self.session.take(message, line))
        return message

    def _in_loop(self, action: Callable[[], object]) -> None:
        """Hand over, but not faster than the loop takes and the line is read."""
        self._gate.wait()
        self._slots.acquire()

        def act() -> None:
            self._slots.release()
            action()

        self._loop.hand_over(act)

    def _fault(self, what: str) -> Fault:
        return Fault(wire.SERVER, f"server {self.name} {what}", server=self.name)


def refusal(exchange: Exchange) -> tuple[str, bytes]:
    """What an error of HTTP's says, and its body."""
    body = exchange.body(ERROR_BYTES) or b""
    said = body.decode("utf-8", "replace").strip()
    return f"answered HTTP {exchange.response.status}" + (f": {said}" if said else ""), body


def answers(value: Any, number: object) -> bool:
    """Is this the reply to the request of that id?"""
    message = as_object(value)
    return message is not None and "method" not in message and message.get("id") == number
