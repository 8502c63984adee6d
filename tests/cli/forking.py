"""Runs the command in processes that are forked after its imports, which take most of a short command's time.

Each command still has a process of its own, with its own arguments, environment, folder and exit, and reaches
`cli.main` as with `python -m`. Only variables that Python reads when it starts have no effect.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import pkgutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from decathlon_mcp import cli, settings
from decathlon_mcp.cli.app import command_line
from tests import cpu_time

COMMAND_SECONDS = 120
_MAX_MESSAGE_BYTES = 128 * 1024
PLUGINS = "decathlon_mcp.plugins"
"""The package of the built-in plug-ins; the core's tests also run without it."""
_NOT_IMPORTED = frozenset({"__main__", "addon", "play", "inspect_logs", "parquet", "ray"})
"""`__main__` runs the command; few tests need the others, with their large or missing libraries."""


class ForkingServer:
    """The process that imports everything once. It ends with this object's `close`, or with this process."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(COMMAND_SECONDS)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.cli.forking", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )

    def run(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Run a command until it ends."""
        with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
            request = json.dumps([list(arguments), str(folder), dict(environment)]).encode()
            socket.send_fds(self._socket, [request], [stdout.fileno(), stderr.fileno()])
            try:
                reply = self._socket.recv(_MAX_MESSAGE_BYTES)
            except TimeoutError:
                self._process.kill()
                raise
            assert reply, "the process that runs commands has ended"
            status, seconds = json.loads(reply)
            self._seconds += seconds
            cpu_time.add_seconds_of_forked(seconds)
            stdout.seek(0)
            stderr.seek(0)
            output, errors = stdout.read().decode(), stderr.read().decode()
        return subprocess.CompletedProcess(["decathlon-mcp", *arguments], status, output, errors)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()
        cpu_time.add_seconds_of_forked(-self._seconds)  # they are now among those of this process's children


def _serve(connection: socket.socket) -> list[str]:
    """Serve until the other side is gone. Returns only in forked processes, with a command's arguments."""
    while True:
        message, files, _, _ = socket.recv_fds(connection, _MAX_MESSAGE_BYTES, 2)
        if not message:
            sys.exit()
        pid = os.fork()
        if pid == 0:
            break
        for file in files:
            os.close(file)
        _, status, usage = os.wait4(pid, 0)
        reply = [os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime]
        connection.send(json.dumps(reply).encode())
    connection.close()
    arguments, folder, environment = json.loads(message)
    for number, file in enumerate(files, start=1):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    _read_environment()
    return arguments


def _read_environment() -> None:
    """Read again what was read from the environment at the imports: the default of `--state`."""
    for module in tuple(sys.modules.values()):
        for name, value in tuple(vars(module).items()):
            if name.endswith("_DEFAULTS") and hasattr(value, "state"):
                vars(value)["state"] = settings.default_state()


def _main() -> None:
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    names = (cli.__name__, *([PLUGINS] if find_spec(PLUGINS) else []))
    for name in names:
        for module in pkgutil.walk_packages(import_module(name).__path__, f"{name}."):
            if module.name.rpartition(".")[2] not in _NOT_IMPORTED:
                import_module(module.name)
    command_line()
    assert threading.active_count() == 1, "a forked process would lack the other threads"
    gc.freeze()  # a collection in a forked process would write to, and so copy, every page
    faulthandler.enable()  # each command has its own stderr
    arguments = _serve(connection)
    sys.path[0] = str(Path.cwd())
    sys.argv[1:] = arguments
    sys.orig_argv[1:] = ["-m", cli.__name__, *arguments]
    cli.main()


if __name__ == "__main__":
    _main()
