"""A minimal server side of the wire protocol, connected to a driver in its own process."""

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
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.abc
from anyio.streams.stapled import StapledByteStream
from decathlon_sandbox import wire
from decathlon_sandbox.lines import Lines, body_of_ids

from decathlon_mcp.driver.client import boot_message
from decathlon_mcp.driver.stream import DriverStream, Loss, ReconnectPolicy
from decathlon_mcp.errors import SandboxLostError

SERVERS = Path(__file__).parent / "servers"
BOUND_SECONDS = 60.0
"""Upper limit of any wait in these tests, for a slow machine; normally none takes as long."""
FIRST_ID = (1 << wire.COUNTER_BITS) + 1
_PF_EXITING = 0x4
_PF_KTHREAD = 0x200000
"""From linux/sched.h."""


class WireError(Exception):
    """The driver answered a request with an error."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(f"{error['code']}: {error['message']}")
        self.reason = wire.REASONS[error["code"]]
        self.message: str = error["message"]
        self.data: dict[str, Any] = error.get("data", {})


class DriverPeer(DriverStream):
    """Sends requests and notifications to one driver.

    `token` is in the command line of the servers that it describes, so that their processes can be found.
    It is done with responses at once.
    """

    def __init__(self, process: anyio.abc.Process, *, survive_seconds: int = 0) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self.process = process
        self.token = uuid.uuid4().hex
        self.notifications: list[tuple[str, dict[str, Any]]] = []
        self.responses: dict[int, dict[str, Any]] = {}
        self.ids = itertools.count(FIRST_ID)
        self.log = ""
        self._received = anyio.Event()
        sandbox: Any = SimpleNamespace(stream=StapledByteStream(process.stdin, process.stdout), reopen=_lost)
        super().__init__(sandbox, ReconnectPolicy(survive_seconds), was_attached=False)
        self._lines = Lines(wire.MAX_LINE_BYTES + wire.RESPONSE_MARGIN_BYTES)

    async def request(self, method: str, /, **params: Any) -> Any:
        return await self.result(await self.begin(method, **params))

    async def begin(self, method: str, /, **params: Any) -> int:
        """Send a request and return its id."""
        request_id = next(self.ids)
        await self.send({"id": request_id, "method": method, "params": params})
        return request_id

    async def result(self, request_id: int) -> Any:
        """Wait for a response and return its result. Raises WireError."""
        await self.until(lambda: request_id in self.responses)
        message = self.responses[request_id]
        if "error" in message:
            raise WireError(message["error"])
        return message["result"]

    async def cancel(self, request_id: int) -> None:
        await self.send({"method": wire.CANCEL, "params": {"id": request_id}})

    async def boot(self) -> None:
        """Send the driver's source and begin to attach to it."""
        await self.send_bytes(boot_message())
        self.attach()

    async def send(self, message: dict[str, Any]) -> None:
        await self.send_payload(json.dumps({"jsonrpc": "2.0", **message}).encode())

    async def send_payload(self, payload: bytes) -> None:
        """Send a message, which need not be JSON."""
        self._write(payload)
        await self._flush()

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes as they are."""
        assert self.process.stdin is not None
        await self.process.stdin.send(data)

    async def close(self) -> int:
        """Close the driver's stdin and return its exit code."""
        assert self.process.stdin is not None
        await self.process.stdin.aclose()
        with anyio.fail_after(BOUND_SECONDS):
            return await self.process.wait()

    # servers and tools

    def scripted_server(self, behaviour: str, name: str = "scripted", **settings: Any) -> dict[str, Any]:
        """Settings of a server of servers/scripted.py."""
        program = str(SERVERS / "scripted.py")
        return stdio_server(name, sys.executable, "-S", program, behaviour, self.token, **settings)

    def sdk_server(self, name: str = "sdk", **settings: Any) -> dict[str, Any]:
        """Settings of the server of servers/sdk.py."""
        program = str(SERVERS / "sdk.py")
        return stdio_server(name, sys.executable, program, self.token, **settings)

    async def start(self, *servers: dict[str, Any], deadline_seconds: float = 30.0) -> dict[str, Any]:
        """Define servers and start them; returns what each that was started says about itself."""
        request_id = await self.begin_start(*servers, deadline_seconds=deadline_seconds)
        return (await self.result(request_id))["servers"]

    async def begin_start(self, *servers: dict[str, Any], deadline_seconds: float = 30.0) -> int:
        """Define servers and begin to start them; returns the id of the request."""
        await self.request(wire.DEFINE, servers=servers)
        names = [server["name"] for server in servers]
        return await self.begin(wire.START, names=names, deadline_seconds=deadline_seconds, again=True)

    async def begin_tool(
        self,
        server: str,
        tool: str,
        *,
        meta: Any = None,
        max_bytes: int = 4 << 20,
        cut: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> int:
        params: dict[str, Any] = {"name": tool, "arguments": arguments}
        if meta is not None:
            params["_meta"] = meta
        return await self.begin(wire.CALL, server=server, params=params, max_bytes=max_bytes, cut=cut)

    async def tool(self, server: str, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool and return the server's whole reply."""
        return await self.result(await self.begin_tool(server, tool, **arguments))

    async def text(self, server: str, tool: str, **arguments: Any) -> str:
        """Call a tool and return the text of its result."""
        return (await self.tool(server, tool, **arguments))["result"]["content"][0]["text"]

    # processes

    def living(self) -> list[int]:
        """The living processes with this peer's token in their command line."""
        return processes_with(self.token)

    async def until_living(self, count: int) -> None:
        await until(lambda: len(self.living()) == count)

    # messages from the driver

    async def receive_log(self) -> None:
        assert self.process.stderr is not None
        async for chunk in self.process.stderr:
            self.log += chunk.decode("utf-8", "replace")

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition is met by what the driver sends."""
        with anyio.fail_after(BOUND_SECONDS):
            while not condition():
                assert self._loss is None, f"the driver has exited; its log: {self.log}"
                await self._received.wait()

    def _pending_ids(self) -> list[int]:
        assert not self.was_attached, "a line of the driver was damaged"
        return []

    def _on_attached(self) -> None:
        self._wake()

    def _on_detached(self) -> None:
        pass

    def _on_line(self, body: bytes) -> None:
        if not body.startswith(b"{"):
            return
        message = json.loads(body)
        if "method" in message:
            self.notifications.append((message["method"], message["params"]))
        else:
            number = message["id"]
            assert number not in self.responses, "a request was answered twice"
            self.responses[number] = message
            self._write(body_of_ids(b"done", [number]))
        self._wake()

    def _lose(self, loss: Loss) -> None:
        super()._lose(loss)
        self._wake()

    def _wake(self) -> None:
        self._received.set()
        self._received = anyio.Event()


async def _lost() -> None:
    raise SandboxLostError("the driver has ended")


async def until(condition: Callable[[], object], *, seconds: float = BOUND_SECONDS) -> None:
    """Poll a condition of which nothing tells, such as one of processes and files of other programs."""
    with anyio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await anyio.sleep(0.02)


def command(*argv: str, **params: Any) -> dict[str, Any]:
    """Parameters of a `run`."""
    defaults: dict[str, Any] = {
        "cwd": "/",
        "env": {},
        "timeout_seconds": 60,
        "output_bytes": 1000,
        "channel": False,
    }
    return {"argv": argv, **defaults, **params}


def stdio_server(name: str, command: str, *args: str, **settings: Any) -> dict[str, Any]:
    return {
        "name": name,
        "command": command,
        "args": list(args),
        "env": {},
        "inherit": "minimal",
        "cwd": "/",
        "request_seconds": 30,
        **settings,
    }


def processes_with(token: str) -> list[int]:
    """The living processes with `token` in their command line."""
    pids = (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in pids if token.encode() in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    """The command line of a process, empty if it has ended."""
    # During execve(2) a process has an empty command line for a moment, and under load that moment is long
    # enough to be seen: such a process is looked at again.
    for _ in range(1000):
        try:
            if command_line := Path(f"/proc/{pid}/cmdline").read_bytes():
                return command_line
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except OSError:
            return b""
        state, *fields = stat[stat.rindex(b")") + 2 :].split()
        if state in (b"Z", b"X") or int(fields[5]) & (_PF_EXITING | _PF_KTHREAD):
            return b""
        os.sched_yield()
    return b""


@asynccontextmanager
async def driver(
    python: str,
    environment: Mapping[str, str] | None = None,
    wrap: Sequence[str] = (),
    options: Sequence[str] = (),
    survive_seconds: int = 0,
) -> AsyncGenerator[DriverPeer]:
    """Run a driver that has been attached. At the end it must exit by itself and leave no process.

    It has no TMPDIR unless `environment` has one: what changes there is removed, also in the tests' folders.
    """
    async with await anyio.open_process(
        [*wrap, python, *options, *wire.BOOT_COMMAND[1:]],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={
            **{name: value for name, value in os.environ.items() if name != "TMPDIR"},
            **(environment or {}),
        },
    ) as process:
        peer = DriverPeer(process, survive_seconds=survive_seconds)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(peer.receive)
            tasks.start_soon(peer.receive_log)
            await peer.boot()
            await peer.until(lambda: peer.is_attached)
            yield peer
            await peer.close()
        assert peer.living() == []
        assert "Traceback" not in peer.log
