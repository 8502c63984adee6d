"""Entry point of the driver: reads the server's messages and dispatches them."""

from __future__ import annotations

import os
import signal
from functools import cached_property
from importlib import import_module

from decathlon_sandbox import wire
from decathlon_sandbox.byte_streams import Backpressure
from decathlon_sandbox.driver_end import Connection
from decathlon_sandbox.driver_requests import Request, RequestError, answer_in_thread
from decathlon_sandbox.event_loop import EventLoop, log_exception
from decathlon_sandbox.strict_json import JsonObject, encode

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from decathlon_sandbox.child_processes import ProcessSupervisor
    from decathlon_sandbox.tool_servers import Servers


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
    """Give the programs of an isolated sandbox the umask and the OOM score that containers have.

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


def _claim_stdio() -> tuple[int, int]:
    """Move stdin and stdout to descriptors that children do not inherit; stray prints go to the log."""
    input_fd, output_fd = os.dup(0), os.dup(1)
    null_fd = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null_fd, 0)
    os.close(null_fd)
    os.dup2(2, 1)
    return input_fd, output_fd


class Driver:
    """What the server's messages do.

    What a method needs is imported when it is first used, so that the driver is ready early.
    """

    def __init__(self, input_fd: int, output_fd: int) -> None:
        self._loop = EventLoop()
        # Not for what it starts.
        preload = os.environ.pop(wire.PRELOAD_VARIABLE, None)
        self._preload_fd = None if preload is None else int(preload)
        if self._preload_fd is not None:
            os.set_inheritable(self._preload_fd, False)
        # While the server does not acknowledge the driver's output, the children's output is not read either.
        self._backpressure = Backpressure()
        self._connection = Connection(
            self._loop,
            input_fd,
            output_fd,
            self._backpressure,
            begin=self._begin,
            on_notification=self._on_notification,
            on_attached=self._on_attached,
        )
        _reset_signals()
        if os.getpid() == 1:
            _reset_limits()
        # Only processes inside the sandbox would signal its first process. It does not ignore the signals
        # (SIG_IGN): every program in the sandbox would inherit that, and would not end on a signal.
        on_signal = (lambda: None) if os.getpid() == 1 else self._loop.stop
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            self._loop.add_signal_handler(number, on_signal)
        self._notification_rate = wire.TokenBucket(
            per_second=wire.NOTIFICATIONS_PER_SECOND, burst=wire.NOTIFICATIONS_BURST
        )

    def run(self) -> None:
        self._connection.start()
        # As another process, the driver would reach processes outside of its sandbox.
        if wire.MEMORY_VARIABLE in os.environ and os.getpid() == 1:
            from decathlon_sandbox.memory import MemoryLimit

            MemoryLimit(self._loop, int(os.environ[wire.MEMORY_VARIABLE]) << 20).look()
        self._loop.run()

    def shut_down(self) -> None:
        """Kill everything that was started and wait until it is gone."""
        if "_supervisor" in self.__dict__:
            self._supervisor.kill_all_blocking()

    @cached_property
    def _supervisor(self) -> ProcessSupervisor:
        from decathlon_sandbox.child_processes import ProcessSupervisor

        return ProcessSupervisor(self._loop)

    @cached_property
    def _servers(self) -> Servers:
        from decathlon_sandbox.tool_servers import Servers

        preloaded = None
        if self._preload_fd is not None:
            from decathlon_sandbox.preloaded import PreloadedStarts

            preloaded = PreloadedStarts(self._loop, self._preload_fd)
        return Servers(self._loop, self._supervisor, self._backpressure, self._notify_of_servers, preloaded)

    @cached_property
    def _tunnels(self) -> Any:
        # Sent with the driver by a server with the plug-in that asks for tunnels.
        module = import_module("decathlon_sandbox.tunnels")
        return module.Tunnels(self._loop, self._notify, self._backpressure)

    def _begin(self, request: Request) -> None:
        """Begin the work of a request. Raises what makes it fail at once."""
        params, method = request.params, request.method
        if method == wire.CALL:
            self._servers.call(request, params)
        elif method == wire.PING:
            self._connection.expect_saving(params.get("saving", False))
            request.reply({})
        elif method == wire.ARRANGE:
            from decathlon_sandbox.files import run_steps

            answer_in_thread(
                self._loop, request, lambda: run_steps(params["steps"]), lambda _: request.reply({})
            )
        elif method == wire.PACK:
            from decathlon_sandbox.archives import pack

            folder, max_bytes = params["folder"], params["max_bytes"]
            answer_in_thread(self._loop, request, lambda: {"tar": pack(folder, max_bytes)}, request.reply)
        elif method == wire.RUN:
            from decathlon_sandbox.child_processes import Run

            Run(self._loop, self._supervisor, request, params)
        elif method == wire.SNAPSHOT:
            from decathlon_sandbox.changes import snapshot

            request.reply({"since": snapshot()})
        elif method == wire.CLEAN:
            from decathlon_sandbox.changes import Cleaning

            answer_in_thread(self._loop, request, lambda: Cleaning(params).run(), request.reply)
        elif method == wire.MERGE:
            self._supervisor.merge_memory()
            request.reply({})
        elif method == wire.DEFINE:
            self._servers.define(request, params)
        elif method == wire.START:
            self._servers.start(request, params)
        elif method == wire.FREEZE:
            self._servers.freeze(request, params)
        elif method == wire.FORWARD:
            self._tunnels.listen(request, params)
        elif method == wire.RESOLVE:
            self._tunnels.resolve(request)
        elif method != wire.DIAL:
            raise RequestError(wire.UNKNOWN_METHOD, f"no method {method!r}")
        elif request.id >> wire.COUNTER_BITS < self._connection.generation:
            # It arrived late. The tunnels of that server have been reset.
            raise RequestError(wire.CANCELLED, "the server that asked for it was replaced")
        else:
            self._tunnels.dial(request, params)

    def _on_attached(self) -> None:
        # Their data may have been lost with the stream.
        if "_tunnels" in self.__dict__:
            self._tunnels.reset_all()

    def _on_notification(self, method: str, params: JsonObject) -> None:
        if "_tunnels" in self.__dict__:
            self._tunnels.on_notification(method, params)

    def _notify(self, method: str, params: JsonObject) -> None:
        data = encode({"jsonrpc": "2.0", "method": method, "params": params})
        if len(data) <= wire.MAX_NOTIFICATION_BYTES:
            self._connection.notify(data)

    def _notify_of_servers(self, method: str, params: JsonObject) -> None:
        """Send what a task's server causes, unless it is above a rate or would take room from responses."""
        if self._notification_rate.take() and self._connection.has_room:
            self._notify(method, params)
