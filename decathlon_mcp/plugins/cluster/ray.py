"""Servers on all nodes of a Ray cluster: `serve run decathlon_mcp.plugins.cluster.ray:app`. Requires `[ray]`.

Ray Serve places one replica on each node with the resource `decathlon`. A replica runs the node's server as a
child process, and passes `POST /episodes` to it (`node.py`): an episode is one request through Serve,
whose response stays open as long as the episode. Everything else goes from the client to the node directly.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import ray
from decathlon_client.local_server import ChildServer, options
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
HEALTH_SECONDS = 5.0
FORGET_SECONDS = 4 * HEALTH_SECONDS
"""A node that has not been heard of for so long is not listed any more."""
DIRECTORY = "decathlon-directory"


def app(arguments: Mapping[str, Any]) -> serve.Application:
    """The application, for `serve run MODULE:app [NAME=VALUE ...]` and Serve's own files.

    `nodes`: number of replicas [the nodes with the resource now]. `max_queued_requests`: starts that may wait
    [4096]. `allowed_host`: a name, or a list of names, by which clients may call the cluster and its nodes,
    beside their addresses. Others are the options of `decathlon-mcp serve` by name, with `_` for `-`; what
    they leave unset, the `DECATHLON_*` variables of each node set. Raises SettingsError.
    """
    # Serve's command line has text only. A flag that is false is left out.
    given = {name: value in ("true", "True") or value for name, value in arguments.items()}
    given = {name: value for name, value in given.items() if str(value) not in ("False", "false")}
    nodes = _count("nodes", given.pop("nodes", None))
    max_queued = _count("max_queued_requests", given.pop("max_queued_requests", MAX_QUEUED_REQUESTS))
    if refused := sorted({"host", "public_url", "ready_file"} & set(given)):
        raise SettingsError(f"{refused[0]}: each node has its own, which its replica sets")
    settings = _settings(given)
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
    names = given.get("allowed_host", ())
    return deployment.bind(given, (names,) if isinstance(names, str) else tuple(names))


def _count_nodes() -> int:
    """Raises SettingsError if no node has the resource."""
    count = int(ray.cluster_resources().get(RESOURCE, 0))
    if not count:
        raise SettingsError(
            f"no node of the cluster has the resource {RESOURCE!r}: start those that are to run sandboxes "
            f"with `ray start --resources '{{\"{RESOURCE}\": 1}}'`, or give nodes=N"
        )
    return count


def _settings(given: Mapping[str, Any]) -> Settings:
    """The settings of a server with these options. Exits with a message for an invalid option."""
    _, bound, _ = command_line.parse_args(["serve", *options((), given)])
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

    def __init__(self, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
        """`given`: options of `serve`. `names`: host names of the cluster. Raises ClientError."""
        command = [sys.executable, "-m", "decathlon_mcp.cli"]
        own = {"host": ray.util.get_node_ip_address(), "drain_seconds": _settings(given).drain_seconds}
        self._server = ChildServer(command, (), {**given, **own}, shares_stderr=True)
        self._node = Node(self._server.start(), self._nodes, names)
        self._directory: Any = None

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        return await self._node.answer(request)

    async def check_health(self) -> None:
        """Serve calls this every few seconds, and replaces a replica for which it fails."""
        # After a crash, its supervisor starts the server again.
        if (status := self._server.status) is not None:
            raise RuntimeError(f"the node's server has ended with status {status}")
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
            self._server.close()
