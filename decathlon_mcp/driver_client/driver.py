"""What a driver says of things it did, checked: it may have been taken over by whoever is in its sandbox.

What can be asked of a driver, and how the line to it begins and ends.
"""

from __future__ import annotations

import platform
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import anyio
from anyio import aclose_forcefully
from anyio.abc import ByteStream, TaskGroup
from decathlon_sandbox import wire
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver_client.boot import boot_message
from decathlon_mcp.driver_client.rpc import Note, RpcClient
from decathlon_mcp.driver_client.tunnels import Dialer
from decathlon_mcp.errors import CallTimeoutError, DecathlonError, DriverError, ImageError, SandboxLostError
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.types import as_object


class _Said(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class RunResult(_Said):
    """How a process ended. `stdout` and `stderr` are the last of what it wrote, `channel` is all."""

    exit_code: int | None
    signal: int | None
    timed_out: bool
    stdout: str
    stderr: str
    truncated: bool = False
    channel: str | None = None
    seconds: float


class ServerInfo(_Said):
    """What one of the task's servers said of itself. `tools` are its own words, unparsed."""

    protocol_version: str = Field(alias="protocolVersion")
    server_info: dict[str, Any] = Field(alias="serverInfo")
    capabilities: dict[str, Any]
    tools: list[dict[str, Any]]
    seconds: float


BOOT_SECONDS = 60.0
NEWS_SECONDS = 2.0
"""How long the end of a driver that is not up yet may take to be known, once something has failed for it."""
GRACE_SECONDS = 10.0
"""How much longer than the driver's own deadline the link waits for its answer."""


class DriverClient:
    """Made by `connect`.

    Every method raises SandboxLostError once the line has ended, and DriverError with one of the wire's
    reasons when the driver could not do what was asked.
    """

    def __init__(self, conversation: RpcClient, tasks: TaskGroup) -> None:
        self._conversation = conversation
        self._tasks = tasks

    @property
    def lost(self) -> anyio.Event:
        """Set when the line has ended."""
        return self._conversation.lost

    async def loss(self) -> SandboxLostError:
        """Why the line ended, in the provider's words where it knows."""
        return await self._conversation.loss()

    async def arrange(self, *steps: dict[str, Any]) -> None:
        """Make, copy, remove, write files, or check that names are absent: in order, until one fails."""
        await self._conversation.request(wire.ARRANGE, {"steps": list(steps)})

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
    ) -> RunResult:
        """Run a process that ends. A program that is not there is a DriverError with reason `spawn`.

        `leave`: what it leaves running runs on, until the sandbox is frozen or gone.
        """
        said = await self._conversation.request(
            wire.RUN,
            {
                "argv": list(argv),
                "cwd": cwd,
                "env": dict(env or {}),
                "inherit": inherit,
                "timeout_seconds": timeout_seconds,
                "output_bytes": output_bytes,
                "channel": channel,
                "leave": leave,
            },
            timeout_seconds=timeout_seconds + GRACE_SECONDS,
        )
        return _checked(RunResult, said)

    async def start(
        self, servers: Sequence[Mapping[str, Any]], *, deadline_seconds: float
    ) -> dict[str, ServerInfo]:
        """Start the task's servers side by side and list their tools.

        Raises DriverError with reason `server` and data `server`, `stderr` when one does not come up.
        """
        said = await self._conversation.request(
            wire.START,
            {"servers": [dict(server) for server in servers], "deadline_seconds": deadline_seconds},
            timeout_seconds=deadline_seconds + GRACE_SECONDS,
        )
        facts = as_object((as_object(said) or {}).get("servers"))
        if facts is None:
            raise DriverError("the driver's answer is not of the wire's form", reason="invalid_request")
        return {name: _checked(ServerInfo, fact) for name, fact in facts.items()}

    async def call(
        self,
        server: str,
        method: str,
        params: Mapping[str, Any],
        *,
        timeout_seconds: float | None,
        on_progress: Note | None = None,
        on_message: Note | None = None,
    ) -> dict[str, Any]:
        """Relay one request to a task's server; its whole reply (`result` or `error`) as it came.

        `on_progress` and `on_message` get the params of the notifications that come meanwhile, in order.
        Raises CallTimeoutError; being cancelled cancels the call in the sandbox too.
        """
        said = await self._conversation.request(
            wire.CALL,
            {"server": server, "method": method, "params": params, "timeout_seconds": timeout_seconds},
            timeout_seconds=None if timeout_seconds is None else timeout_seconds + GRACE_SECONDS,
            listeners={wire.PROGRESS: on_progress, wire.MESSAGE: on_message},
        )
        reply = as_object(said)
        if reply is None or ("result" in reply) == ("error" in reply):
            raise DriverError(
                f"server {server} sent a reply that is neither a result nor an error", reason="server"
            )
        return reply

    async def freeze(self, *, spare: Sequence[str] = ()) -> None:
        """Kill every process of the sandbox but the driver; no server runs again.

        `spare`: patterns of command lines that are let live, such as `kubectl port-forward*`.
        """
        await self._conversation.request(wire.FREEZE, {"spare": list(spare)}, timeout_seconds=30.0)

    async def forward(self, targets: Mapping[int, Dialer]) -> None:
        """Lead whoever connects to these ports of the sandbox's loopback to what the dials open.

        Raises DriverError with reason `network` when one of the ports is taken.
        """
        self._conversation.connections.serve(targets, self._tasks)
        await self._conversation.request(wire.FORWARD, {"ports": [*targets]})

    async def dial(self, port: int) -> ByteStream:
        """Connect to a port of the sandbox's loopback.

        Raises DriverError with reason `network` when nothing answers there.
        """
        connection = self._conversation.connections.dialled()
        try:
            await self._conversation.request(wire.DIAL, {"port": port, "conn": connection.number})
        except BaseException:
            await aclose_forcefully(connection)
            raise
        return connection

    async def ping(self) -> None:
        """Does the driver answer? Renews its lease."""
        await self._conversation.request(wire.PING, {}, timeout_seconds=wire.LEASE_SECONDS)


@asynccontextmanager
async def connect(sandbox: Sandbox) -> AsyncGenerator[DriverClient]:
    """Boot the driver of an open sandbox and hold the line to it.

    The driver comes up behind: what is asked of it meanwhile waits for it, what is done to the sandbox does
    not. Where it never does, whatever failed for it is raised as ImageError, when the sandbox's Python cannot
    run the driver, else as SandboxLostError.
    """

    async def explain(why: str | None) -> SandboxLostError:
        cause = await sandbox.cause_of_end()
        why = why or "the sandbox's first process ended"
        return SandboxLostError(f"sandbox lost: {why}{f' ({cause})' if cause else ''}", cause=cause)

    conversation = RpcClient(sandbox.stream, explain)
    async with background_tasks() as tasks:
        driver = DriverClient(conversation, tasks)
        tasks.start_soon(conversation.read)
        try:
            await conversation.say(boot_message())
            tasks.start_soon(_watch_over, driver, conversation)
            yield driver
        except DecathlonError:
            with anyio.move_on_after(NEWS_SECONDS):
                await conversation.settled.wait()
            if conversation.lost.is_set() and not conversation.ready:
                raise await _boot_error(sandbox, conversation) from None
            raise
        finally:
            conversation.lose("the episode ended")


async def _watch_over(driver: DriverClient, conversation: RpcClient) -> None:
    """Renew the driver's lease; a driver that does not come up or does not answer is lost."""
    with anyio.move_on_after(BOOT_SECONDS) as boot:
        await conversation.settled.wait()
    if boot.cancelled_caught:
        conversation.lose(f"the driver did not come up within {BOOT_SECONDS:.0f} s")
    while not conversation.lost.is_set():
        await anyio.sleep(wire.LEASE_SECONDS / 3)
        try:
            await driver.ping()
        except CallTimeoutError:
            conversation.lose(f"the driver has not answered for {wire.LEASE_SECONDS:.0f} s")
        except (SandboxLostError, DriverError):
            pass


async def _boot_error(sandbox: Sandbox, conversation: RpcClient) -> ImageError | SandboxLostError:
    log = sandbox.log_tail.strip()
    image = sandbox.spec.image or f"this machine ({platform.node()})"
    if "decathlon: this Python lacks" in log or "decathlon: Python 3.10" in log:
        return ImageError(f"{image} cannot run the driver: {log.rpartition('decathlon: ')[2]}", image=image)
    error = await conversation.loss()
    return SandboxLostError(f"{error.message}; its last words: {log[-500:] or '(none)'}", **error.data)


_Answer = TypeVar("_Answer", RunResult, ServerInfo)


def _checked(kind: type[_Answer], said: Any) -> _Answer:
    try:
        return kind.model_validate(said)
    except ValidationError as error:
        raise DriverError(
            f"the driver's answer is not of the wire's form: {error.error_count()} faults",
            reason="invalid_request",
        ) from None
