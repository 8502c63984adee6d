"""`start`: servers brought up side by side, all or none."""

from __future__ import annotations

import time

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.handshake import Handshake
from decathlon_sandbox.server import Server, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

    from decathlon_sandbox.loop import Loop
    from decathlon_sandbox.request import Request


class Start:
    """Answers its request when the last server is up, or the first has failed and the others are stopped.

    `on_lost` is told of those that came up and then end.
    """

    def __init__(
        self,
        loop: Loop,
        request: Request,
        servers: Sequence[Server],
        deadline_seconds: float,
        on_lost: Callable[[Server], object],
        on_end: Callable[[Start], object],
    ) -> None:
        self._loop = loop
        self._request = request
        self._servers = servers
        self._deadline_seconds = deadline_seconds
        self._on_lost = on_lost
        self._on_end = on_end
        self._facts: dict[str, dict[str, Any]] = {}
        self._opened: list[Server] = []
        self._over = False

    def begin(self) -> None:
        self._request.on_cancel = lambda: self.give_up(Fault(wire.CANCELLED, "the start was given up"))
        self._deadline = self._loop.later(self._deadline_seconds, self._expire)
        for server in self._servers:
            server.on_lost = lambda lost: self.give_up(_about(lost, lost.fault))
            try:
                server.open()
            except Fault as fault:
                self.give_up(fault)
                return
            self._opened.append(server)
        for server in self._servers:
            self._shake_hands(server)
        self._look()

    def give_up(self, fault: Fault) -> None:
        """Stop all of them, then answer with `fault`."""
        if self._over:
            return
        self._end()
        left = len(self._opened)

        def stopped() -> None:
            nonlocal left
            left -= 1
            if left <= 0:
                self._request.fail(fault)

        for server in self._servers:
            server.ended(
                Fault(wire.SERVER, f"server {server.name} was stopped: {fault.message}", server=server.name)
            )
        for server in self._opened:
            server.stop(stopped)
        if not self._opened:
            stopped()

    def _shake_hands(self, server: Server) -> None:
        def up(facts: dict[str, Any]) -> None:
            if self._over:
                return
            self._facts[server.name] = {**facts, "seconds": round(time.monotonic() - server.began_at, 6)}
            self._look()

        def failed(fault: Fault) -> None:
            self.give_up(_about(server, fault))

        if not self._over:
            Handshake(server, up, failed).begin()

    def _look(self) -> None:
        if self._over or len(self._facts) < len(self._servers):
            return
        self._end()
        for server in self._servers:
            server.state = State.UP
            server.on_lost = self._on_lost
        self._request.answer({"servers": self._facts})

    def _expire(self) -> None:
        silent = next(server for server in self._servers if server.name not in self._facts)
        said = f"server {silent.name} was not up after {self._deadline_seconds:g} s"
        self.give_up(_about(silent, Fault(wire.SERVER, said)))

    def _end(self) -> None:
        self._over = True
        self._deadline.cancel()
        self._on_end(self)


def _about(server: Server, fault: Fault) -> Fault:
    """With the server's name and last words, where it has none yet."""
    fault.data = {"server": server.name, **server.last_words(), **fault.data}
    return fault
