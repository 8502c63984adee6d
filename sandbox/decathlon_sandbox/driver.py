"""Entry point of the driver: reads the server's messages and dispatches them."""

from __future__ import annotations

import json
import os
import re
import signal
from functools import cached_property

from decathlon_sandbox import wire
from decathlon_sandbox.connection import Connection
from decathlon_sandbox.event_loop import EventLoop
from decathlon_sandbox.log import log_exception
from decathlon_sandbox.rates import TokenBucket
from decathlon_sandbox.requests import Requests
from decathlon_sandbox.rpc import Params, Request, RequestError
from decathlon_sandbox.streams import Backpressure
from decathlon_sandbox.strict_json import as_object, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from decathlon_sandbox.resolver import Resolver
    from decathlon_sandbox.servers import Servers
    from decathlon_sandbox.supervisor import ProcessSupervisor
    from decathlon_sandbox.tunnels import Tunnels


_TUNNEL_NOTIFICATIONS = (wire.DATA, wire.TAKEN, wire.FINISHED, wire.RESET)

_OPTIONAL_NOTIFICATIONS = (wire.PROGRESS, wire.MESSAGE, wire.CHANGED)
"""Notifications that a task's server causes. Those above a rate are dropped, and those that would take room
from responses."""
_REQUEST_ID = re.compile(rb'\{"jsonrpc":"2\.0","id":(\d{1,18}),')
"""How the server begins a request. For messages that cannot be read."""


def main() -> int:
    """Run until no server will come any more or a signal arrives. Exits the process and never returns."""
    _add_localhost_name()
    input_fd, output_fd = _claim_stdio()
    driver = Driver(input_fd, output_fd)
    status = 0
    for phase in (driver.run, driver.shut_down):
        try:
            phase()
        except BaseException:  # noqa: BLE001  (no process may outlive the driver, whatever happens)
            log_exception("the driver failed")
            status = 1
    os._exit(status)  # does not wait for threads and exit hooks


def _add_localhost_name() -> None:
    # Docker writes no /etc/hosts for a container without a network; `localhost` would then not resolve.
    if os.getpid() != 1:
        return
    try:
        with open("/etc/hosts", "a+", encoding="utf-8", errors="replace") as hosts:
            hosts.seek(0)
            if "localhost" not in hosts.read():
                hosts.write("127.0.0.1\tlocalhost\n")
    except OSError:
        pass  # only root may


def _reset_signals() -> None:
    """Give the programs that the driver starts the signals of a program that was just started by a login.

    What is ignored or blocked outlives execve(2), so that the sandbox would get what a server was started
    with: `nohup` ignores SIGHUP, and a shell without job control ignores SIGINT and SIGQUIT for what it puts
    into the background.
    """
    # Python itself ignores these; `subprocess` restores them in each child.
    of_python = {signal.SIGPIPE, signal.SIGXFSZ}
    for number in signal.valid_signals() - of_python:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _reset_limits() -> None:
    """Give the programs of an isolated sandbox the umask and the OOM score of those in a container.

    A unit of systemd may set others for the server, and the kernel would rather end it than a sandbox.
    """
    os.umask(0o022)
    try:
        with open("/proc/self/oom_score_adj", "r+", encoding="ascii") as file:
            if int(file.read()) < 0:
                file.seek(0)
                file.write("0")
    except (OSError, ValueError):
        pass  # without /proc, or in a kernel without it


def _do_nothing() -> None:
    pass


def _claim_stdio() -> tuple[int, int]:
    """Move stdin and stdout to descriptors that children do not inherit; stray prints go to the log."""
    input_fd, output_fd = os.dup(0), os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    os.dup2(2, 1)
    return input_fd, output_fd


class Driver:
    """Handler of the connection to the server, with the table of methods.

    What a method needs is imported when it is first used, so that the driver is ready early.
    """

    def __init__(self, input_fd: int, output_fd: int) -> None:
        self._loop = EventLoop()
        # While the server does not acknowledge the driver's output, the children's output is not read either.
        self._backpressure = Backpressure()
        self._connection = Connection(self._loop, input_fd, output_fd, self, self._backpressure)
        self._requests = Requests(self._connection, self._dispatch)
        _reset_signals()
        if os.getpid() == 1:
            _reset_limits()
        # Only processes inside the sandbox would signal its first process. It does not ignore the signals
        # (SIG_IGN): every program in the sandbox would inherit that, and not end when it is told to.
        on_signal = _do_nothing if os.getpid() == 1 else self._loop.stop
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, on_signal)
        self._notification_rate = TokenBucket(
            per_second=wire.NOTIFICATIONS_PER_SECOND, burst=wire.NOTIFICATIONS_BURST
        )
        self._methods = {
            wire.ARRANGE: self._arrange,
            wire.PACK: self._pack,
            wire.RUN: self._run,
            wire.SNAPSHOT: self._snapshot,
            wire.CLEAN: self._clean,
            wire.MERGE: self._merge,
            wire.DEFINE: self._define,
            wire.START: self._start,
            wire.CALL: self._call,
            wire.FREEZE: self._freeze,
            wire.FORWARD: self._forward,
            wire.DIAL: self._dial,
            wire.RESOLVE: self._resolve,
            wire.PING: self._ping,
        }

    def run(self) -> None:
        self._connection.start()
        # As another process, it would reach those outside of its sandbox.
        if wire.MEMORY_VARIABLE in os.environ and os.getpid() == 1:
            from decathlon_sandbox.memory import limit_memory

            limit_memory(self._loop)
        self._loop.run()

    def shut_down(self) -> None:
        """Kill everything that was started and wait until it is gone."""
        if "_supervisor" in self.__dict__:
            self._supervisor.kill_all_blocking()

    # messages

    def on_message(self, payload: bytes) -> None:
        try:
            # Unpaired surrogates are accepted: they may be part of a tool's arguments.
            message = as_object(json.loads(payload.decode("utf-8", "surrogatepass")))
        except (ValueError, RecursionError) as error:
            self._refuse(_request_id(payload), RequestError(wire.PARSE, f"not JSON: {error}"))
        else:
            if message is None or not isinstance(message.get("method"), str):
                text = "a message must be an object with a method"
                self._refuse(None, RequestError(wire.INVALID, text))
            elif "id" not in message:
                self._on_notification(message["method"], as_object(message.get("params")) or {})
            elif not _is_request_id(message["id"]):
                text = "`id` must be a positive integer with a generation and a counter"
                self._refuse(None, RequestError(wire.INVALID, text))
            else:
                params = as_object(message.get("params", {}))
                self._requests.add(message["id"], message["method"], params)

    def on_attached(self) -> None:
        # Their data may have been lost with the stream.
        if "_tunnels" in self.__dict__:
            self._tunnels.reset_all()

    def on_pending(self, ids: list[int]) -> list[int]:
        return self._requests.resume(ids)

    def on_room(self) -> None:
        self._requests.begin_waiting()

    def on_end(self) -> None:
        self._loop.stop()

    def _refuse(self, request_id: int | None, error: RequestError) -> None:
        self._requests.send_error(request_id, error)

    def _dispatch(self, request: Request) -> None:
        method = self._methods.get(request.method)
        if method is None:
            request.fail(RequestError(wire.UNKNOWN_METHOD, f"no method {request.method!r}"))
            return
        if request.params is None:
            request.fail(RequestError(wire.BAD_PARAMS, "`params` must be an object"))
            return
        try:
            method(request, Params(request.params))
        except RequestError as error:
            request.fail(error)
        except Exception as error:  # noqa: BLE001  (an error in one request must not end the others)
            log_exception(f"{request.method} failed")
            request.fail(RequestError(wire.INTERNAL, f"{type(error).__name__}: {error}"))

    def _on_notification(self, method: str, params: dict[str, Any]) -> None:
        try:
            if method == wire.CANCEL:
                request_id = params.get("id")
                if type(request_id) is int:
                    self._requests.cancel(request_id)
            elif method in _TUNNEL_NOTIFICATIONS and "_tunnels" in self.__dict__:
                self._tunnels.on_notification(method, Params(params))
        except Exception:  # noqa: BLE001  (the rest of the input must still be handled)
            log_exception(f"{method} failed")

    def _notify(self, method: str, params: dict[str, Any]) -> None:
        is_optional = method in _OPTIONAL_NOTIFICATIONS
        if is_optional and not self._notification_rate.take():
            return
        data = encode({"jsonrpc": "2.0", "method": method, "params": params})
        if len(data) <= wire.MAX_NOTIFICATION_BYTES and not (is_optional and self._requests.leave_no_room()):
            self._connection.notify(data)

    # methods

    @cached_property
    def _supervisor(self) -> ProcessSupervisor:
        from decathlon_sandbox.supervisor import ProcessSupervisor

        return ProcessSupervisor(self._loop)

    @cached_property
    def _servers(self) -> Servers:
        from decathlon_sandbox.servers import Servers

        return Servers(self._loop, self._supervisor, self._backpressure, self._notify)

    @cached_property
    def _tunnels(self) -> Tunnels:
        from decathlon_sandbox.tunnels import Tunnels

        return Tunnels(self._loop, self._notify, self._backpressure)

    @cached_property
    def _resolver(self) -> Resolver:
        from decathlon_sandbox.resolver import Resolver

        return Resolver(self._loop)

    def _arrange(self, request: Request, params: Params) -> None:
        from decathlon_sandbox.files import arrange

        arrange(self._loop, request, params)

    def _pack(self, request: Request, params: Params) -> None:
        from decathlon_sandbox.files import pack

        pack(self._loop, request, params)

    def _run(self, request: Request, params: Params) -> None:
        from decathlon_sandbox.runs import Run

        Run(self._loop, self._supervisor, request, params)

    def _snapshot(self, request: Request, params: Params) -> None:
        from decathlon_sandbox.changes import snapshot

        snapshot(request)

    def _clean(self, request: Request, params: Params) -> None:
        from decathlon_sandbox.changes import clean

        clean(self._loop, request, params)

    def _merge(self, request: Request, params: Params) -> None:
        merging, fixed_addresses = self._supervisor.merge_memory()
        request.reply({"merging": merging, "fixed_addresses": fixed_addresses})

    def _define(self, request: Request, params: Params) -> None:
        self._servers.define(request, params)

    def _start(self, request: Request, params: Params) -> None:
        self._servers.start(request, params)

    def _call(self, request: Request, params: Params) -> None:
        self._servers.call(request, params)

    def _freeze(self, request: Request, params: Params) -> None:
        self._servers.freeze(request, params)

    def _forward(self, request: Request, params: Params) -> None:
        self._tunnels.listen(request, params)

    def _dial(self, request: Request, params: Params) -> None:
        if request.id >> wire.COUNTER_BITS < self._connection.generation:
            # It arrived late. The tunnels of that server have been reset.
            request.fail(RequestError(wire.CANCELLED, "the server that asked for it was replaced"))
        else:
            self._tunnels.dial(request, params)

    def _resolve(self, request: Request, params: Params) -> None:
        _ = self._resolver
        request.reply({})

    def _ping(self, request: Request, params: Params) -> None:
        self._connection.expect_saving(params.boolean("saving"))
        request.reply({})


def _is_request_id(value: Any) -> bool:
    return type(value) is int and value > 0 and value % (1 << wire.COUNTER_BITS) != 0


def _request_id(payload: bytes) -> int | None:
    """The id of a request that cannot be read, so that it does not wait for an answer for ever."""
    match = _REQUEST_ID.match(payload)
    return int(match.group(1)) if match is not None else None
