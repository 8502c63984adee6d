"""All of the task's servers: `start`, `call` and `freeze`."""

from __future__ import annotations

import time

from decathlon_sandbox import params as read
from decathlon_sandbox import wire
from decathlon_sandbox.calls import Call
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.server import Server, State
from decathlon_sandbox.starts import Start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from decathlon_sandbox.family import Family
    from decathlon_sandbox.loop import Loop
    from decathlon_sandbox.request import Request
    from decathlon_sandbox.streams import Gate

    Notify = Callable[[str, dict[str, Any]], object]

HANG_UP_SECONDS = 1.0
"""How long a frozen server may take to end once its stdin has; then SIGTERM, after as long again SIGKILL."""
LOOK_SECONDS = 0.01
CALLABLE = ("tools/call", "tools/list")


class Servers:
    """By name; frozen once and for good."""

    def __init__(self, loop: Loop, family: Family, gate: Gate, notify: Notify) -> None:
        self._loop = loop
        self._family = family
        self._gate = gate
        self._notify = notify
        self._servers: dict[str, Server] = {}
        self._starts: set[Start] = set()
        self._calls: dict[str, dict[int, Call]] = {}
        self._frozen = False

    def start(self, request: Request, params: dict[str, Any]) -> None:
        self._refuse_frozen()
        deadline_seconds = read.number(params, "deadline_seconds")
        servers = [self._make(settings) for settings in read.objects(params, "servers")]
        names = [server.name for server in servers]
        for name in names:
            known = self._servers.get(name)
            if names.count(name) > 1 or (known is not None and known.state is not State.ENDED):
                raise Fault(wire.BAD_PARAMS, f"there is a server {name} already")
        self._servers.update({server.name: server for server in servers})
        start = Start(self._loop, request, servers, deadline_seconds, self._lost, self._starts.discard)
        self._starts.add(start)
        start.begin()

    def call(self, request: Request, params: dict[str, Any]) -> None:
        self._refuse_frozen()
        server = self._servers.get(read.text(params, "server"))
        if server is None:
            raise Fault(wire.BAD_PARAMS, f"no server {params['server']}")
        if server.state is not State.UP:
            raise server.fault
        method = read.one_of(params, "method", *CALLABLE)
        timeout_seconds = read.optional_number(params, "timeout_seconds")
        running = self._calls.setdefault(server.name, {})
        running[request.id] = call = Call(
            self._loop, request, server, self._notify, lambda: running.pop(request.id, None)
        )
        call.begin(method, read.mapping(params, "params"), timeout_seconds)

    def freeze(self, request: Request, params: dict[str, Any]) -> None:
        """Everything stops: servers as the MCP SDK stops them, whatever is left with SIGKILL."""
        self._family.spare(read.strings(params, "spare"))
        self._frozen = True
        before = self._family.everybody() - self._family.spared
        fault = Fault(wire.FROZEN, "the sandbox is frozen")
        for start in tuple(self._starts):
            start.give_up(fault)
        ending = [server for server in self._servers.values() if server.state is not State.ENDED]
        for server in ending:
            server.ended(fault)
            server.hang_up()

        def killed(left: set[int]) -> None:
            if left:
                request.fail(Fault(wire.INTERNAL, f"{len(left)} processes would not die", pids=sorted(left)))
            else:
                request.answer({"killed": len(before)})

        self._see_off(ending, lambda: self._family.end_all(killed))

    def leave(self) -> None:
        """The driver ends: servers that are not our processes are told so."""
        for server in self._servers.values():
            if server.state is not State.ENDED:
                server.hang_up()

    def wait(self) -> None:
        """Until they have been told, at most a second. Blocks: for the very end only."""
        until = time.monotonic() + HANG_UP_SECONDS
        for server in self._servers.values():
            server.wait(until)

    def _make(self, settings: dict[str, Any]) -> Server:
        kind = read.one_of(settings, "type", "stdio", "sse", "streamable_http")
        if kind == "stdio":
            from decathlon_sandbox.stdio_server import StdioServer

            server: Server = StdioServer(self._loop, self._family, self._gate, settings)
        elif kind == "sse":
            from decathlon_sandbox.sse_server import SseServer

            server = SseServer(self._loop, self._gate, settings)
        else:
            from decathlon_sandbox.http_server import HttpServer

            server = HttpServer(self._loop, self._gate, settings)
        server.on_notice = self._noticed
        return server

    def _refuse_frozen(self) -> None:
        if self._frozen:
            raise Fault(wire.FROZEN, "the sandbox is frozen")

    def _see_off(self, ending: list[Server], then: Callable[[], object]) -> None:
        """Wait for the processes of servers that were hung up on; one SIGTERM; not for ever."""
        began_at, told = time.monotonic(), False

        def look() -> None:
            nonlocal told
            waited = time.monotonic() - began_at
            alive = [server for server in ending if server.alive]
            if not alive or waited >= 2 * HANG_UP_SECONDS:
                then()
                return
            if waited >= HANG_UP_SECONDS and not told:
                told = True
                for server in alive:
                    server.terminate()
            self._loop.later(LOOK_SECONDS, look)

        look()

    def _lost(self, server: Server) -> None:
        self._notify(wire.EXITED, {"server": server.name, **server.last_words()})

    def _noticed(self, server: Server, method: str, params: dict[str, Any]) -> None:
        if server.state is not State.UP:
            return
        if method == "notifications/tools/list_changed":
            self._notify(wire.CHANGED, {"server": server.name})
        elif method == "notifications/message":
            running = self._calls.get(server.name) or {}
            number = next(iter(running)) if len(running) == 1 else None
            self._notify(wire.MESSAGE, {"id": number, "server": server.name, "params": params})
