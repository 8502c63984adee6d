"""The client of a driver: boots it in an open sandbox and calls its methods.

The driver's source is the first thing sent over its stdin, so that nothing has to be copied or mounted into a
sandbox. Replies are validated: an agent may have taken over the driver in its sandbox.
"""

from __future__ import annotations

import marshal
import platform
import zlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from importlib import resources
from importlib.util import MAGIC_NUMBER
from itertools import islice
from types import MappingProxyType
from typing import Any

import anyio
import msgspec
from decathlon_sandbox import wire

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver.driver_messages import Notification
from decathlon_mcp.driver.link import DriverLink, Heartbeat
from decathlon_mcp.driver.replies import REPLY_BYTES, Reply, Truncation, read_reply, without_own_meta
from decathlon_mcp.driver.stream import NO_RECONNECTION, ReconnectPolicy
from decathlon_mcp.errors import (
    DecathlonError,
    ImageError,
    LimitExceededError,
    SandboxLostError,
)
from decathlon_mcp.hooks import plugins
from decathlon_mcp.json_limits import MAX_NODES
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.types import JsonObject, as_json

BOOT_COMMAND = wire.BOOT_COMMAND
BOOT_SECONDS = 60.0
LOSS_SECONDS = 2.0
"""How long a request that fails during boot waits for the news that the driver has ended."""
MARSHAL_VERSION = 2
"""Of the modules that are sent; every Python reads it."""
GRACE_SECONDS = 10.0
"""Time beyond the driver's own deadline in which its reply may still arrive."""
FREEZE_SECONDS = 60.0
MAX_SERVER_LOGS, MAX_LOG_CHARACTERS = 64, 8192
"""Of what servers wrote to stderr: of how many, and of each."""
"""For the end of all servers and processes, to which the driver gives some 25 s. An attempt whose driver does
not answer in time is forfeited, so that there is room for a busy machine."""
MAX_TOOLS = 2_000
MAX_TOOL_BYTES = 256 << 10
"""Limits on the tools of one server: their number, and the length of one definition."""
CLEAN_SECONDS = 300.0
"""For a walk over all files of a sandbox; a million take about ten seconds."""


class _Moment(msgspec.Struct):
    since: JsonObject


class _Frozen(msgspec.Struct):
    stderr: JsonObject = {}


class RunResult(msgspec.Struct, frozen=True):
    """How a process ended."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    stdout: str
    """The end of its output, as is `stderr`."""
    stderr: str
    channel: str | None = None
    """All that it wrote to the channel; None without a channel."""
    background: int = 0
    """Number of processes that it left running, with `leave`."""


class CleanResult(msgspec.Struct, frozen=True):
    """What changed in a sandbox and was not removed. `paths`: the first 100 of `count`."""

    removed: int
    paths: list[str]
    count: int


class ServerInfo(msgspec.Struct, frozen=True):
    """A started MCP server of the task; `tools` are its tool definitions as it sent them."""

    tools: list[JsonObject]


class _Started(msgspec.Struct):
    servers: dict[str, ServerInfo]


class DriverClient(DriverLink):
    """The methods of the driver of a sandbox. Created by `connect`.

    Every method raises SandboxLostError once the connection has ended, and DriverError with one of the
    wire's reasons if the driver refuses or fails.
    """

    _environment: Mapping[str, str] = MappingProxyType({})

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Environment variables of all programs and servers that are started from now on.

        What a program or a server sets itself has precedence.
        """
        self._environment = dict(variables)

    async def arrange(self, *steps: dict[str, Any]) -> None:
        """Make, copy, remove, write or unpack files, or check that names are absent; until one fails."""
        await self.request(wire.ARRANGE, {"steps": list(steps)})

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        timeout_seconds: float,
        env: Mapping[str, str] | None = None,
        output_bytes: int = 65536,
        channel: bool = False,
        leave: bool = False,
        linger_seconds: float = 0.0,
    ) -> RunResult:
        """Run a process and wait for its end. A missing program is a DriverError with reason `spawn`.

        `leave`: processes that it leaves running continue until the sandbox is frozen or removed;
        `linger_seconds` is the time in which they may end by themselves and are not counted.
        """
        return await self.request(
            wire.RUN,
            {
                "argv": list(argv),
                "cwd": cwd,
                "env": {**self._environment, **(env or {})},
                "timeout_seconds": timeout_seconds,
                "output_bytes": output_bytes,
                "channel": channel,
                "leave": leave,
                "linger_seconds": linger_seconds,
            },
            kind=RunResult,
            timeout_seconds=timeout_seconds + linger_seconds + GRACE_SECONDS,
        )

    async def snapshot(self) -> JsonObject:
        """The present moment in the sandbox, for `clean`, by two clocks of its kernel."""
        return (await self.request(wire.SNAPSHOT, {}, kind=_Moment)).since

    async def clean(
        self, since: JsonObject, *, under: Sequence[str] | None = None, excepted: Sequence[str] = ()
    ) -> CleanResult:
        """Remove what changed in scratch folders since a moment; the rest of the changes is the result.

        `under`: folders to look in instead of every writable mount. `excepted`: paths that may change, with
        all below them. Raises DriverError with reason `files` if changes cannot be recognized or removed.
        """
        folders = None if under is None else list(under)
        params = {"since": since, "under": folders, "except": list(excepted)}
        return await self.request(wire.CLEAN, params, kind=CleanResult, timeout_seconds=CLEAN_SECONDS)

    async def define(self, servers: Sequence[Mapping[str, Any]]) -> None:
        """Give the driver the specifications of the task's MCP servers, secrets included; starts none."""
        specs = [{**server, "env": {**self._environment, **server.get("env", {})}} for server in servers]
        await self.request(wire.DEFINE, {"servers": specs})

    async def start(
        self, names: Sequence[str], *, deadline_seconds: float, again: bool = False
    ) -> dict[str, ServerInfo]:
        """Make sure that these servers run; returns the tools of the servers that were started now.

        They must have been defined. A few start at a time, each within `deadline_seconds`. `again`: also
        start a server that has ended.

        Raises DriverError with reason `server` and data `about` (`server`, `stderr`) if one does not start or
        has ended, and LimitExceededError for a list of tools over MAX_TOOLS or a definition over
        MAX_TOOL_BYTES; then the servers run.
        """
        reply = await self.request(
            wire.START,
            {"names": list(names), "deadline_seconds": deadline_seconds, "again": again},
            kind=_Started,
            timeout_seconds=deadline_seconds * -(-len(names) // wire.STARTS_AT_ONCE) + GRACE_SECONDS,
            max_nodes=MAX_NODES,
        )
        return {name: _checked_tools(name, info) for name, info in reply.servers.items()}

    def call(
        self,
        request_id: int,
        server: str,
        params: JsonObject,
        *,
        truncation: Truncation | None,
        on_outcome: Callable[[Reply | DecathlonError | None], object],
        on_notification: Callable[[Notification], object],
    ) -> None:
        """Call a tool of a server.

        `request_id`: a new id, or the id of a call which an earlier server process has sent: the driver runs
        it only if it did not get it before. `params` may contain `msgspec.Raw`. `on_outcome`: called once,
        with the reply or with the error, before the driver may forget the reply; with None if the connection
        has ended. Members of the reply's `_meta` that look like this server's own are removed; nothing else
        is changed, unless `truncation` makes the driver shorten the result. Errors are CallTimeoutError,
        DriverError, and LimitExceededError for a reply that is too long, too deep or has too many values.
        `on_notification`: see `relayed_notification`.
        """

        call: JsonObject = {
            "server": server,
            "params": params,
            "max_bytes": REPLY_BYTES,
            **({} if truncation is None else {"cut": truncation.to_json()}),
        }
        read = partial(read_reply, server=server)
        self.send(request_id, wire.CALL, call, read, on_outcome, on_notification)

    async def freeze(self, *, spare: Sequence[str] = ()) -> dict[str, str]:
        """Kill every process of the sandbox except the driver; no server can be started or called again.

        `spare`: patterns of command lines whose processes are not killed, such as `kubectl port-forward*`.
        Returns the end of what each server wrote to stderr, by the server's name, if it wrote anything.
        """
        params = {"spare": list(spare)}
        frozen = await self.request(wire.FREEZE, params, kind=_Frozen, timeout_seconds=FREEZE_SECONDS)
        logs = islice(frozen.stderr.items(), MAX_SERVER_LOGS)
        return {name[:100]: text[-MAX_LOG_CHARACTERS:] for name, text in logs if isinstance(text, str)}

    async def ping(self, *, saving: bool = False) -> None:
        """Renew the driver's lease. Raises CallTimeoutError if it does not answer.

        `saving`: the sandbox is about to be saved, and all that was sent before has arrived.
        """
        params = {"saving": True} if saving else {}
        await self.request(wire.PING, params, timeout_seconds=wire.LEASE_SECONDS)


@asynccontextmanager
async def connect(
    sandbox: Sandbox,
    *,
    reconnect: ReconnectPolicy = NO_RECONNECTION,
    reattached: bool = False,
    unanswered: Collection[int] = (),
) -> AsyncGenerator[DriverClient]:
    """Boot the driver of an open sandbox and keep the connection to it.

    `reconnect`: whether the driver waits for another server process when it has lost this one, and whether
    this process opens a lost stream again. `reattached`: the driver runs already, since an earlier server
    process; nothing ends because of the change, except for tunnels. `unanswered`: as for `DriverLink`.

    Yields at once: requests wait until the driver is up. If it never comes up, requests raise ImageError if
    the sandbox's Python cannot run the driver, else SandboxLostError. With `merge_pages` it sends the first
    request itself.
    """
    async with background_tasks() as tasks:
        driver = DriverClient(sandbox, reconnect=reconnect, reattached=reattached, unanswered=unanswered)
        heartbeat = Heartbeat(driver, boot_seconds=None if reattached else BOOT_SECONDS)
        tasks.start_soon(driver.receive)
        try:
            if not reattached:
                await driver.send_bytes(boot_message())
            driver.attach()
            if sandbox.spec.merge_pages and not reattached:
                # Before anything can start a server.
                await driver.request(wire.MERGE, {})
            yield driver
        except DecathlonError:
            # A failed write can be noticed before the end of the stream, which says why.
            with anyio.move_on_after(LOSS_SECONDS):
                await driver.ready_or_closed.wait()
            if driver.closed.is_set() and not driver.was_attached:
                raise await _boot_error(sandbox, driver) from None
            raise
        finally:
            heartbeat.stop()
            driver.close("the episode ended")


@cache
def boot_message() -> bytes:
    """The driver: a line with a number of bytes, then a dictionary of its modules, by `marshal`.

    Plug-ins add modules. Compiled too, for sandboxes whose Python has this process's bytecode.
    """
    package = resources.files("decathlon_sandbox")
    sources = {
        "decathlon_sandbox" if (stem := file.name[:-3]) == "__init__" else f"decathlon_sandbox.{stem}": (
            file.read_bytes()
        )
        for file in package.iterdir()
        if file.name.endswith(".py")
    }
    for name, part in (pair for plugin in plugins() for pair in plugin.driver.items()):
        folder, _, file = part.partition(":")
        sources[f"decathlon_sandbox.{name}"] = resources.files(folder).joinpath(file).read_bytes()
    compiled = {
        f"{name} {MAGIC_NUMBER.hex()}": zlib.compress(
            marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=0))
        )
        for name, source in sources.items()
    }
    body = marshal.dumps({**sources, **compiled}, MARSHAL_VERSION)
    return b"%d\n%s" % (len(body), body)


async def _boot_error(sandbox: Sandbox, driver: DriverClient) -> ImageError | SandboxLostError:
    """The error for a driver that never came up; the loader's own complaints are about the image."""
    log = sandbox.log_tail.strip()
    image = sandbox.spec.image or f"this machine ({platform.node()})"
    if "decathlon: this Python lacks" in log or "decathlon: Python 3.10" in log:
        return ImageError(f"{image} cannot run the driver: {log.rpartition('decathlon: ')[2]}", image=image)
    error = await driver.closed_error()
    return SandboxLostError(
        f"{error.message}; its stderr ends with: {log[-500:] or '(nothing)'}", booted=False, **error.data
    )


def _checked_tools(server: str, info: ServerInfo) -> ServerInfo:
    """A server's tools without keys that look like our own, each name once. Raises LimitExceededError."""
    if len(info.tools) > MAX_TOOLS:
        raise LimitExceededError(
            f"server {server} lists {len(info.tools)} tools, more than the limit of {MAX_TOOLS}"
        )
    for tool in info.tools:
        if (size := len(as_json(tool))) > MAX_TOOL_BYTES:
            name = str(tool.get("name"))[:200]
            raise LimitExceededError(
                f"the definition of server {server}'s tool {name} has {size} bytes, more than the limit of "
                f"{MAX_TOOL_BYTES}"
            )
    # A server can list a name twice, or repeat its one page. The SDKs keep what they know of a tool by its
    # name, so the last definition counts; the server itself decides which of the two a call reaches.
    by_name = {str(tool.get("name")): tool for tool in info.tools}
    return ServerInfo(tools=[without_own_meta(tool) for tool in by_name.values()])
