"""A server behind MCP's old HTTP+SSE transport: one event stream in, a POST for each message out."""

from __future__ import annotations

import threading

from decathlon_sandbox.events import Events
from decathlon_sandbox.fault import Fault, reason
from decathlon_sandbox.remote_server import LIMIT_BYTES, NOTICE_SECONDS, TROUBLES, RemoteServer, refusal
from decathlon_sandbox.site import Site

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from decathlon_sandbox.loop import Loop
    from decathlon_sandbox.streams import Gate


class SseServer(RemoteServer):
    """Lost when its event stream ends."""

    def __init__(self, loop: Loop, gate: Gate, settings: dict[str, Any]) -> None:
        super().__init__(loop, gate, settings)
        self._endpoint: Site | None = None

    def open(self) -> None:
        threading.Thread(target=self._listen, daemon=True).start()

    def hang_up(self) -> None:
        super().hang_up()
        if self._endpoint is not None:
            self._endpoint.abort_all()

    def dropped(self, number: int) -> None:
        super().dropped(number)
        if self._endpoint is not None:
            self._endpoint.abort(number)

    def _listen(self) -> None:
        try:
            why = self._persist(self._follow)
        except Fault as fault:
            why = f"failed: {fault.message}"
        except TROUBLES as error:
            why = f"cannot be reached: {reason(error)}"
        self._in_loop(lambda: self.lost(why))

    def _follow(self) -> str:
        with self._site.exchange("GET", {"Accept": "text/event-stream"}, key="listening") as exchange:
            if exchange.response.status != 200:
                return refusal(exchange)[0]
            events = Events(self._take, LIMIT_BYTES)
            for chunk in exchange.chunks():
                events.feed(chunk)
        return "closed its event stream"

    def _take(self, kind: str, data: bytes) -> None:
        if kind == "endpoint" and self._endpoint is None:
            self._endpoint = Site(self._site.beside(data.decode("utf-8")), self._site.headers)
            self._sender.start()
        elif kind == "message":
            self._hear(data)

    def _exchange(self, data: bytes, number: int | None) -> Fault | None:
        endpoint = self._endpoint
        if endpoint is None:
            return self._fault("has no address for messages")
        key = number if number is not None else "notice"
        headers = {"Content-Type": "application/json"}
        with endpoint.exchange("POST", headers, data, key=key, timeout_seconds=NOTICE_SECONDS) as exchange:
            ok = 200 <= exchange.response.status < 300
            return None if ok else self._fault(refusal(exchange)[0])
