"""First processes of fake sandboxes: a driver with configurable faults, and the probe of `conformance`."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, cast

import anyio
from anyio import CancelScope
from anyio.abc import ByteStream, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_sandbox import wire
from decathlon_sandbox.driver_requests import Request, RequestError
from decathlon_sandbox.strict_json import encode
from decathlon_sandbox.truncation import cut, shorten

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.sandboxes.capabilities import Usage
from tests.fakes.driver_end import DriverEnd
from tests.fakes.tree import Tree

Json = dict[str, Any]


class ProcessExit(Exception):  # noqa: N818  (like SystemExit: an event, not an error of the code that raises it)
    """Raised by a test's tool or `run` to end the sandbox's first process at once."""

    def __init__(self, exit_code: int = 137, *, out_of_memory: bool = False) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
        self.out_of_memory = out_of_memory


@dataclass(frozen=True, slots=True)
class Faults:
    """Faults of one sandbox; none by default. Methods have their names on the wire (`run`, `call`, ...)."""

    open_seconds: float = 0.0
    """Time that it takes to open the sandbox."""
    open_error: DecathlonError | None = None
    dies_on: str | None = None
    """The first process ends with exit code 137 when this method is requested."""
    silent_on: str | None = None
    """Requests of this method get no response."""
    servers_that_fail: Mapping[str, str] = field(default_factory=dict[str, str])
    """Servers that do not start, with the end of their stderr."""
    snapshot_error: DecathlonError | None = None
    """Saving the sandbox fails."""
    put_error: Exception | None = None
    get_error: Exception | None = None
    pause_error: Exception | None = None
    """These methods of the sandbox fail."""
    usage: Usage = field(default_factory=Usage)
    """What it uses of its share."""


class ToolError(Exception):
    """Raised by a test's tool to reply with this JSON-RPC error."""

    def __init__(self, message: str, code: int = -32602) -> None:
        super().__init__(message)
        self.error = {"code": code, "message": message}


@dataclass(frozen=True, slots=True)
class FakeCall:
    """One call of a test's tool: its arguments, and methods that send notifications."""

    arguments: Json
    params: Json
    tree: Tree
    _notify: Callable[[str, Json], Awaitable[None]]

    async def progress(self, progress: float) -> None:
        await self._notify(wire.PROGRESS, {"progressToken": 0, "progress": progress})

    async def log(self, data: Any, level: str = "info") -> None:
        await self._notify(wire.MESSAGE, {"level": level, "data": data})


Reply = str | Json
"""A tool's result: its text, or the whole result as MCP defines it."""
Handler = Callable[[FakeCall], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class FakeTool:
    """A tool with an input schema."""

    handler: Handler
    schema: Json = field(default_factory=lambda: {"type": "object"})


Tools = Mapping[str, Mapping[str, Handler | FakeTool]]
"""Handlers by server and tool name."""


@dataclass(frozen=True, slots=True)
class FakeRun:
    """A request to run a process, as a test's `run` receives it."""

    argv: tuple[str, ...]
    cwd: str
    tree: Tree
    leave: bool
    """Whether what the process has started goes on after its end."""


@dataclass(frozen=True, slots=True)
class RunReply:
    exit_code: int = 0
    stdout: str = ""
    stderr: str = ""
    channel: str | None = None
    timed_out: bool = False
    background: int = 0
    """Number of processes left running; only kept if the request says so."""


Run = Callable[[FakeRun], "int | RunReply | Awaitable[int | RunReply]"]


class FakeDriver:
    """A driver from boot to the end of its stream. A test provides its tools and processes as callables.

    `stream` can lose bytes, but ends only if no server will come any more. `on_start` is called with the
    name of each server whose start is tried. `servers`: those of the sandbox of which it is a copy.
    """

    def __init__(
        self,
        stream: ByteStream,
        tree: Tree,
        *,
        tools: Tools,
        run: Run,
        faults: Faults,
        on_start: Callable[[str], object],
        servers: dict[str, bool] | None = None,
    ) -> None:
        self._is_copy = servers is not None
        self._stream = stream
        self._tree = tree
        self._tools = tools
        self._process_handler = run
        self._faults = faults
        self._on_start = on_start
        self._send_lock = anyio.Lock()
        self._end = DriverEnd(lambda request: self._tasks.start_soon(self._answer, request))
        self._tasks: TaskGroup
        self._running: set[CancelScope] = set()
        self.servers = dict(servers or {})
        """The servers that are defined, and whether they run."""
        self._frozen = False
        self.merges = False
        """Whether the server asked to merge memory."""
        self._exit = ProcessExit(0)
        self._scope = CancelScope()

    async def run(self) -> ProcessExit:
        """Run until the stream ends or the process dies; returns the exit."""
        with self._scope:
            async with background_tasks() as self._tasks:
                with suppress(
                    anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, TimeoutError
                ):
                    await self._serve()
        return self._exit

    async def _serve(self) -> None:
        reader = BufferedByteReceiveStream(self._stream)
        if not self._is_copy:
            size = int(await reader.receive_until(b"\n", 32))
            await reader.receive_exactly(size)
        deadline = anyio.current_time() + wire.LEASE_SECONDS
        while True:
            with anyio.fail_after(deadline - anyio.current_time()):
                data = await reader.receive()
            self._end.receive(data)
            if self._end.has_heard:
                deadline = anyio.current_time() + (self._end.survive_seconds or wire.LEASE_SECONDS)
            await self._flush()

    async def _answer(self, request: Request) -> None:
        if request.method == self._faults.silent_on:
            return
        with CancelScope() as scope:
            self._running.add(scope)
            request.on_cancel = scope.cancel
            try:
                if request.method == self._faults.dies_on:
                    raise ProcessExit
                await self._reply(request)
            except RequestError as error:
                request.fail(error)
            except ProcessExit as process_exit:
                self._exit = process_exit
                self._scope.cancel()
                await anyio.sleep_forever()
            finally:
                self._running.remove(scope)
        # Unless it has its reply:
        frozen = self._frozen and request.method == wire.CALL
        request.fail(RequestError(wire.FROZEN if frozen else wire.CANCELLED, "cancelled"))
        await self._flush()

    async def _reply(self, request: Request) -> None:
        params: Json = request.params
        result: Json
        match request.method:
            case wire.CALL:
                await self._call(request)
                return
            case wire.RUN:
                result = await self._run_process(params)
            case wire.START:
                result = self._start(params)
            case wire.ARRANGE:
                self._tree.arrange(params["steps"])
                result = {}
            case wire.PACK:
                result = {"tar": self._tree.pack(params["folder"], params["max_bytes"])}
            case wire.SNAPSHOT:
                self._tree.mark()
                result = {"since": {"moment_ns": 0, "offset_ns": 0}}
            case wire.CLEAN:
                paths = self._tree.clean(params["except"])
                result = {"removed": 0, "paths": paths[:100], "count": len(paths)}
            case wire.MERGE:
                self.merges = True
                result = {}
            case wire.DEFINE:
                for server in params["servers"]:
                    self.servers.setdefault(server["name"], False)
                result = {}
            case wire.FREEZE:
                self._frozen = True
                for scope in self._running:
                    scope.cancel()
                result = {"stderr": {}}
            case wire.PING:
                result = {}
            case method:
                raise RequestError(wire.UNKNOWN_METHOD, f"no method {method!r}")
        request.reply(result)

    async def _run_process(self, params: Json) -> Json:
        leave = bool(params.get("leave"))
        request = FakeRun(tuple(params["argv"]), params["cwd"], self._tree, leave)
        try:
            result = self._process_handler(request)
            reply = await result if inspect.isawaitable(result) else result
        except FileNotFoundError as error:
            raise RequestError(wire.SPAWN, f"no program {error}") from error
        reply = RunReply(reply) if isinstance(reply, int) else reply
        return {
            **asdict(reply),
            "exit_code": None if reply.timed_out else reply.exit_code,
            "signal": 9 if reply.timed_out else None,
            "background": reply.background if leave else 0,
        }

    def _start(self, params: Json) -> Json:
        if self._frozen:
            raise RequestError(wire.FROZEN, "frozen")
        names: list[str] = [name for name in params["names"] if not self.servers[name]]
        for name in names:
            self._on_start(name)
            stderr = self._faults.servers_that_fail.get(name)
            if stderr is None and name not in self._tools:
                stderr = f"no server {name!r} in this test"
            if stderr is not None:
                data = {"server": name, "stderr": stderr, "exit_code": 1}
                raise RequestError(wire.SERVER, f"server {name} did not come up", data)
        self.servers.update(dict.fromkeys(names, True))
        return {"servers": {name: {"tools": _definitions(self._tools[name])} for name in names}}

    async def _call(self, request: Request) -> None:
        """Reply as `server` does, cut and limited."""
        params, server = request.params, request.params["server"]
        if self._frozen:
            raise RequestError(wire.FROZEN, "frozen")
        if not self.servers.get(server):
            raise RequestError(wire.SERVER, f"no server {server!r} is up", {"server": server})
        relayed = await self._call_tool(request.id, server, params["params"])
        overlong, options = None, params.get("cut")
        if options is not None and isinstance(result := relayed.get("result"), dict):
            folder, characters = options.get("folder"), options["characters"]
            text = cast("Json", result)
            shortened = shorten(text, characters) if folder is None else cut(text, folder, characters)
            if shortened is not None:
                if shortened.path is not None and shortened.full_text is not None:
                    self._tree.write(shortened.path, shortened.full_text)
                relayed = {**relayed, "result": shortened.result}
                overlong = encode({"path": shortened.path, "characters": shortened.characters})
        reply, limit = encode(relayed), params.get("max_bytes", wire.MAX_RESPONSE_BYTES)
        if len(reply) > limit:
            message = f"the reply has {len(reply)} bytes, more than the limit of {limit} bytes"
            raise RequestError(wire.TOO_LONG, message)
        request.reply_encoded(reply, overlong)

    async def _call_tool(self, request_id: int, server: str, params: Json) -> Json:
        name = params["name"]
        tool = self._tools[server].get(name)
        if tool is None:
            return {"error": {"code": -32602, "message": f"Unknown tool: {name}"}}

        async def notify(method: str, notification: Json) -> None:
            origin = {"server": server} if method == wire.MESSAGE else {}
            about = {"id": request_id, **origin, "params": notification}
            self._end.notify(encode({"jsonrpc": "2.0", "method": method, "params": about}))
            await self._flush()

        call = FakeCall(params.get("arguments") or {}, params, self._tree, notify)
        handler = tool.handler if isinstance(tool, FakeTool) else tool
        try:
            reply = await handler(call)
        except ToolError as error:
            return {"error": error.error}
        result = {"content": [{"type": "text", "text": reply}]} if isinstance(reply, str) else reply
        return {"jsonrpc": "2.0", "id": request_id, "result": result}

    async def _flush(self) -> None:
        async with self._send_lock:
            try:
                while data := self._end.data_to_send():
                    await self._stream.send(data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self._scope.cancel()


def _definitions(tools: Mapping[str, Handler | FakeTool]) -> list[Json]:
    described = {name: tool if isinstance(tool, FakeTool) else FakeTool(tool) for name, tool in tools.items()}
    return [
        {"name": name, "description": inspect.getdoc(tool.handler) or name, "inputSchema": tool.schema}
        for name, tool in described.items()
    ]


class FakeProbe:
    """Answers as `conformance.PROBE_COMMAND` does."""

    def __init__(self, stream: ByteStream, tree: Tree) -> None:
        self._stream = stream
        self._tree = tree

    async def run(self) -> ProcessExit:
        reader = BufferedByteReceiveStream(self._stream)
        with suppress(anyio.IncompleteRead, anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                try:
                    request: Json = json.loads(await reader.receive_until(b"\n", wire.MAX_LINE_BYTES))
                except ValueError:
                    continue
                if "write" in request:
                    self._tree.write(request["write"], request["text"])
                if "exit" in request:
                    return ProcessExit(request["exit"])
                reply = {"python": [3, 11], "echo": request.get("echo")}
                await self._stream.send(json.dumps(reply).encode() + b"\n")
        return ProcessExit(0)
