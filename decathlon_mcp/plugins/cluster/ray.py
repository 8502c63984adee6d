"""Servers on all nodes of a Ray cluster: `serve run decathlon_mcp.plugins.cluster.ray:app`. Requires `[ray]`.

Ray Serve places one replica on each node with the resource `decathlon`. A replica runs the node's server as a
child process, and passes `POST /episodes` to it (`node.py`): an episode is one request through Serve,
whose response stays open as long as the episode. Everything else goes from the client to the node directly.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from starlette.requests import Request
from starlette.responses import Response

from decathlon_mcp.cli.command_line import app as command_line
from decathlon_mcp.cli.options import SERVER_DEFAULTS
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.plugins.cluster.node import Node
from decathlon_mcp.settings import Settings

RESOURCE = "decathlon"
"""The custom resource of a node with a server: `ray start --resources '{"decathlon": 1}'`."""
MAX_QUEUED_REQUESTS = 4096
"""Starts that may wait for a place; Serve refuses more. Serve counts only starts without a place."""
OTHER_REQUESTS = 8
"""Requests at the same time for each replica that are not episodes."""
START_SECONDS = 120.0
"""Ray starts all nodes at once, and each of them may take back the episodes of a dead server."""
STOP_SECONDS = 30.0
"""How long a server may take to stop, beyond its own drain (`--drain-seconds`)."""
HEALTH_SECONDS = 5.0
FORGET_SECONDS = 4 * HEALTH_SECONDS
"""A node that has not been heard of for so long is not listed any more."""
DIRECTORY = "decathlon-directory"
PR_SET_PDEATHSIG = 1


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, for `serve run MODULE:app [NAME=VALUE ...]` and Serve's own files.

    `nodes`: number of replicas [the nodes with the resource now]. `max_queued_requests`: starts that may wait
    [4096]. `allowed_host`: a name, or a list of names, by which clients may call the cluster and its nodes,
    beside their addresses. Others are the options of `decathlon-mcp serve` by name, with `_` for `-`; what
    they leave unset, the `DECATHLON_*` variables of each node set. Raises SettingsError.
    """
    options = dict(arguments)
    nodes = _count("nodes", options.pop("nodes", None))
    max_queued = _count("max_queued_requests", options.pop("max_queued_requests", MAX_QUEUED_REQUESTS))
    if refused := sorted({"host", "public_url", "ready_file"} & set(options)):
        raise SettingsError(f"{refused[0]}: each node has its own, which its replica sets")
    flags = [part for name, value in options.items() for part in _flag(name, value)]
    settings = _settings(flags)
    if settings.tokens is None:
        raise SettingsError(
            "tokens: the nodes' servers can be reached from other machines; give tokens=FILE, a file that "
            "every node has (`decathlon-mcp token NAME` prints a line for it)"
        )
    deployment = Replica.options(
        num_replicas=nodes or _count_nodes(),
        max_ongoing_requests=settings.max_sandboxes + OTHER_REQUESTS,
        max_queued_requests=max_queued,
        ray_actor_options={"num_cpus": 0, "resources": {RESOURCE: 1}},
    )
    names = options.get("allowed_host", ())
    return deployment.bind(flags, (names,) if isinstance(names, str) else tuple(names))


def _count_nodes() -> int:
    """Raises SettingsError if no node has the resource."""
    count = int(ray.cluster_resources().get(RESOURCE, 0))
    if not count:
        raise SettingsError(
            f"no node of the cluster has the resource {RESOURCE!r}: start those that are to run sandboxes "
            f"with `ray start --resources '{{\"{RESOURCE}\": 1}}'`, or give nodes=N"
        )
    return count


def _flag(name: str, value: object) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    if isinstance(value, (list, tuple)):
        return [part for item in value for part in _flag(name, item)]
    if value is True or value == "true":
        return [flag]
    if value is False or value == "false":
        return []
    return [flag, str(value)]


def _settings(flags: list[str]) -> Settings:
    """The settings of a server with these options. Exits with a message for an invalid option."""
    _, bound, _ = command_line.parse_args(["serve", *flags])
    return bound.arguments.get("settings", SERVER_DEFAULTS)


def _count(name: str, value: object) -> int | None:
    """Raises SettingsError."""
    if value is None:
        return None
    if not str(value).isdecimal() or int(str(value)) < 1:
        raise SettingsError(f"{name}={value}: a number from 1 on is expected")
    return int(str(value))


@ray.remote(num_cpus=0, max_restarts=-1)
class Directory:
    """The URLs of the nodes' servers, as the replicas report them."""

    def __init__(self) -> None:
        self._noted_at: dict[str, float] = {}

    def note(self, url: str) -> None:
        """Note that this server is there."""
        self._noted_at[url] = time.monotonic()

    def nodes(self) -> list[str]:
        """The servers that were noted lately."""
        oldest = time.monotonic() - FORGET_SECONDS
        return sorted(url for url, at in self._noted_at.items() if at >= oldest)


@serve.deployment(name="decathlon", health_check_period_s=HEALTH_SECONDS)
class Replica:
    """One node: its server, and the requests that Serve sends here."""

    def __init__(self, flags: list[str], names: tuple[str, ...]) -> None:
        """`names`: host names of the cluster."""
        self._server = ServerProcess(ray.util.get_node_ip_address(), flags)
        self._node = Node(self._server.url, self._nodes, names)
        self._directory: Any = None

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        return await self._node.answer(request)

    async def check_health(self) -> None:
        """Serve calls this every few seconds, and replaces a replica for which it fails."""
        self._server.check()
        await self._note()

    async def _note(self) -> None:
        """Note this server in the directory, which ends with the replica that has made it."""
        if self._directory is None:
            options = {"name": DIRECTORY, "namespace": DIRECTORY, "get_if_exists": True}
            self._directory = Directory.options(**options).remote()
        try:
            await self._directory.note.remote(self._server.url)
        except RayError:
            self._directory = None  # the next call makes another

    async def _nodes(self) -> list[str]:
        if self._directory is not None:
            with suppress(RayError):
                return await self._directory.nodes.remote()
        return [self._server.url]

    def __del__(self) -> None:
        if hasattr(self, "_server"):
            self._server.stop()


class ServerProcess:
    """A server as a child process, which ends with this one, whatever ends it. `url`: where it serves."""

    def __init__(self, host: str, flags: list[str]) -> None:
        """Start it, and wait until it serves. Raises RuntimeError if it ends instead, or takes too long."""
        self._stop_seconds = _settings(flags).drain_seconds + STOP_SECONDS
        self._folder = tempfile.TemporaryDirectory(prefix="decathlon-node-", ignore_cleanup_errors=True)
        ready = Path(self._folder.name) / "ready"
        port = [] if "--port" in flags else ["--port", "0"]
        command = [sys.executable, "-m", "decathlon_mcp.cli", "serve", "--host", host, *port, *flags]
        self._process = subprocess.Popen(
            [*command, "--ready-file", str(ready)],
            stdin=subprocess.DEVNULL,
            preexec_fn=_end_with_parent,  # noqa: PLW1509  (it only sets an attribute of the process)
        )
        deadline = time.monotonic() + START_SECONDS
        while not (ready.exists() and ready.read_text()):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.stop()
                raise RuntimeError("the node's server did not start; the replica's log says why")
            time.sleep(0.05)
        self.url = ready.read_text().strip()

    def check(self) -> None:
        """Raises RuntimeError if it has ended. After a crash, its supervisor starts it again."""
        if (status := self._process.poll()) is not None:
            raise RuntimeError(f"the node's server has ended with status {status}")

    def stop(self) -> None:
        """Stop it as SIGTERM does: its episodes end, its sandboxes are removed."""
        self._process.terminate()
        try:
            self._process.wait(self._stop_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        finally:
            self._folder.cleanup()


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
