"""Stand-in for Prime's service: speaks its HTTP and Connect protocol to the real SDK and runs real processes.

Each sandbox is a set of namespaces made by bubblewrap, with the machine's own programs. As of the service,
output is lost that nobody is attached for, and a process ends only by itself, by a signal, or with its
sandbox. Tests make it fail: `fail_next`, `cut_streams`, `cut_next`, `expire_tokens`, `lose`,
`creation_seconds`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "stand-in-key"
ENVELOPE = struct.Struct(">BI")
END_OF_STREAM = 2


@dataclass(eq=False)
class Session:
    """One process; `outputs` are the streams that are attached."""

    process: asyncio.subprocess.Process
    exit: int | None = None
    outputs: set[asyncio.Queue[tuple[str, Any]]] = field(default_factory=set)
    inputs: set[str] = field(default_factory=set)


@dataclass(eq=False)
class Machine:
    """One sandbox."""

    id: str
    request: dict[str, Any]
    status: str = "PENDING"
    init: asyncio.subprocess.Process | None = None
    pid: int = 0
    token: str = ""
    policy_questions: int = 0
    sessions: dict[str, Session] = field(default_factory=dict)

    @property
    def alive(self) -> bool:
        return self.status in ("PENDING", "RUNNING")

    def path(self, inside: str) -> Path:
        return Path(f"/proc/{self.pid}/root{inside}")


class PrimeService:
    """The stand-in, in a thread of its own while it is entered. `machines` by id."""

    def __init__(self, messages: Any) -> None:
        self.messages = messages
        self.machines: dict[str, Machine] = {}
        self.creation_seconds = 0.0
        self.created_by_key: dict[str, Machine] = {}
        self._failures: dict[str, list[int]] = defaultdict(list)
        self._cuts: dict[str, int] = defaultdict(int)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        sandbox, gateway = "/api/v1/sandbox", "/g/ns/{id}"
        session = f"{gateway}/command_session.CommandSession"
        routes = [
            Route(path, handler, methods=[method])
            for method, path, handler in (
                ("POST", sandbox, self.create),
                ("GET", sandbox, self.list),
                ("DELETE", sandbox, self.bulk_delete),
                ("POST", f"{sandbox}/status:batchGet", self.statuses),
                ("GET", f"{sandbox}/{{id}}", self.get),
                ("DELETE", f"{sandbox}/{{id}}", self.delete),
                ("POST", f"{sandbox}/{{id}}/auth", self.auth),
                ("GET", f"{sandbox}/{{id}}/egress-policy", self.egress),
                ("GET", f"{sandbox}/{{id}}/error-context", self.error_context),
                ("POST", f"{gateway}/upload", self.upload),
                ("GET", f"{gateway}/download", self.download),
                ("POST", f"{session}/Start", self.start_command),
                ("POST", f"{session}/SendInput", self.send_input),
                ("POST", f"{session}/SendSignal", self.send_signal),
            )
        ]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        app = Starlette(routes=routes, exception_handlers={HTTPException: _refusal})
        config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._server.serve(sockets=[self._listener])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for machine in list(self.machines.values()):
            self._end(machine, "TERMINATED")
        self.cut_streams()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(20)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # What tests do

    def fail_next(self, operation: str, *statuses: int) -> None:
        """Answer the next requests for an operation (`create`, `upload`, `Start`...) with these statuses."""
        self._failures[operation] += statuses

    def cut_streams(self) -> None:
        """Break the connection of every stream that is open."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._cut_streams)

    def cut_next(self, operation: str, times: int) -> None:
        """Break the connections of all streams when the next requests for an operation come.

        With `started`, each of the next streams as soon as its process runs.
        """
        self._cuts[operation] += times

    def _cut_streams(self) -> None:
        for machine in self.machines.values():
            for session in machine.sessions.values():
                for output in session.outputs:
                    _empty(output)
                    output.put_nowait(("cut", None))

    def expire_tokens(self) -> None:
        for machine in self.machines.values():
            machine.token = ""

    def lose(self, machine: Machine) -> None:
        """End a sandbox as if its host had failed."""
        self._end(machine, "ERROR")

    def living(self, *labels: str) -> list[Machine]:
        """The sandboxes that have not been removed and have one of these labels."""
        machines = list(self.machines.values())
        return [
            machine for machine in machines if machine.alive and set(labels) & set(machine.request["labels"])
        ]

    # The platform

    def _fail_or_cut(self, operation: str) -> None:
        """Delay or refuse the next request for an operation, if a test has set that."""
        if self._cuts[operation]:
            self._cuts[operation] -= 1
            self._cut_streams()
        if self._failures[operation]:
            status = self._failures[operation].pop(0)
            headers = {"Retry-After": "1"} if status == 429 else {}
            raise HTTPException(status, f"made to fail with {status}", headers)

    def _machine(self, request: Request) -> Machine:
        """The sandbox in a request's path."""
        if (machine := self.machines.get(request.path_params["id"])) is None:
            raise HTTPException(404, "not found")
        return machine

    def _facts(self, machine: Machine) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat()
        request = machine.request
        return {
            "id": machine.id,
            "name": request["name"],
            "dockerImage": request["docker_image"],
            "cpuCores": request["cpu_cores"],
            "memoryGB": request["memory_gb"],
            "diskSizeGB": request["disk_size_gb"],
            "diskMountPath": "/",
            "gpuCount": 0,
            "vm": True,
            "status": machine.status,
            "timeoutMinutes": request["timeout_minutes"],
            "labels": request["labels"],
            "createdAt": now,
            "updatedAt": now,
        }

    async def create(self, request: Request) -> Response:
        values = await request.json()
        if request.headers.get("authorization") != f"Bearer {KEY}":
            raise HTTPException(401, "bad key")
        self._fail_or_cut("create")
        key = values["idempotency_key"]
        if key not in self.created_by_key:
            machine = self.created_by_key[key] = Machine(secrets.token_hex(8), values)
            self.machines[machine.id] = machine
            self._in_background(self._start(machine))
        self._fail_or_cut("created")  # as if the answer was lost
        return JSONResponse(self._facts(self.created_by_key[key]))

    async def _start(self, machine: Machine) -> None:
        await asyncio.sleep(self.creation_seconds)
        options = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--cap-add", "ALL", "--die-with-parent"]
        if machine.request.get("network_allowlist") == []:
            options.append("--unshare-net")
        for name in ("usr", "etc"):
            options += ["--ro-bind", f"/{name}", f"/{name}"]
        for link in ("bin", "sbin", "lib", "lib64"):
            if Path(f"/{link}").is_symlink():  # noqa: ASYNC240
                options += ["--symlink", f"usr/{link}", f"/{link}"]
        options += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
        machine.init = await asyncio.create_subprocess_exec("bwrap", *options, "sleep", "infinity")
        machine.pid = await asyncio.to_thread(_program, machine.init.pid)
        if machine.status == "PENDING":
            machine.status = "RUNNING"
        else:
            os.kill(machine.pid, signal.SIGKILL)

    def _end(self, machine: Machine, status: str) -> None:
        if machine.alive:
            machine.status = status
            if machine.pid:
                os.kill(machine.pid, signal.SIGKILL)

    async def list(self, request: Request) -> Response:
        self._fail_or_cut("list")
        wanted, page = request.query_params.getlist("labels"), int(request.query_params["page"])
        per_page = int(request.query_params["per_page"])
        # Any of the labels: the more difficult of the two readings.
        found = self.living(*wanted)
        part = found[(page - 1) * per_page : page * per_page]
        return JSONResponse(
            {
                "sandboxes": [self._facts(machine) for machine in part],
                "total": len(found),
                "page": page,
                "perPage": per_page,
                "hasNext": page * per_page < len(found),
            }
        )

    async def statuses(self, request: Request) -> Response:
        ids = (await request.json())["sandbox_ids"]
        known = [self.machines[name] for name in ids if name in self.machines]
        found = [{"sandbox_id": machine.id, "status": machine.status} for machine in known]
        return JSONResponse({"statuses": found, "errors": []})

    async def get(self, request: Request) -> Response:
        return JSONResponse(self._facts(self._machine(request)))

    async def delete(self, request: Request) -> Response:
        self._fail_or_cut("delete")
        machine = self._machine(request)
        if not machine.alive:
            raise HTTPException(404, "not found")
        self._end(machine, "TERMINATED")
        return JSONResponse({"status": "ok"})

    async def bulk_delete(self, request: Request) -> Response:
        ids: list[str] = (await request.json())["sandbox_ids"]
        for name in ids:
            self._end(self.machines[name], "TERMINATED")
        return JSONResponse({"succeeded": ids, "failed": [], "message": ""})

    async def auth(self, request: Request) -> Response:
        self._fail_or_cut("auth")
        machine = self._machine(request)
        machine.token = machine.token or secrets.token_hex(8)
        access = {"gateway_url": f"{self.url}/g", "user_ns": "ns", "job_id": machine.id, "is_vm": True}
        return JSONResponse({**access, "token": machine.token, "expires_at": "2099-01-01T00:00:00Z"})

    async def egress(self, request: Request) -> Response:
        machine = self._machine(request)
        # Applied from the second question on.
        machine.policy_questions += 1
        policy = {"allowlist": machine.request.get("network_allowlist"), "denylist": None}
        applied = {"generation": 1, "applied_generation": 1, "applied": machine.policy_questions > 1}
        return JSONResponse({"policy": policy, **applied})

    async def error_context(self, request: Request) -> Response:
        return JSONResponse({"status": self._machine(request).status})

    # The gateway

    def _admitted(self, request: Request, operation: str) -> Machine:
        """The sandbox of a request with its token."""
        self._fail_or_cut(operation)
        machine = self._machine(request)
        if not machine.alive:
            raise HTTPException(404, "sandbox is gone")
        if not machine.token or request.headers.get("authorization") != f"Bearer {machine.token}":
            raise HTTPException(401, "token")
        return machine

    async def upload(self, request: Request) -> Response:
        machine, path = self._admitted(request, "upload"), request.query_params["path"]
        async with request.form() as form:
            file: Any = form["file"]
            content = await file.read()
        machine.path(path).write_bytes(content)
        now = datetime.now(UTC).isoformat()
        return JSONResponse({"success": True, "path": path, "size": len(content), "timestamp": now})

    async def download(self, request: Request) -> Response:
        path = request.query_params["path"]
        return Response(self._admitted(request, "download").path(path).read_bytes())

    async def start_command(self, request: Request) -> Response:
        machine = self._admitted(request, "Start")
        body = await request.body()
        message = self.messages.StartRequest()
        message.ParseFromString(body[ENVELOPE.size :])
        key = message.session_uuid or secrets.token_hex(8)
        output: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(16)
        if key in machine.sessions:
            machine.sessions[key].outputs.add(output)
        else:
            command = message.command
            process = await asyncio.create_subprocess_exec(
                "nsenter",
                *("--target", str(machine.pid), "--mount", "--pid", "--ipc", "--uts", "--net"),
                # The working folder is still the one outside.
                *("/bin/sh", "-c", 'cd / && exec "$@"', "sh"),
                command.cmd,
                *command.args,
                env={"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/root", **command.envs},
                stdin=asyncio.subprocess.PIPE if message.stdin else asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            machine.sessions[key] = Session(process, outputs={output})
            self._in_background(self._pump(machine.sessions[key]))
        events = self._events(machine.sessions[key], output)
        return StreamingResponse(events, media_type="application/connect+proto")

    async def _pump(self, session: Session) -> None:
        async def copy(kind: str, stream: asyncio.StreamReader | None) -> None:
            assert stream is not None
            while data := await stream.read(65536):
                for output in list(session.outputs):
                    await output.put((kind, data))

        await asyncio.gather(copy("stdout", session.process.stdout), copy("stderr", session.process.stderr))
        session.exit = await session.process.wait()
        for output in list(session.outputs):
            await output.put(("end", session.exit))

    async def _events(self, session: Session, output: asyncio.Queue[tuple[str, Any]]) -> AsyncIterator[bytes]:
        try:
            yield self._event(start=session.process.pid)
            if self._cuts["started"]:
                self._cuts["started"] -= 1
                raise ConnectionResetError("cut")
            while True:
                kind, value = await output.get()
                if kind == "cut":
                    raise ConnectionResetError("cut")
                yield self._event(**{kind: value})
                if kind == "end":
                    yield ENVELOPE.pack(END_OF_STREAM, 2) + b"{}"
                    return
        finally:
            session.outputs.discard(output)
            _empty(output)  # the pump may be waiting for space in it

    def _event(self, **values: Any) -> bytes:
        message = self.messages.StartResponse()
        for kind, value in values.items():
            if kind == "start":
                message.event.start.pid = value
            elif kind == "end":
                message.event.end.exit_code = value if value >= 0 else 128 - value
                message.event.end.SetInParent()
            else:
                setattr(message.event.data, kind, value)
        encoded = message.SerializeToString()
        return ENVELOPE.pack(0, len(encoded)) + encoded

    async def send_input(self, request: Request) -> Response:
        machine, message = self._admitted(request, "SendInput"), self.messages.SendInputRequest()
        message.ParseFromString(await request.body())
        session = machine.sessions.get(message.session.session_uuid)
        if session is None or session.exit is not None or session.process.stdin is None:
            raise HTTPException(404, "no such process")
        if message.input_uuid not in session.inputs:
            session.inputs.add(message.input_uuid)
            try:
                session.process.stdin.write(message.input.stdin)
                await session.process.stdin.drain()
            except OSError:
                raise HTTPException(404, "it has ended") from None
        return Response(b"", media_type="application/proto")

    async def send_signal(self, request: Request) -> Response:
        machine, message = self._admitted(request, "SendSignal"), self.messages.SendSignalRequest()
        message.ParseFromString(await request.body())
        session = machine.sessions.get(message.session.session_uuid)
        if session is not None and session.exit is None:
            # nsenter waits for the program.
            for program in _children(session.process.pid):
                os.kill(program, message.signal)
        return Response(b"", media_type="application/proto")


def _refusal(request: Request, error: Exception) -> Response:
    """An error of the platform, and of the gateway, which speaks Connect."""
    assert isinstance(error, HTTPException)
    code = {401: "unauthenticated", 404: "not_found"}.get(error.status_code)
    body = {"detail": error.detail, "code": code, "message": error.detail}
    return JSONResponse(body, error.status_code, error.headers)


def _empty(output: asyncio.Queue[Any]) -> None:
    while not output.empty():
        output.get_nowait()


def _program(bwrap: int) -> int:
    """The program in a sandbox, once it runs. Everything there ends with it."""
    while True:
        for first in _children(bwrap):
            for program in _children(first):
                if Path(f"/proc/{program}/comm").read_text("utf-8").strip() == "sleep":
                    return program
        time.sleep(0.005)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii").split()]
