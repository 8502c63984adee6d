"""One sandbox that is a container: its attached stream, its files, its exit."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path, PurePosixPath
from typing import TypeVar

import anyio
from anyio import to_thread
from anyio.abc import ByteStream
from decathlon_sandbox import wire
from docker.errors import APIError, NotFound

from decathlon_mcp.archives.packing import counted
from decathlon_mcp.archives.unpacking import with_owner
from decathlon_mcp.archives.writing import ArchiveSource, empty_archive, pack_empty_folders, save
from decathlon_mcp.errors import (
    BadRequestError,
    DecathlonError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.plugins.docker.container import Container
from decathlon_mcp.plugins.docker.engine import (
    FOLDER_BIT,
    RESTART_SECONDS,
    Api,
    Engine,
    check_readable,
    engine_message,
    followed,
    get_archive,
    log_refusal,
    put_archive,
    raise_api_error,
    refusal,
)
from decathlon_mcp.plugins.docker.exit_events import ContainerExit
from decathlon_mcp.sandboxes.base import CAUSE_SECONDS, SandboxSpec, check_folder
from decathlon_mcp.sandboxes.capabilities import MEASURE_SECONDS, Usage
from decathlon_mcp.sandboxes.streams import EndedStream, LogTail, ReadAhead, SocketStream
from decathlon_mcp.types import as_object

PAUSE_RETRY_SECONDS = (0.05, 0.2, 0.5, 1.0, 2.0)
"""On a busy machine with cgroup v1, the kernel may not stop all processes in the time that runc allows."""
_CONFLICT = 409
_FAULTS_OF_THE_MACHINE = (
    *("no space left on device", "disk quota exceeded", "read-only file system", "input/output error"),
    *("too many open files", "too many open files in system", "cannot allocate memory"),
    "resource temporarily unavailable",
)
"""Ends of the engine's messages about an archive that it could not unpack, which no path in it caused. What
is in a container can only choose what precedes them."""
_ERRORS_OF_THE_DISK = ("read-only file system", "input/output error")
"""Ends of messages that nothing in a container can cause, however much it uses."""
_FRAME_HEADER_BYTES = 8
_FRAME_COST_BYTES = 256
"""What a frame counts for beside its content: finding its end costs as much as copying some of it."""
_BYTES_PER_SECOND = 8 << 20
"""Limit on stderr and on the costs of frames: reading more would keep the event loop busy."""
_STDERR = 2
_T = TypeVar("_T")


class AttachedStream(SocketStream):
    """stdin and stdout of a container's first process; its stderr is added to `log_tail`.

    The engine multiplexes both outputs: a frame is one byte (1 stdout, 2 stderr), three zero bytes, four of
    length, big-endian (Docker Engine API, "Attach to a container").
    """

    def __init__(self, attached: socket.socket, log_tail: LogTail) -> None:
        super().__init__(attached)
        self._data = ReadAhead(attached.fileno(), self._read_stdout)
        self._log_tail = log_tail
        self._rate = wire.TokenBucket(per_second=_BYTES_PER_SECOND, burst=_BYTES_PER_SECOND)
        self._frames = 0
        self._header = b""
        self._output = 0
        self._frame_remaining = 0

    def _read_stdout(self, size: int) -> bytes:
        """What has arrived of stdout; nothing at the end. Raises BlockingIOError if only other bytes have."""
        chunk = self._raw.recv(size)
        self._frames = 0
        stdout = self._stdout_in(chunk)
        if seconds := self._rate.spend(len(chunk) - len(stdout) + _FRAME_COST_BYTES * self._frames):
            self._data.rest(seconds)
        if chunk and not stdout:
            raise BlockingIOError
        return stdout

    def _stdout_in(self, chunk: bytes) -> bytes:
        """The part of a chunk that is stdout's. Frames begin and end anywhere in it."""
        stdout: list[bytes] = []
        position = 0
        while position < len(chunk):
            if not self._frame_remaining:
                missing = _FRAME_HEADER_BYTES - len(self._header)
                self._header += chunk[position : position + missing]
                position += missing
                if len(self._header) == _FRAME_HEADER_BYTES:
                    self._frames += 1
                    self._output = self._header[0]
                    self._frame_remaining = int.from_bytes(self._header[4:], "big")
                    self._header = b""
                continue
            content = chunk[position : position + self._frame_remaining]
            position += len(content)
            self._frame_remaining -= len(content)
            if self._output == _STDERR:
                self._log_tail.add(content)
            else:
                stdout.append(content)
        return b"".join(stdout)


class DockerSandbox:
    """See `base.Sandbox`."""

    def __init__(self, engine: Engine, container: Container, container_exit: ContainerExit) -> None:
        self._engine = engine
        self._container = container
        self._exit = container_exit
        self._log_tail = LogTail()
        self._closed = False
        self._stream = self._new_stream(container.socket)

    @property
    def spec(self) -> SandboxSpec:
        return self._container.spec

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

    @property
    def stream(self) -> ByteStream:
        # None: it was reattached paused.
        return self._stream or EndedStream()

    async def reopen(self) -> None:
        await self.stream.aclose()
        if self._exit.ended.is_set():
            cause = self._exit.cause
            raise SandboxLostError(f"the sandbox's first process has ended ({cause})", cause=cause)
        self._stream = self._new_stream(await self.request(self._container.attach))

    def _new_stream(self, attached: socket.socket | None) -> AttachedStream | None:
        return AttachedStream(attached, self._log_tail) if attached else None

    @property
    def log_tail(self) -> str:
        return str(self._log_tail)

    @property
    def container_id(self) -> str:
        return self._container.id

    @property
    def image_digest(self) -> str | None:
        return self._container.image_digest

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        check_folder(folder)
        user, group = self._container.user

        def put(api: Api) -> None:
            if folder != self.root:  # which was created with the container
                _create_folders(api, self._container.id, folder, user, group)
            chunks = self._while_open(with_owner(archive, user, group))
            put_archive(api, self._container.id, str(folder), chunks)

        error = await self._repeat(lambda api: self._refusal_of_path(api, lambda: put(api)))
        if error is None:
            return
        if engine_message(error).lower().endswith(_FAULTS_OF_THE_MACHINE):
            failure = refusal(error)
            if engine_message(error).lower().endswith(_ERRORS_OF_THE_DISK):
                failure.data["outside"] = "the engine's disk failed"
            raise failure from error
        raise BadRequestError(
            f"cannot unpack into {folder}: it is no folder, or a file is where the archive has a folder, or "
            "the reverse"
        ) from error

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        check_folder(folder)

        def get(api: Api) -> None:
            # With "/.", member names are relative to the folder, and a link to a folder is followed.
            with closing(get_archive(api, self._container.id, f"{folder}/.")) as chunks:
                save(counted(self._while_open(chunks)), archive, limit_bytes)

        if await self._repeat(lambda api: self._refusal_of_path(api, lambda: get(api))):
            await to_thread.run_sync(lambda: save(empty_archive(), archive, limit_bytes))

    async def pause(self) -> None:
        def pause(api: Api) -> bool:
            try:
                api.pause(self._container.id)
            except APIError as error:
                message = engine_message(error)
                if "unable to freeze" in message:
                    return False
                if "already paused" not in message:
                    raise
            return True

        for pause_seconds in (0, *PAUSE_RETRY_SECONDS):
            await anyio.sleep(pause_seconds)
            if await self._repeat(pause):
                return
        raise ProviderUnavailableError("the engine could not stop the processes of a sandbox")

    async def cause_of_end(self) -> str | None:
        if self._stream is not None and self._stream.ended.is_set():
            with anyio.move_on_after(CAUSE_SECONDS):
                await self._exit.ended.wait()
        return self._exit.cause

    async def is_running(self) -> bool:
        def is_running(api: Api) -> bool:
            state = api.inspect_container(self._container.id)["State"]
            return bool(state["Running"]) and not state["Paused"]

        with anyio.move_on_after(5), suppress(DecathlonError):
            return await self.request(is_running)
        return False

    async def usage(self, sandboxes: int) -> Usage:
        """See `MeasuredSandbox`."""

        def measure(api: Api) -> Usage:
            facts = api.stats(self._container.id, stream=False, one_shot=True)
            memory = as_object(facts.get("memory_stats")) or {}
            pids = as_object(facts.get("pids_stats")) or {}
            # For what it has written, the engine looks at each file.
            url = f"{api.base_url}/v{api.api_version}/containers/{self._container.id}/json"
            response = api.get(url, params={"size": "1"}, timeout=MEASURE_SECONDS, stream=False)
            raise_api_error(response)
            try:
                share = shutil.disk_usage(str(api.info()["DockerRootDir"])).total // max(1, sandboxes)
            except (OSError, KeyError):  # an engine on another machine
                share = None
            return Usage(
                _part(memory.get("usage"), memory.get("limit")),
                _part(pids.get("current"), pids.get("limit")),
                _part(response.json().get("SizeRw"), share),
            )

        return await self.request(measure)

    def mark_closed(self) -> None:
        """From now on, methods raise SandboxLostError."""
        self._closed = True

    def _while_open(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        # A transfer that continued after the sandbox's end would delay the container's removal.
        for chunk in chunks:
            if self._closed:
                raise SandboxLostError("the sandbox was closed")
            yield chunk

    def _refusal_of_path(self, api: Api, call: Callable[[], None]) -> APIError | None:
        """Make a call about a path inside; the engine's refusal, if the path is its cause.

        Raises APIError if the engine cannot read the container at all.
        """
        # What is at the path is up to the processes inside: the engine may refuse it with any status and
        # message, and neither says whose fault it is. A refusal that has passed when the call is made again
        # was not about the path.
        try:
            call()
        except APIError:
            check_readable(api, self._container.id)
        else:
            return None
        try:
            call()
        except APIError as error:
            log_refusal(error)
            return error
        return None

    async def _repeat(self, call: Callable[[Api], _T]) -> _T:
        """As `request`, for a call that can be made again: it waits for an engine that restarts.

        Only if the sandbox survives, because other containers end with their engine.
        """
        deadline = anyio.current_time() + (RESTART_SECONDS if self.spec.survives else 0)
        while True:
            try:
                return await self.request(call)
            except ProviderUnavailableError as error:
                await self._engine.wait_for_restart(error, deadline)

    async def request(self, call: Callable[[Api], _T]) -> _T:
        """Make a call to the engine. Raises SandboxLostError if the container is gone."""
        if self._closed:
            raise SandboxLostError("the sandbox has been closed")
        try:
            return await self._engine.run(call, abandon=True)
        except APIError as error:
            gone = "is not running" in engine_message(error)
            if gone or isinstance(error, NotFound) or self._exit.ended.is_set():
                cause = self._exit.cause
                log_refusal(error)
                raise SandboxLostError(
                    f"the sandbox is gone{f' ({cause})' if cause else ''}", cause=cause
                ) from error
            raise refusal(error) from error


def _part(used: object, limit: object) -> float | None:
    return used / limit if isinstance(used, int) and isinstance(limit, int) and limit > 0 else None


def _create_folders(api: Api, container: str, folder: PurePosixPath, user: int, group: int) -> None:
    """Create a folder and its parents where they are missing."""
    names: list[str] = []
    existing = folder
    while existing.name and not (followed(api, container, str(existing))[1] or 0) & FOLDER_BIT:
        names.insert(0, existing.name)
        existing = existing.parent
    if names:
        paths = ["/".join(names[: count + 1]) for count in range(len(names))]
        put_archive(api, container, str(existing), pack_empty_folders(paths, user=user, group=group))
