"""The sandbox's first process: reads the line, hands each request to what does it, ends all at the end."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from decathlon_sandbox import wire
from decathlon_sandbox.fault import Fault
from decathlon_sandbox.lines import Lines
from decathlon_sandbox.log import log, log_failure
from decathlon_sandbox.loop import Loop
from decathlon_sandbox.request import Request, failure
from decathlon_sandbox.streams import Gate, Sink, Source
from decathlon_sandbox.strict_json import as_object, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from decathlon_sandbox.family import Family
    from decathlon_sandbox.forwards import Forwards
    from decathlon_sandbox.servers import Servers


_OF_CONNECTIONS = (wire.DATA, wire.TAKEN, wire.FINISHED, wire.RESET)


def main() -> int:
    """Until the line ends, the lease does, or SIGTERM. Never returns: no thread or exit hook can hold it."""
    _name_loopback()
    reading, writing = _take_line()
    driver = Driver(reading, writing)
    status = 0
    for phase in (driver.run, driver.end):
        try:
            phase()
        except BaseException:  # noqa: BLE001  (whatever it is, nothing may outlive us)
            log_failure("the driver failed")
            status = 1
    os._exit(status)


def _name_loopback() -> None:
    """An engine that is not asked for a network writes no /etc/hosts: then `localhost` would be no name."""
    if os.getpid() != 1:
        return
    try:
        with open("/etc/hosts", "a+", encoding="utf-8", errors="replace") as hosts:
            hosts.seek(0)
            if "localhost" not in hosts.read():
                hosts.write("127.0.0.1\tlocalhost\n")
    except OSError:
        pass  # only root may


def _take_line() -> tuple[int, int]:
    """The line on descriptors that no child inherits; nothing printed by accident can reach it any more."""
    reading, writing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return reading, writing


def _lease_seconds() -> float:
    try:
        return float(os.environ[wire.LEASE_VARIABLE])
    except (KeyError, ValueError):
        return wire.LEASE_SECONDS


class Driver:
    """The line, the lease, the table of methods. What a method needs is imported when it is first used."""

    def __init__(self, reading: int, writing: int) -> None:
        self._loop = Loop()
        self._gate = Gate()
        """Shut while the server does not read: then the children are not read either."""
        self._sink = Sink(self._loop, writing, on_broken=self._loop.stop, gate=self._gate)
        self._lines = Lines(wire.MAX_LINE_BYTES, self._take, self._too_long)
        Source(self._loop, reading, self._hear, self._loop.stop)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if os.getpid() == 1:
                # Of a machine of its own only the machine's own processes would send one.
                signal.signal(number, signal.SIG_IGN)
            else:
                self._loop.on_signal(number, self._loop.stop)
        self._lease_seconds = _lease_seconds()
        self._heard_at = time.monotonic()
        self._live: dict[int, Request] = {}
        self._seen = _Seen()
        self._family_or_none: Family | None = None
        self._servers_or_none: Servers | None = None
        self._forwards_or_none: Forwards | None = None
        self._methods = {
            wire.ARRANGE: self._arrange,
            wire.RUN: self._run,
            wire.START: self._start,
            wire.CALL: self._call,
            wire.FREEZE: self._freeze,
            wire.FORWARD: self._forward,
            wire.DIAL: self._dial,
            wire.PING: self._ping,
        }

    def run(self) -> None:
        python = ".".join(map(str, sys.version_info[:3]))
        self._notify(wire.READY, {"version": wire.VERSION, "python": python, "pid": os.getpid()})
        self._watch_lease()
        self._loop.run()

    def end(self) -> None:
        """Kill all that was started, and wait until it is gone."""
        if self._servers_or_none is not None:
            self._servers_or_none.leave()
        if self._family_or_none is not None:
            self._family_or_none.end_all_now()
        if self._servers_or_none is not None:
            self._servers_or_none.wait()

    # the line

    def _hear(self, chunk: bytes) -> None:
        self._heard_at = time.monotonic()
        self._lines.feed(chunk)

    def _take(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            # Half surrogate pairs are let in: a tool's arguments are not ours to judge.
            message = as_object(json.loads(line.decode("utf-8", "surrogatepass")))
        except (ValueError, RecursionError) as error:
            self._sink.send(failure(None, Fault(wire.PARSE, f"not JSON: {error}")))
            return
        if message is None or not isinstance(message.get("method"), str):
            self._sink.send(failure(None, Fault(wire.INVALID, "a message is an object with a method")))
        elif "id" in message:
            self._begin(message)
        elif message["method"] == wire.CANCEL:
            number = (as_object(message.get("params")) or {}).get("id")
            if type(number) is int and number in self._live:
                self._live[number].cancel()
        elif message["method"] in _OF_CONNECTIONS and self._forwards_or_none is not None:
            self._forwards_or_none.hear(message["method"], as_object(message.get("params")) or {})

    def _too_long(self, head: bytes, tail: bytes) -> None:
        self._sink.send(
            failure(None, Fault(wire.TOO_LONG, f"a line of more than {wire.MAX_LINE_BYTES} bytes"))
        )

    def _begin(self, message: dict[str, Any]) -> None:
        number = message["id"]
        if type(number) is not int or number < 1:
            self._sink.send(failure(None, Fault(wire.INVALID, "`id` must be a positive integer")))
        elif self._seen.first(number):
            request = self._live[number] = Request(number, self._answered)
            self._do(request, message["method"], as_object(message.get("params", {})))
        elif number not in self._live:  # else its answer is still to come
            self._sink.send(failure(number, Fault(wire.INVALID, f"id {number} was answered before")))

    def _do(self, request: Request, name: str, params: dict[str, Any] | None) -> None:
        method = self._methods.get(name)
        if method is None:
            request.fail(Fault(wire.UNKNOWN_METHOD, f"no method {name!r}"))
            return
        if params is None:
            request.fail(Fault(wire.BAD_PARAMS, "`params` must be an object"))
            return
        try:
            method(request, params)
        except Fault as fault:
            request.fail(fault)
        except Exception as error:  # noqa: BLE001  (a fault of one request must not end the others)
            log_failure(f"{name} failed")
            request.fail(Fault(wire.INTERNAL, f"{type(error).__name__}: {error}"))

    def _answered(self, request: Request, data: bytes) -> None:
        self._live.pop(request.id, None)
        self._sink.send(data)

    def _notify(self, method: str, params: dict[str, Any]) -> None:
        data = encode({"jsonrpc": "2.0", "method": method, "params": params}) + b"\n"
        if len(data) <= wire.MAX_LINE_BYTES:
            self._sink.send(data)

    def _watch_lease(self) -> None:
        left = self._heard_at + self._lease_seconds - time.monotonic()
        if left > 0:
            self._loop.later(left, self._watch_lease)
        else:
            log(f"decathlon: nothing heard for {self._lease_seconds:g} s, the driver ends")
            self._loop.stop()

    # the methods

    @property
    def _family(self) -> Family:
        if self._family_or_none is None:
            from decathlon_sandbox.family import Family

            self._family_or_none = Family(self._loop)
        return self._family_or_none

    @property
    def _servers(self) -> Servers:
        if self._servers_or_none is None:
            from decathlon_sandbox.servers import Servers

            self._servers_or_none = Servers(self._loop, self._family, self._gate, self._notify)
        return self._servers_or_none

    @property
    def _forwards(self) -> Forwards:
        if self._forwards_or_none is None:
            from decathlon_sandbox.forwards import Forwards

            self._forwards_or_none = Forwards(self._loop, self._notify)
        return self._forwards_or_none

    def _arrange(self, request: Request, params: dict[str, Any]) -> None:
        from decathlon_sandbox.files import arrange

        arrange(self._loop, request, params)

    def _run(self, request: Request, params: dict[str, Any]) -> None:
        from decathlon_sandbox.runs import Run

        Run(self._loop, self._family, request, params)

    def _start(self, request: Request, params: dict[str, Any]) -> None:
        self._servers.start(request, params)

    def _call(self, request: Request, params: dict[str, Any]) -> None:
        self._servers.call(request, params)

    def _freeze(self, request: Request, params: dict[str, Any]) -> None:
        self._servers.freeze(request, params)

    def _forward(self, request: Request, params: dict[str, Any]) -> None:
        self._forwards.listen(request, params)

    def _dial(self, request: Request, params: dict[str, Any]) -> None:
        self._forwards.dial(request, params)

    def _ping(self, request: Request, params: dict[str, Any]) -> None:
        request.answer({})


class _Seen:
    """Which ids have been used. They come nearly in order, so few are kept."""

    def __init__(self) -> None:
        self._all_up_to = 0
        self._above: set[int] = set()

    def first(self, number: int) -> bool:
        """Is this the first time?"""
        if number <= self._all_up_to or number in self._above:
            return False
        self._above.add(number)
        while self._all_up_to + 1 in self._above:
            self._all_up_to += 1
            self._above.remove(self._all_up_to)
        return True
