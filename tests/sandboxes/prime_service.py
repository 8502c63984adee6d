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


class PrimeService:
    """The stand-in, in a thread of its own while it is entered. `machines` by id."""

    def __init__(self, messages: Any) -> None:
        self.messages = messages
        self.machines: dict[str, Machine] = {}
        self.creation_seconds = 0.0
        self.created_by_key: dict[str, str] = {}
        self._failures: dict[str, list[int]] = defaultdict(list)
        self._cuts: dict[str, int] = defaultdict(int)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: set[asyncio.Event] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        sandbox = "/api/v1/sandbox"
        gateway = "/g/ns/{job}"
        connect = f"{gateway}/command_session.CommandSession"
        routes = [
            Route(sandbox, self.create, methods=["POST"]),
            Route(sandbox, self.list, methods=["GET"]),
            Route(sandbox, self.bulk_delete, methods=["DELETE"]),
            Route(f"{sandbox}/status:batchGet", self.statuses, methods=["POST"]),
            Route(f"{sandbox}/{{id}}", self.get, methods=["GET"]),
            Route(f"{sandbox}/{{id}}", self.delete, methods=["DELETE"]),
            Route(f"{sandbox}/{{id}}/auth", self.auth, methods=["POST"]),
            Route(f"{sandbox}/{{id}}/egress-policy", self.egress, methods=["GET"]),
            Route(f"{sandbox}/{{id}}/error-context", self.error_context, methods=["GET"]),
            Route(f"{gateway}/upload", self.upload, methods=["POST"]),
            Route(f"{gateway}/download", self.download, methods=["GET"]),
            Route(f"{connect}/Start", self.start_command, methods=["POST"]),
            Route(f"{connect}/SendInput", self.send_input, methods=["POST"]),
            Route(f"{connect}/SendSignal", self.send_signal, methods=["POST"]),
        ]
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        config = uvicorn.Config(Starlette(routes=routes), log_level="critical", lifespan="off", ws="none")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        asyncio.run(self._serve())

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
        for stream in list(self._streams):
            stream.set()

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

    def _failure(self, operation: str) -> Response | None:
        self._cut_due(operation)
        if not self._failures[operation]:
            return None
        status = self._failures[operation].pop(0)
        headers = {"Retry-After": "1"} if status == 429 else {}
        return JSONResponse({"detail": f"made to fail with {status}"}, status, headers)

    def _cut_due(self, operation: str) -> None:
        if self._cuts[operation]:
            self._cuts[operation] -= 1
            self._cut_streams()

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
            return JSONResponse({"detail": "bad key"}, 401)
        if failure := self._failure("create"):
            return failure
        key = values["idempotency_key"]
        if key not in self.created_by_key:
            machine = Machine(secrets.token_hex(8), values)
            self.machines[machine.id] = machine
            self.created_by_key[key] = machine.id
            self._in_background(self._start(machine))
        # As if the answer was lost.
        if failure := self._failure("created"):
            return failure
        return JSONResponse(self._facts(self.machines[self.created_by_key[key]]))

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
        if failure := self._failure("list"):
            return failure
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

    def _machine(self, request: Request) -> Machine | None:
        return self.machines.get(request.path_params.get("id") or request.path_params["job"])

    async def get(self, request: Request) -> Response:
        machine = self._machine(request)
        return JSONResponse(self._facts(machine)) if machine else JSONResponse({"detail": "not found"}, 404)

    async def delete(self, request: Request) -> Response:
        if failure := self._failure("delete"):
            return failure
        machine = self._machine(request)
        if machine is None or not machine.alive:
            return JSONResponse({"detail": "not found"}, 404)
        self._end(machine, "TERMINATED")
        return JSONResponse({"status": "ok"})

    async def bulk_delete(self, request: Request) -> Response:
        ids: list[str] = (await request.json())["sandbox_ids"]
        for name in ids:
            self._end(self.machines[name], "TERMINATED")
        return JSONResponse({"succeeded": ids, "failed": [], "message": ""})

    async def auth(self, request: Request) -> Response:
        if failure := self._failure("auth"):
            return failure
        machine = self._machine(request)
        if machine is None:
            return JSONResponse({"detail": "not found"}, 404)
        machine.token = machine.token or secrets.token_hex(8)
        return JSONResponse(
            {
                "gateway_url": f"{self.url}/g",
                "user_ns": "ns",
                "job_id": machine.id,
                "token": machine.token,
                "expires_at": "2099-01-01T00:00:00Z",
                "is_vm": True,
            }
        )

    async def egress(self, request: Request) -> Response:
        machine = self._machine(request)
        if machine is None:
            return JSONResponse({"detail": "not found"}, 404)
        # Applied from the second question on.
        machine.policy_questions += 1
        return JSONResponse(
            {
                "policy": {"allowlist": machine.request.get("network_allowlist"), "denylist": None},
                "generation": 1,
                "applied_generation": 1,
                "applied": machine.policy_questions > 1,
            }
        )

    async def error_context(self, request: Request) -> Response:
        machine = self._machine(request)
        return JSONResponse({"status": machine.status if machine else None})

    # The gateway

    def _denied(self, request: Request, operation: str) -> Response | None:
        machine = self._machine(request)
        if failure := self._failure(operation):
            return failure
        token = request.headers.get("authorization")
        if machine is None or not machine.alive:
            return JSONResponse({"code": "not_found", "message": "sandbox is gone"}, 404)
        if not machine.token or token != f"Bearer {machine.token}":
            return JSONResponse({"code": "unauthenticated", "message": "token"}, 401)
        return None

    def _file(self, request: Request) -> Path:
        machine = self._machine(request)
        assert machine is not None
        return Path(f"/proc/{machine.pid}/root{request.query_params['path']}")

    async def upload(self, request: Request) -> Response:
        if denied := self._denied(request, "upload"):
            return denied
        async with request.form() as form:
            file: Any = form["file"]
            content = await file.read()
        self._file(request).write_bytes(content)
        return JSONResponse(
            {
                "success": True,
                "path": request.query_params["path"],
                "size": len(content),
                "timestamp": datetime.now(UTC).isoformat(),
            }
        )

    async def download(self, request: Request) -> Response:
        if denied := self._denied(request, "download"):
            return denied
        return Response(self._file(request).read_bytes())

    async def start_command(self, request: Request) -> Response:
        if denied := self._denied(request, "Start"):
            return denied
        machine = self._machine(request)
        assert machine is not None
        body = await request.body()
        message = self.messages.StartRequest()
        message.ParseFromString(body[ENVELOPE.size :])
        key = message.session_uuid or secrets.token_hex(8)
        session = machine.sessions.get(key)
        if session is None:
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
            session = machine.sessions[key] = Session(process)
            output: asyncio.Queue[tuple[str, Any]] = asyncio.Queue(16)
            session.outputs.add(output)
            self._in_background(self._pump(session))
        else:
            output = asyncio.Queue(16)
            session.outputs.add(output)
        return StreamingResponse(self._events(session, output), media_type="application/connect+proto")

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
        cut = asyncio.Event()
        self._streams.add(cut)
        cutting = asyncio.create_task(cut.wait())
        getting: asyncio.Task[Any] = cutting
        try:
            yield self._event(start=session.process.pid)
            if self._cuts["started"]:
                self._cuts["started"] -= 1
                raise ConnectionResetError("cut")
            while True:
                getting = asyncio.create_task(output.get())
                await asyncio.wait([getting, cutting], return_when=asyncio.FIRST_COMPLETED)
                if cut.is_set():
                    raise ConnectionResetError("cut")
                kind, value = getting.result()
                yield self._event(**{kind: value})
                if kind == "end":
                    yield ENVELOPE.pack(END_OF_STREAM, 2) + b"{}"
                    return
        finally:
            getting.cancel()
            cutting.cancel()
            self._streams.discard(cut)
            session.outputs.discard(output)
            # The pump may be waiting for space in it.
            while not output.empty():
                output.get_nowait()

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

    def _session(self, request: Request, message: Any) -> Session | None:
        machine = self._machine(request)
        assert machine is not None
        return machine.sessions.get(message.session.session_uuid)

    async def send_input(self, request: Request) -> Response:
        if denied := self._denied(request, "SendInput"):
            return denied
        message = self.messages.SendInputRequest()
        message.ParseFromString(await request.body())
        session = self._session(request, message)
        if session is None or session.exit is not None or session.process.stdin is None:
            return JSONResponse({"code": "not_found", "message": "no such process"}, 404)
        if message.input_uuid not in session.inputs:
            session.inputs.add(message.input_uuid)
            try:
                session.process.stdin.write(message.input.stdin)
                await session.process.stdin.drain()
            except OSError:
                return JSONResponse({"code": "not_found", "message": "it has ended"}, 404)
        return Response(b"", media_type="application/proto")

    async def send_signal(self, request: Request) -> Response:
        if denied := self._denied(request, "SendSignal"):
            return denied
        message = self.messages.SendSignalRequest()
        message.ParseFromString(await request.body())
        session = self._session(request, message)
        if session is not None and session.exit is None:
            # nsenter waits for the program.
            for program in _children(session.process.pid):
                os.kill(program, message.signal)
        return Response(b"", media_type="application/proto")


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
