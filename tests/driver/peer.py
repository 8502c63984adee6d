"""The server's end of the line, as bare as can be: a driver in a process of its own, and what it says."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.abc
from decathlon_sandbox import wire

from decathlon_mcp.driver_client.driver import boot_message

SERVERS = Path(__file__).parent / "servers"
BOUND_SECONDS = 60.0
"""What any wait in these tests may take on a slow machine; none comes near."""


class WireError(Exception):
    """The driver answered a request with an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['code']}: {error['message']}")
        self.reason = wire.REASONS[error["code"]]
        self.message: str = error["message"]
        self.data: dict[str, Any] = error.get("data", {})


class DriverPeer:
    """Requests and notifications to one driver. `token` is in the command line of what its servers start."""

    def __init__(self, process: anyio.abc.Process) -> None:
        self.process = process
        self.token = uuid.uuid4().hex
        self.notes: list[tuple[str, dict[str, Any]]] = []
        self.faults: list[WireError] = []
        """Errors without an id."""
        self.lines: dict[int, bytes] = {}
        """The bytes of every answer."""
        self.ids = itertools.count(1)
        self._answers: dict[int, dict[str, Any]] = {}
        self._log = bytearray()
        self._news = anyio.Event()
        self.ended = anyio.Event()

    @property
    def log(self) -> str:
        return self._log.decode("utf-8", "replace")

    async def request(self, method: str, /, **params: Any) -> Any:
        return await self.answer(await self.begin(method, **params))

    async def begin(self, method: str, /, **params: Any) -> int:
        """Send a request; its id."""
        number = next(self.ids)
        await self.send({"jsonrpc": "2.0", "id": number, "method": method, "params": params})
        return number

    async def answer(self, number: int) -> Any:
        await self._until(lambda: number in self._answers)
        message = self._answers.pop(number)
        if "error" in message:
            raise WireError(message["error"])
        return message["result"]

    async def cancel(self, number: int) -> None:
        await self.send({"jsonrpc": "2.0", "method": wire.CANCEL, "params": {"id": number}})

    async def note(self, method: str, /, **like: Any) -> dict[str, Any]:
        """The params of the first notification of that method that has these, now or later; taken off."""

        def found() -> tuple[str, dict[str, Any]] | None:
            return next((n for n in self.notes if n[0] == method and like.items() <= n[1].items()), None)

        await self._until(lambda: found() is not None)
        note = found()
        assert note is not None
        self.notes.remove(note)
        return note[1]

    async def fault(self) -> WireError:
        """The first error without an id, taken off."""
        await self._until(lambda: bool(self.faults))
        return self.faults.pop(0)

    async def send(self, message: Any) -> None:
        await self.send_bytes(json.dumps(message).encode() + b"\n")

    async def send_bytes(self, data: bytes) -> None:
        assert self.process.stdin is not None
        await self.process.stdin.send(data)

    async def close(self) -> int:
        """End the line; the driver's exit code."""
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        with anyio.fail_after(BOUND_SECONDS):
            return await self.process.wait()

    # what its servers are

    def zoo(self, animal: str, name: str = "zoo", **more: Any) -> dict[str, Any]:
        """A server of raw Python (servers/zoo.py)."""
        return stdio_server(name, sys.executable, "-S", str(SERVERS / "zoo.py"), animal, self.token, **more)

    def busy(self, name: str = "busy", **more: Any) -> dict[str, Any]:
        """A server on the MCP SDK (servers/busy.py)."""
        return stdio_server(name, sys.executable, str(SERVERS / "busy.py"), "stdio", self.token, **more)

    async def start(self, *servers: dict[str, Any], deadline_seconds: float = 30.0) -> dict[str, Any]:
        return (await self.request(wire.START, servers=servers, deadline_seconds=deadline_seconds))["servers"]

    async def begin_tool(
        self,
        server: str,
        tool: str,
        *,
        meta: Any = None,
        timeout_seconds: float | None = 30.0,
        **arguments: Any,
    ) -> int:
        params: dict[str, Any] = {"name": tool, "arguments": arguments}
        if meta is not None:
            params["_meta"] = meta
        return await self.begin(
            wire.CALL, server=server, method="tools/call", params=params, timeout_seconds=timeout_seconds
        )

    async def tool(self, server: str, tool: str, **more: Any) -> dict[str, Any]:
        """Call a tool; the server's whole reply."""
        return await self.answer(await self.begin_tool(server, tool, **more))

    async def text(self, server: str, tool: str, **more: Any) -> str:
        return (await self.tool(server, tool, **more))["result"]["content"][0]["text"]

    # its processes

    def left(self) -> list[int]:
        return processes_with(self.token)

    async def until_left(self, count: int) -> None:
        await until(lambda: len(self.left()) == count)

    async def _until(self, done: Callable[[], bool]) -> None:
        with anyio.fail_after(BOUND_SECONDS):
            while not done():
                assert not self.ended.is_set(), f"the driver is gone; its log: {self.log}"
                await self._news.wait()

    async def read(self) -> None:
        """Take everything the driver says, until it ends."""
        assert self.process.stdout is not None
        buffer = bytearray()
        async for chunk in self.process.stdout:
            buffer += chunk
            if b"\n" in chunk:
                *lines, rest = bytes(buffer).split(b"\n")
                buffer = bytearray(rest)
                for line in lines:
                    self._take(line)
        self.ended.set()
        self._tell()

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for chunk in self.process.stderr:
            self._log += chunk

    def _take(self, line: bytes) -> None:
        message = json.loads(line.decode())
        if "method" in message:
            self.notes.append((message["method"], message["params"]))
        elif message["id"] is None:
            self.faults.append(WireError(message["error"]))
        else:
            assert message["id"] not in self.lines, "answered twice"
            self.lines[message["id"]] = line
            self._answers[message["id"]] = message
        self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = anyio.Event()


async def until(true: Callable[[], bool]) -> None:
    """Look again and again: for what processes and files of others do there is no event to wait for."""
    with anyio.fail_after(BOUND_SECONDS):
        while not true():  # noqa: ASYNC110
            await anyio.sleep(0.02)


def stdio_server(name: str, command: str, *args: str, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "type": "stdio",
        "command": command,
        "args": list(args),
        "env": {},
        "inherit": "minimal",
        "cwd": "/",
        "request_seconds": 30,
        **more,
    }


def processes_with(token: str) -> list[int]:
    """The living processes with `token` in their command line."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if token.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


@asynccontextmanager
async def driver(
    python: str,
    environment: Mapping[str, str] | None = None,
    wrap: Sequence[str] = (),
    options: Sequence[str] = (),
) -> AsyncGenerator[DriverPeer]:
    """A driver that has said it is ready. At the end it has to end by itself, and leave nothing."""
    async with await anyio.open_process(
        [*wrap, python, *options, *wire.BOOT_COMMAND[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    ) as process:
        peer = DriverPeer(process)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer.read)
            tasks.start_soon(peer.read_log)
            await peer.send_bytes(boot_message())
            ready = await peer.note(wire.READY)
            assert ready["version"] == wire.VERSION
            yield peer
            await peer.close()
        assert peer.left() == []
        assert "Traceback" not in peer.log
