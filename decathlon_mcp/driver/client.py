"""The client of a driver: boots it in an open sandbox and calls its methods.

The driver's source is the first thing sent over its stdin, so that nothing has to be copied or mounted into a
sandbox. Replies are validated: an agent may have taken over the driver in its sandbox.
"""

from __future__ import annotations

import base64
import marshal
import platform
import zlib
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager
from functools import cache, partial
from importlib import resources
from importlib.util import MAGIC_NUMBER
from itertools import islice
from typing import Any, Literal, TypeVar

import anyio
from anyio import aclose_forcefully
from anyio.abc import ByteStream, TaskGroup
from decathlon_sandbox import wire
from pydantic import BaseModel, ConfigDict, ValidationError

from decathlon_mcp.background import Flag, background_tasks
from decathlon_mcp.driver.link import DriverLink, Heartbeat
from decathlon_mcp.driver.mcp_repair import valid_notification
from decathlon_mcp.driver.mcp_schema import LogParams, ProgressParams
from decathlon_mcp.driver.messages import Notification
from decathlon_mcp.driver.pending import NO_SURVIVAL, Request, Survival
from decathlon_mcp.driver.replies import Cut, Reply, read_reply, without_own_keys
from decathlon_mcp.driver.stream import Loss
from decathlon_mcp.driver.tunnels import Dialer
from decathlon_mcp.errors import (
    DecathlonError,
    DriverError,
    ImageError,
    LimitExceededError,
    SandboxLostError,
)
from decathlon_mcp.json_limits import MAX_NODES
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.types import JsonObject, as_json, as_object

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
DEFAULT_REPLY_BYTES = 4 << 20
MAX_TOOLS = 2_000
MAX_TOOL_BYTES = 256 << 10
"""Limits on the tools of one server: their number, and the length of one definition."""
CLEAN_SECONDS = 300.0
"""For a walk over all files of a sandbox; a million take about ten seconds."""


class _Result(BaseModel):
    """A result of the driver's. Members that are not known are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class RunResult(_Result):
    """How a process ended. `stdout` and `stderr` are the ends of its output, `channel` is complete."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    stdout: str
    stderr: str
    channel: str | None = None
    background: int = 0
    """Number of processes that it left running, with `leave`."""


class Moment(_Result):
    """A moment in a sandbox, by two clocks of its kernel."""

    moment_ns: int
    offset_ns: int


class CleanResult(_Result):
    """What changed in a sandbox and was not removed. `paths`: the first 100 of `count`."""

    removed: int
    paths: list[str]
    count: int


class Merging(_Result):
    """What the kernel and the sandbox allow of `merge`: pages are merged, and they are alike."""

    merging: bool
    fixed_addresses: bool


class ServerInfo(_Result):
    """A started MCP server of the task; `tools` are its tool definitions as it sent them."""

    tools: list[dict[str, Any]]


_Kind = TypeVar("_Kind", bound=_Result)


class DriverClient:
    """The methods of a driver. Created by `connect`.

    Every method raises SandboxLostError once the connection has ended, and DriverError with one of the
    wire's reasons if the driver refuses or fails.
    """

    def __init__(self, link: DriverLink, tasks: TaskGroup, *, reply_bytes: int = DEFAULT_REPLY_BYTES) -> None:
        self._link = link
        self._tasks = tasks
        self._reply_bytes = reply_bytes
        self._environment: Mapping[str, str] = {}

    def set_environment(self, variables: Mapping[str, str]) -> None:
        """Environment variables of all programs and servers that are started from now on.

        What a program or a server sets itself has precedence.
        """
        self._environment = dict(variables)

    @property
    def generation(self) -> int:
        """The number of the server process by which the driver knows this one, see `Survival`."""
        return self._link.survival.generation

    @property
    def closed(self) -> Flag:
        """Set once the connection has ended."""
        return self._link.closed

    def on_absent(self, listener: Callable[[float], object]) -> None:
        """Call `listener` while the driver cannot be reached, see `AttachedClock.on_absent`."""
        self._link.stream.clock.on_absent(listener)

    async def closed_error(self) -> SandboxLostError:
        """The error that says why the connection has ended, with the provider's cause if it knows one."""
        return await self._link.closed_error()

    async def arrange(self, *steps: dict[str, Any]) -> None:
        """Make, copy, remove, write or unpack files, or check that names are absent; until one fails."""
        await self._link.request(wire.ARRANGE, {"steps": list(steps)})

    async def pack(self, folder: str, *, max_bytes: int) -> bytes:
        """The tar, of at most `max_bytes`, of the files below a folder; names have no "./".

        Raises DriverError with reason `too_long` if there is more, and `files` for what cannot be packed.
        """
        reply = as_object(await self._link.request(wire.PACK, {"folder": folder, "max_bytes": max_bytes}))
        try:
            return base64.b64decode((reply or {})["tar"], validate=True)
        except (KeyError, TypeError, ValueError):
            raise DriverError(
                "the driver sent an invalid reply: no archive", reason="invalid_reply"
            ) from None

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str,
        timeout_seconds: float,
        env: Mapping[str, str] | None = None,
        inherit: Literal["all", "minimal"] = "all",
        output_bytes: int = 65536,
        channel: bool = False,
        leave: bool = False,
        linger_seconds: float = 0.0,
    ) -> RunResult:
        """Run a process and wait for its end. A missing program is a DriverError with reason `spawn`.

        `leave`: processes that it leaves running continue until the sandbox is frozen or removed;
        `linger_seconds` is the time in which they may end by themselves and are not counted.
        """
        reply = await self._link.request(
            wire.RUN,
            {
                "argv": list(argv),
                "cwd": cwd,
                "env": {**self._environment, **(env or {})},
                "inherit": inherit,
                "timeout_seconds": timeout_seconds,
                "output_bytes": output_bytes,
                "channel": channel,
                "leave": leave,
                "linger_seconds": linger_seconds,
            },
            timeout_seconds=timeout_seconds + linger_seconds + GRACE_SECONDS,
        )
        return _validated(RunResult, reply)

    async def snapshot(self) -> Moment:
        """The present moment in the sandbox, for `clean`."""
        reply = await self._link.request(wire.SNAPSHOT, {})
        return _validated(Moment, (as_object(reply) or {}).get("since"))

    async def clean(
        self, since: Moment, *, under: Sequence[str] | None = None, excepted: Sequence[str] = ()
    ) -> CleanResult:
        """Remove what changed in scratch folders since a moment; the rest of the changes is the result.

        `under`: folders to look in instead of every writable mount. `excepted`: paths that may change, with
        all below them. Raises DriverError with reason `files` if changes cannot be recognized or removed.
        """
        params = {
            "since": since.model_dump(),
            "under": None if under is None else list(under),
            "except": list(excepted),
        }
        reply = await self._link.request(wire.CLEAN, params, timeout_seconds=CLEAN_SECONDS)
        return _validated(CleanResult, reply)

    async def merge(self) -> Merging:
        """Let the kernel merge memory pages of this sandbox with those of others.

        Only for processes that are started after it.
        """
        return _validated(Merging, await self._link.request(wire.MERGE, {}))

    async def define(self, servers: Sequence[Mapping[str, Any]]) -> None:
        """Give the driver the specifications of the task's MCP servers, secrets included; starts none."""
        specs = [{**server, "env": {**self._environment, **server.get("env", {})}} for server in servers]
        await self._link.request(wire.DEFINE, {"servers": specs})

    async def start(
        self, names: Sequence[str], *, deadline_seconds: float, again: bool = False
    ) -> dict[str, ServerInfo]:
        """Make sure that these servers run; returns the tools of those that were started now.

        They must have been defined. A few start at a time, each within `deadline_seconds`. `again`: also
        start one that has ended.

        Raises DriverError with reason `server` and data `about` (`server`, `stderr`) if one does not start or
        has ended, and LimitExceededError for a list of tools over MAX_TOOLS or a definition over
        MAX_TOOL_BYTES; then the servers run.
        """
        reply = await self._link.request(
            wire.START,
            {"names": list(names), "deadline_seconds": deadline_seconds, "again": again},
            timeout_seconds=deadline_seconds * -(-len(names) // wire.STARTS_AT_ONCE) + GRACE_SECONDS,
            max_nodes=MAX_NODES,
        )
        infos = as_object((as_object(reply) or {}).get("servers"))
        if infos is None:
            raise DriverError("the driver sent an invalid reply: no servers", reason="invalid_reply")
        return {name: _checked_tools(name, _validated(ServerInfo, info)) for name, info in infos.items()}

    def new_request_id(self) -> int:
        """The id of a new tool's call."""
        return self._link.new_id()

    def tool_call(
        self,
        request_id: int,
        server: str,
        params: JsonObject,
        *,
        cut: Cut | None,
        on_outcome: Callable[[Reply | DecathlonError | None], object],
        on_notification: Callable[[Notification], object],
    ) -> Request:
        """The request for a tool's call, for `send_now` or `send`.

        `request_id`: a new one, or that of a call which an earlier server process has sent: the driver runs
        it only if it did not get it before. `params` may contain `msgspec.Raw`. `on_outcome`: called once,
        with the reply or with the error, before the driver may forget the reply; with None if the connection
        has ended. Members of the reply's `_meta` that look like this server's own are removed; nothing else
        is changed, unless `cut` makes the driver shorten the result. Errors are CallTimeoutError,
        DriverError, and LimitExceededError for a reply that is too long, too deep or has too many values.
        `on_notification`: see `relayed_notification`.
        """

        def settle(outcome: Reply | DecathlonError | None) -> None:
            on_outcome(self._translated(outcome) if isinstance(outcome, DriverError) else outcome)

        read = partial(read_reply, server=server, limit_bytes=self._reply_bytes)
        call: JsonObject = {
            "server": server,
            "method": "tools/call",
            "params": params,
            "timeout_seconds": None,
            "max_bytes": self._reply_bytes,
            **({} if cut is None else {"cut": cut.to_json()}),
        }
        return Request(request_id, wire.CALL, call, read, settle, on_notification)

    def send_now(self, call: Request) -> bool:
        """Send a tool's call, if that is possible without waiting."""
        return self._link.send_now(call)

    async def send(self, call: Request) -> None:
        """Send a tool's call. Raises LimitExceededError, SandboxLostError; then it has no outcome."""
        await self._link.send(call)

    def cancel(self, request_id: int) -> None:
        """Cancel a tool's call in the sandbox, if it has no outcome yet. It will have none."""
        self._link.cancel(request_id)

    def _translated(self, error: DriverError) -> DecathlonError:
        """LimitExceededError if the driver has refused a reply because of its length; else the error."""
        if error.data.get("reason") == "too_long":
            return LimitExceededError(error.message, limit_bytes=self._reply_bytes)
        return error

    def on_tools_changed(self, changed: Callable[[str], object]) -> None:
        """Call this with the name of each server that announces other tools."""
        self._link.on_tools_changed = changed

    async def freeze(self, *, spare: Sequence[str] = ()) -> dict[str, str]:
        """Kill every process of the sandbox except the driver; no server can be started or called again.

        `spare`: patterns of command lines whose processes are not killed, such as `kubectl port-forward*`.
        Returns the end of what each server wrote to stderr, by the server's name, if it wrote anything.
        """
        result = await self._link.request(wire.FREEZE, {"spare": list(spare)}, timeout_seconds=FREEZE_SECONDS)
        logs = islice((as_object(result.get("stderr")) or {}).items(), MAX_SERVER_LOGS)
        return {name[:100]: text[-MAX_LOG_CHARACTERS:] for name, text in logs if isinstance(text, str)}

    async def forward(self, targets: Mapping[int, Dialer]) -> None:
        """Forward these ports of the sandbox's loopback to the targets.

        Raises DriverError with reason `network` if a port is taken.
        """
        self._link.tunnels.forward(targets, self._tasks)
        await self._link.request(wire.FORWARD, {"ports": [*targets]})

    async def resolve(self) -> None:
        """Let every host name lead to the sandbox's loopback, for programs that ask its port 53.

        Raises DriverError with reason `network` if the driver may not listen there.
        """
        await self._link.request(wire.RESOLVE, {})

    async def dial(self, port: int) -> ByteStream:
        """Connect to a port of the sandbox's loopback.

        Raises DriverError with reason `network` if nothing listens there.
        """
        tunnel = self._link.tunnels.create()
        try:
            await self._link.request(wire.DIAL, {"port": port, "conn": tunnel.number})
        except BaseException:
            await aclose_forcefully(tunnel)
            raise
        return tunnel

    def quiet(self) -> AbstractContextManager[None]:
        """Send the driver nothing in the body, see `DriverStream.quiet`."""
        return self._link.stream.quiet()

    async def ping(self, *, saving: bool = False) -> None:
        """Renew the driver's lease. Raises CallTimeoutError if it does not answer.

        `saving`: the sandbox is about to be saved, and all that was sent before has arrived.
        """
        params = {"saving": True} if saving else {}
        await self._link.request(wire.PING, params, timeout_seconds=wire.LEASE_SECONDS)


@asynccontextmanager
async def connect(
    sandbox: Sandbox,
    *,
    reply_bytes: int = DEFAULT_REPLY_BYTES,
    survival: Survival = NO_SURVIVAL,
    reattached: bool = False,
    unanswered: Collection[int] = (),
) -> AsyncGenerator[DriverClient]:
    """Boot the driver of an open sandbox and keep the connection to it.

    `reply_bytes`: longest reply of a tool call. `survival`: whether the driver waits for another server
    process when it has lost this one, and whether this process opens a lost stream again. `reattached`: the
    driver runs already, since an earlier server process; `unanswered` has the ids of its calls that will be
    sent again under these ids. Replies to other requests of that process are
    ignored, but nothing else ends because of the change, except for tunnels.

    Yields at once: requests wait until the driver is up. If it never comes up, requests raise ImageError if
    the sandbox's Python cannot run the driver, else SandboxLostError. With `merge_pages` it sends the first
    request itself.
    """

    async def describe_loss(loss: Loss) -> SandboxLostError:
        cause = await sandbox.cause_of_end() or loss.cause
        # The engine is asked as well: one that does not answer would explain a silent driver.
        is_at_fault = loss.by_driver and cause is None and await sandbox.is_running()
        reason = loss.reason or "the sandbox's first process ended"
        return SandboxLostError(
            f"sandbox lost: {reason}{f' ({cause})' if cause else ''}",
            cause=cause,
            **({"running": True} if is_at_fault else {}),
        )

    max_read_bytes = max(wire.MAX_RESPONSE_BYTES, reply_bytes + wire.RESPONSE_MARGIN_BYTES)
    async with background_tasks() as tasks:
        link = DriverLink(
            sandbox,
            describe_loss,
            max_read_bytes=max_read_bytes,
            survival=survival,
            reattached=reattached,
            unanswered=unanswered,
        )
        driver = DriverClient(link, tasks, reply_bytes=reply_bytes)
        heartbeat = Heartbeat(link, boot_seconds=None if reattached else BOOT_SECONDS)
        tasks.start_soon(link.run)
        try:
            if not reattached:
                await link.send_bytes(boot_message())
            link.stream.attach()
            heartbeat.start()
            if sandbox.spec.merge_pages and not reattached:
                # Before anything can start a server.
                await driver.merge()
            yield driver
        except DecathlonError:
            # A failed write can be noticed before the end of the stream, which says why.
            with anyio.move_on_after(LOSS_SECONDS):
                await link.ready_or_closed.wait()
            if link.closed.is_set() and not link.stream.was_attached:
                raise await _boot_error(sandbox, link) from None
            raise
        finally:
            heartbeat.stop()
            link.close("the episode ended")


@cache
def boot_message() -> bytes:
    """The driver: a line with a number of bytes, then a dictionary of its modules, by `marshal`.

    Compiled too, for sandboxes whose Python has this process's bytecode.
    """
    package = resources.files("decathlon_sandbox")
    sources = {
        "decathlon_sandbox" if (stem := file.name[:-3]) == "__init__" else f"decathlon_sandbox.{stem}": (
            file.read_bytes()
        )
        for file in package.iterdir()
        if file.name.endswith(".py")
    }
    compiled = {
        f"{name} {MAGIC_NUMBER.hex()}": zlib.compress(
            marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=0))
        )
        for name, source in sources.items()
    }
    body = marshal.dumps({**sources, **compiled}, MARSHAL_VERSION)
    return b"%d\n%s" % (len(body), body)


async def _boot_error(sandbox: Sandbox, link: DriverLink) -> ImageError | SandboxLostError:
    """The error for a driver that never came up; the loader's own complaints are about the image."""
    log = sandbox.log_tail.strip()
    image = sandbox.spec.image or f"this machine ({platform.node()})"
    if "decathlon: this Python lacks" in log or "decathlon: Python 3.10" in log:
        return ImageError(f"{image} cannot run the driver: {log.rpartition('decathlon: ')[2]}", image=image)
    error = await link.closed_error()
    return SandboxLostError(
        f"{error.message}; its stderr ends with: {log[-500:] or '(nothing)'}", booted=False, **error.data
    )


def _validated(kind: type[_Kind], reply: Any) -> _Kind:
    try:
        return kind.model_validate(reply)
    except ValidationError as error:
        raise DriverError(
            f"the driver sent an invalid reply: {error.error_count()} errors", reason="invalid_reply"
        ) from None


def relayed_notification(notification: Notification) -> tuple[bool, JsonObject] | None:
    """Whether a call's notification is progress (else a log message), and its params for the client.

    What MCP does not allow in them is left out, and keys that look like this server's own. None if a required
    one is faulty.
    """
    is_progress = notification.method == wire.PROGRESS
    params = notification.decoded()
    if params is not None:
        params = valid_notification(params, ProgressParams if is_progress else LogParams)
    return None if params is None else (is_progress, without_own_keys(params))


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
    return ServerInfo(tools=[without_own_keys(tool) for tool in by_name.values()])
