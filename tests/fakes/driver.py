"""First processes of fake sandboxes: a driver with configurable faults, and the probe of `conformance`."""

from __future__ import annotations

import base64
import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any, cast

import anyio
from anyio import CancelScope
from anyio.abc import ByteStream, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_sandbox import wire
from decathlon_sandbox.truncation import cut, shorten

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
    never_ready: bool = False
    """The driver reads its source and then sends nothing."""
    dies_on: str | None = None
    """The first process ends with exit code 137 when this method is requested."""
    silent_on: str | None = None
    """Requests of this method get no response."""
    garbage: bool = False
    """The driver sends lines that are not messages before every message."""
    servers_that_fail: Mapping[str, str] = field(default_factory=dict[str, str])
    """Servers that do not start, with the end of their stderr."""
    removals_refused: int = 0
    """Number of attempts to remove the sandbox that fail."""
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

    server: str
    tool: str
    arguments: Json
    params: Json
    tree: Tree
    _notify: Callable[[str, Json], Awaitable[None]]

    async def progress(self, progress: float, total: float | None = None, message: str | None = None) -> None:
        params: Json = {"progressToken": 0, "progress": progress, "total": total, "message": message}
        await self._notify(
            wire.PROGRESS, {name: value for name, value in params.items() if value is not None}
        )

    async def log(self, data: Any, level: str = "info") -> None:
        await self._notify(wire.MESSAGE, {"level": level, "data": data})


Reply = str | Json
"""A tool's result: its text, or the whole result as MCP defines it."""
Handler = Callable[[FakeCall], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class FakeTool:
    """A tool with an input schema or additional fields in its definition."""

    handler: Handler
    schema: Json = field(default_factory=lambda: {"type": "object"})
    extra_fields: Json = field(default_factory=dict[str, Any])
    """Additional fields of the definition; MCP need not define them."""


Tools = Mapping[str, Mapping[str, Handler | FakeTool]]
"""Handlers by server and tool name."""


@dataclass(frozen=True, slots=True)
class FakeRun:
    """A request to run a process, as a test's `run` receives it."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    tree: Tree
    leave: bool = False
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


class _RequestError(Exception):
    def __init__(self, code: int, message: str, data: Json | None = None) -> None:
        super().__init__(message)
        self.error: Json = {"code": code, "message": message, **({"data": data} if data else {})}


class FakeDriver:
    """A driver from boot to the end of its stream. A test provides its tools and processes as callables.

    `stream` can lose bytes, but ends only if no server will come any more. `on_start` is called with the
    name of each server whose start is tried. `saved`: what it is a copy of, in the middle of its run.
    """

    def __init__(
        self,
        stream: ByteStream,
        tree: Tree,
        *,
        tools: Tools,
        run: Run,
        faults: Faults,
        on_start: Callable[[str], object] = lambda name: None,
        saved: FakeDriver | None = None,
    ) -> None:
        self._is_copy = saved is not None
        self._stream = stream
        self._tree = tree
        self._tools = tools
        self._process_handler = run
        self._faults = faults
        self._on_start = on_start
        self._send_lock = anyio.Lock()
        self._end: DriverEnd = DriverEnd() if saved is None else deepcopy(saved._end)
        self._requests: dict[int, CancelScope] = {}
        self._defined: set[str] = set() if saved is None else {*saved._defined}
        self._started: set[str] = set() if saved is None else {*saved._started}
        self._frozen = False
        self.merges = False
        """Whether the server asked to merge memory."""
        self._exit: ProcessExit | None = None
        self._scope = CancelScope()

    async def run(self) -> ProcessExit:
        """Run until the stream ends or the process dies; returns the exit."""
        with self._scope:
            async with anyio.create_task_group() as tasks:
                with suppress(
                    anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError, TimeoutError
                ):
                    await self._serve(tasks)
                tasks.cancel_scope.cancel()
        return self._exit or ProcessExit(0)

    def _die(self, process_exit: ProcessExit) -> None:
        self._exit = process_exit
        self._scope.cancel()

    async def _serve(self, tasks: TaskGroup) -> None:
        reader = BufferedByteReceiveStream(self._stream)
        if not self._is_copy:
            size = int(await reader.receive_until(b"\n", 32))
            await reader.receive_exactly(size)
        if self._faults.never_ready:
            await anyio.sleep_forever()
        deadline = anyio.current_time() + wire.LEASE_SECONDS
        while True:
            with anyio.fail_after(deadline - anyio.current_time()):
                data = await reader.receive()
            for message in self._end.receive(data):
                self._on_message(message, tasks)
            if self._end.has_heard:
                deadline = anyio.current_time() + (self._end.survive_seconds or wire.LEASE_SECONDS)
            await self._flush()

    def _on_message(self, message: Json, tasks: TaskGroup) -> None:
        method, params, request_id = message["method"], message.get("params", {}), message.get("id")
        if request_id is not None:
            tasks.start_soon(self._answer, request_id, method, params)
        elif method == wire.CANCEL and (scope := self._requests.get(params.get("id"))):
            scope.cancel()

    async def _answer(self, request_id: int, method: str, params: Json) -> None:
        if method == self._faults.dies_on:
            self._die(ProcessExit())
            await anyio.lowlevel.checkpoint()
        if method == self._faults.silent_on:
            await anyio.sleep_forever()
        reply: Json = {"error": {"code": wire.CANCELLED, "message": "cancelled"}}
        with CancelScope() as scope:
            self._requests[request_id] = scope
            try:
                reply = {"result": await self._result(request_id, method, params)}
            except _RequestError as error:
                reply = {"error": error.error}
            except ProcessExit as process_exit:
                self._die(process_exit)
                await anyio.sleep_forever()
            finally:
                del self._requests[request_id]
        if self._frozen and method == wire.CALL and "error" in reply:
            reply = {"error": {"code": wire.FROZEN, "message": "frozen"}}
        overlong = {}
        if method == wire.CALL and "result" in reply:
            reply, overlong = self._limited(params, reply["result"])
        await self._send({"id": request_id, **reply, **overlong})

    def _limited(self, params: Json, relayed: Json) -> tuple[Json, Json]:
        """A relayed reply as `cut` and `max_bytes` require, and the response's further members."""
        overlong: Json = {}
        options, result = params.get("cut"), relayed.get("result")
        if options is not None and isinstance(result, dict):
            folder, characters = options.get("folder"), options["characters"]
            shortened = (
                shorten(cast("Json", result), characters)
                if folder is None
                else cut(cast("Json", result), folder, characters)
            )
            if shortened is not None and folder is not None:
                self._tree.arrange({"make": folder})
                self._tree.arrange({"write": shortened.path, "text": shortened.full_text})
            if shortened is not None:
                relayed = {"result": shortened.result}
                overlong = {"overlong": {"path": shortened.path, "characters": shortened.characters}}
        size, limit = len(json.dumps(relayed)), params.get("max_bytes", wire.MAX_RESPONSE_BYTES)
        if size > limit:
            message = f"the reply has {size} bytes, more than the limit of {limit} bytes"
            return {"error": {"code": wire.TOO_LONG, "message": message}}, {}
        return {"result": relayed}, overlong

    async def _result(self, request_id: int, method: str, params: Json) -> Any:
        match method:
            case wire.ARRANGE:
                return self._arrange(params)
            case wire.PACK:
                return self._pack(params)
            case wire.RUN:
                return await self._run_process(params)
            case wire.SNAPSHOT:
                self._tree.mark()
                return {"since": {"moment_ns": 0, "offset_ns": 0}}
            case wire.CLEAN:
                paths = self._tree.clean(params["except"])
                return {"removed": 0, "paths": paths[:100], "count": len(paths)}
            case wire.MERGE:
                self.merges = True
                return {"merging": True, "fixed_addresses": True}
            case wire.DEFINE:
                self._defined |= {server["name"] for server in params["servers"]}
                return {}
            case wire.START:
                return self._start(params)
            case wire.CALL:
                return await self._call(request_id, params)
            case wire.FREEZE:
                return self._freeze()
            case wire.PING:
                return {}
            case _:
                raise _RequestError(wire.UNKNOWN_METHOD, f"no method {method!r}")

    def _arrange(self, params: Json) -> Json:
        for number, step in enumerate(params["steps"]):
            try:
                self._tree.arrange(step)
            except OSError as error:
                raise _RequestError(wire.FILES, str(error), {"step": number}) from error
        return {}

    def _pack(self, params: Json) -> Json:
        packed = self._tree.pack(PurePosixPath(params["folder"]))
        if len(packed) > params["max_bytes"]:
            raise _RequestError(wire.TOO_LONG, "too large")
        return {"tar": base64.b64encode(packed).decode()}

    async def _run_process(self, params: Json) -> Json:
        leave = bool(params.get("leave"))
        request = FakeRun(tuple(params["argv"]), params["cwd"], params["env"], self._tree, leave)
        try:
            result = self._process_handler(request)
            reply = await result if inspect.isawaitable(result) else result
        except FileNotFoundError as error:
            raise _RequestError(wire.SPAWN, f"no program {error}") from error
        reply = RunReply(reply) if isinstance(reply, int) else reply
        return {
            "exit_code": None if reply.timed_out else reply.exit_code,
            "signal": 9 if reply.timed_out else None,
            "timed_out": reply.timed_out,
            "stdout": reply.stdout,
            "stderr": reply.stderr,
            "channel": reply.channel,
            "background": reply.background if leave else 0,
        }

    def _start(self, params: Json) -> Json:
        if self._frozen:
            raise _RequestError(wire.FROZEN, "frozen")
        for name in params["names"]:
            if name not in self._defined:
                raise _RequestError(wire.BAD_PARAMS, f"no server named {name} is defined", {"server": name})
        names: list[str] = [name for name in params["names"] if name not in self._started]
        for name in names:
            self._on_start(name)
            stderr = self._faults.servers_that_fail.get(name)
            if stderr is None and name not in self._tools:
                stderr = f"no server {name!r} in this test"
            if stderr is not None:
                data = {"server": name, "stderr": stderr, "exit_code": 1}
                raise _RequestError(wire.SERVER, f"server {name} did not come up", data)
        self._started |= set(names)
        return {"servers": {name: self._server_info(name) for name in names}}

    def _server_info(self, server: str) -> Json:
        return {"tools": [_definition(name, tool) for name, tool in self._tools[server].items()]}

    async def _call(self, request_id: int, params: Json) -> Json:
        server = params["server"]
        if self._frozen:
            raise _RequestError(wire.FROZEN, "frozen")
        if server not in self._started:
            raise _RequestError(wire.SERVER, f"no server {server!r} is up", {"server": server})
        reply = await self._call_tool(request_id, server, params["params"])
        return {"jsonrpc": "2.0", "id": request_id, **reply}

    async def _call_tool(self, request_id: int, server: str, params: Json) -> Json:
        name = params["name"]
        tool = self._tools[server].get(name)
        if tool is None:
            return {"error": {"code": -32602, "message": f"Unknown tool: {name}"}}

        async def notify(method: str, notification: Json) -> None:
            origin = {"server": server} if method == wire.MESSAGE else {}
            await self._send(
                {"method": method, "params": {"id": request_id, **origin, "params": notification}}
            )

        call = FakeCall(server, name, params.get("arguments") or {}, params, self._tree, notify)
        handler = tool.handler if isinstance(tool, FakeTool) else tool
        try:
            reply = await handler(call)
        except ToolError as error:
            return {"error": error.error}
        return {"result": {"content": [{"type": "text", "text": reply}]} if isinstance(reply, str) else reply}

    def _freeze(self) -> Json:
        self._frozen = True
        self._started = set()
        for scope in self._requests.values():
            scope.cancel()
        return {"stderr": {}}

    async def _send(self, message: Json) -> None:
        self._end.send(json.dumps({"jsonrpc": "2.0", **message}, separators=(",", ":")).encode())
        await self._flush(b'noise\n{"half": \n[1, 2]\n\xff\xfe\n\n' if self._faults.garbage else b"")

    async def _flush(self, noise: bytes = b"") -> None:
        async with self._send_lock:
            try:
                while data := self._end.data_to_send():
                    await self._stream.send(noise + data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self._scope.cancel()


def _definition(name: str, tool: Handler | FakeTool) -> Json:
    tool = tool if isinstance(tool, FakeTool) else FakeTool(tool)
    return {
        "name": name,
        "description": inspect.getdoc(tool.handler) or name,
        "inputSchema": tool.schema,
        **tool.extra_fields,
    }


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
