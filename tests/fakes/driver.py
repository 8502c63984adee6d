"""The driver's side of the wire as a coroutine: what a fake sandbox runs as its first process."""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import anyio
from anyio import CancelScope
from anyio.abc import ByteStream, TaskGroup
from anyio.streams.buffered import BufferedByteReceiveStream
from decathlon_sandbox import wire

from tests.fakes.faults import Died, Faults
from tests.fakes.tree import Tree

Json = dict[str, Any]
PROTOCOL_VERSION = "2025-11-25"
_OVERLONG_BYTES = wire.MAX_LINE_BYTES + (1 << 20)


class ToolError(Exception):
    """Raised by a test's tool: the reply is this JSON-RPC error."""

    def __init__(self, message: str, code: int = -32602) -> None:
        super().__init__(message)
        self.reply = {"code": code, "message": message}


@dataclass(frozen=True, slots=True)
class FakeCall:
    """What a tool of a test is called with, and what it can do while it runs."""

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
"""What a tool gives: the text of a result, or a whole result in MCP's form."""
Handler = Callable[[FakeCall], Awaitable[Reply]]


@dataclass(frozen=True, slots=True)
class FakeTool:
    """A tool with more to say than its name and its docstring."""

    handler: Handler
    schema: Json = field(default_factory=lambda: {"type": "object"})
    more: Json = field(default_factory=dict[str, Any])
    """Further fields of its definition, known to MCP or not."""


Tools = Mapping[str, Mapping[str, Handler | FakeTool]]
"""Server to tool to what it does."""


@dataclass(frozen=True, slots=True)
class FakeRun:
    """A process that the sandbox was asked to run."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    tree: Tree


@dataclass(frozen=True, slots=True)
class RunReply:
    exit_code: int = 0
    stdout: str = ""
    stderr: str = ""
    channel: str | None = None
    timed_out: bool = False


Run = Callable[[FakeRun], "int | RunReply | Awaitable[int | RunReply]"]


class _FailureError(Exception):
    def __init__(self, code: int, message: str, data: Json | None = None) -> None:
        super().__init__(message)
        self.error: Json = {"code": code, "message": message, **({"data": data} if data else {})}


class FakeDriver:
    """One driver, from boot to the end of its line. Its tools and processes are a test's callables."""

    def __init__(self, stream: ByteStream, tree: Tree, *, tools: Tools, run: Run, faults: Faults) -> None:
        self._stream = stream
        self._tree = tree
        self._tools = tools
        self._run_process = run
        self._faults = faults
        self._sending = anyio.Lock()
        self._requests: dict[int, CancelScope] = {}
        self._up: set[str] = set()
        self._frozen = False
        self._death: Died | None = None
        self._ended = CancelScope()

    async def live(self) -> Died:
        """Until the line ends, or something inside dies; how it ended."""
        with self._ended:
            async with anyio.create_task_group() as tasks:
                with suppress(anyio.EndOfStream, anyio.IncompleteRead, anyio.BrokenResourceError):
                    await self._hear(tasks)
                tasks.cancel_scope.cancel()
        return self._death or Died(0)

    def _die(self, death: Died) -> None:
        self._death = death
        self._ended.cancel()

    async def _hear(self, tasks: TaskGroup) -> None:
        reader = BufferedByteReceiveStream(self._stream)
        size = int(await reader.receive_until(b"\n", 32))
        await reader.receive_exactly(size)
        if self._faults.never_ready:
            await anyio.sleep_forever()
        await self._say(
            {"method": wire.READY, "params": {"version": wire.VERSION, "python": "3.11.0", "pid": 1}}
        )
        async for message in _messages(reader):
            method, params = message["method"], message.get("params", {})
            if "id" in message:
                tasks.start_soon(self._answer, message["id"], method, params)
            elif method == wire.CANCEL and (scope := self._requests.get(params.get("id"))):
                scope.cancel()

    async def _answer(self, number: int, method: str, params: Json) -> None:
        if method == self._faults.dies_on:
            self._die(Died())
            await anyio.lowlevel.checkpoint()
        if method == self._faults.silent_on:
            await anyio.sleep_forever()
        reply: Json = {"error": {"code": wire.CANCELLED, "message": "cancelled"}}
        with CancelScope() as scope:
            self._requests[number] = scope
            try:
                reply = {"result": await self._do(number, method, params)}
            except _FailureError as failure:
                reply = {"error": failure.error}
            except Died as death:
                self._die(death)
            finally:
                del self._requests[number]
        if self._frozen and method == wire.CALL and "error" in reply:
            reply = {"error": {"code": wire.FROZEN, "message": "frozen"}}
        if method == self._faults.overlong_on:
            reply = {"result": "x" * _OVERLONG_BYTES}
        await self._say({"id": number, **reply})

    async def _do(self, number: int, method: str, params: Json) -> Any:
        match method:
            case wire.ARRANGE:
                return self._arrange(params)
            case wire.RUN:
                return await self._run(params)
            case wire.START:
                return self._start(params)
            case wire.CALL:
                return await self._call(number, params)
            case wire.FREEZE:
                return self._freeze()
            case wire.PING:
                return {}
            case _:
                raise _FailureError(wire.UNKNOWN_METHOD, f"no method {method!r}")

    def _arrange(self, params: Json) -> Json:
        for step in params["steps"]:
            try:
                self._tree.arrange(step)
            except OSError as error:
                raise _FailureError(wire.FILES, str(error)) from error
        return {}

    async def _run(self, params: Json) -> Json:
        asked = FakeRun(tuple(params["argv"]), params["cwd"], params["env"], self._tree)
        try:
            said = self._run_process(asked)
            reply = await said if inspect.isawaitable(said) else said
        except FileNotFoundError as error:
            raise _FailureError(wire.SPAWN, f"no program {error}") from error
        reply = RunReply(reply) if isinstance(reply, int) else reply
        return {
            "exit_code": None if reply.timed_out else reply.exit_code,
            "signal": 9 if reply.timed_out else None,
            "timed_out": reply.timed_out,
            "stdout": reply.stdout,
            "stderr": reply.stderr,
            "truncated": False,
            "channel": reply.channel,
            "seconds": 0.0,
        }

    def _start(self, params: Json) -> Json:
        if self._frozen:
            raise _FailureError(wire.FROZEN, "frozen")
        names: list[str] = [server["name"] for server in params["servers"]]
        for name in names:
            last_words = self._faults.servers_that_fail.get(name)
            if last_words is None and name not in self._tools:
                last_words = f"no server {name!r} in this test"
            if last_words is not None:
                about = {"server": name, "stderr": last_words, "exit_code": 1}
                raise _FailureError(wire.SERVER, f"server {name} did not come up", about)
        self._up |= set(names)
        return {"servers": {name: self._facts(name) for name in names}}

    def _facts(self, server: str) -> Json:
        return {
            "protocolVersion": PROTOCOL_VERSION,
            "serverInfo": {"name": server, "version": "1"},
            "capabilities": {"tools": {}},
            "tools": [_definition(name, tool) for name, tool in self._tools[server].items()],
            "seconds": 0.0,
        }

    async def _call(self, number: int, params: Json) -> Json:
        server = params["server"]
        if self._frozen:
            raise _FailureError(wire.FROZEN, "frozen")
        if server not in self._up:
            raise _FailureError(wire.SERVER, f"no server {server!r} is up", {"server": server})
        if params["method"] == "tools/list":
            return {"jsonrpc": "2.0", "id": number, "result": {"tools": self._facts(server)["tools"]}}
        said = await self._call_tool(number, server, params["params"], params.get("timeout_seconds"))
        return {"jsonrpc": "2.0", "id": number, **said}

    async def _call_tool(self, number: int, server: str, params: Json, seconds: float | None) -> Json:
        name = params["name"]
        tool = self._tools[server].get(name)
        if tool is None:
            return {"error": {"code": -32602, "message": f"Unknown tool: {name}"}}

        async def notify(kind: str, said: Json) -> None:
            more = {"server": server} if kind == wire.MESSAGE else {}
            await self._say({"method": kind, "params": {"id": number, **more, "params": said}})

        call = FakeCall(server, name, params.get("arguments") or {}, params, self._tree, notify)
        handler = tool.handler if isinstance(tool, FakeTool) else tool
        try:
            with anyio.fail_after(seconds):
                reply = await handler(call)
        except ToolError as error:
            return {"error": error.reply}
        except TimeoutError:
            raise _FailureError(wire.TIMEOUT, f"{name} did not answer within {seconds:g} s") from None
        return {"result": {"content": [{"type": "text", "text": reply}]} if isinstance(reply, str) else reply}

    def _freeze(self) -> Json:
        self._frozen = True
        killed, self._up = len(self._up), set()
        for scope in self._requests.values():
            scope.cancel()
        return {"killed": killed}

    async def _say(self, message: Json) -> None:
        data = json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n"
        noise = b'noise\n{"half": \n[1, 2]\n\xff\xfe\n\n' if self._faults.garbage else b""
        async with self._sending:
            try:
                await self._stream.send(noise + data)
            except (anyio.BrokenResourceError, anyio.ClosedResourceError):
                self._ended.cancel()


async def _messages(reader: BufferedByteReceiveStream) -> AsyncIterator[Json]:
    while True:
        yield json.loads(await reader.receive_until(b"\n", wire.MAX_LINE_BYTES))


def _definition(name: str, tool: Handler | FakeTool) -> Json:
    tool = tool if isinstance(tool, FakeTool) else FakeTool(tool)
    return {
        "name": name,
        "description": inspect.getdoc(tool.handler) or name,
        "inputSchema": tool.schema,
        **tool.more,
    }
