"""The protocols that providers of sandboxes implement: `Provider` opens, `Sandbox` is an open sandbox.

`conformance` checks an implementation. A spec describes the sandbox (image, limits, network), never the task
that runs in it.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection, Generator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Literal, Protocol, Self

import anyio
from anyio.abc import ByteStream, TaskGroup

from decathlon_mcp.archives.writing import ArchiveSource
from decathlon_mcp.background import run_alone
from decathlon_mcp.errors import BadRequestError, ProviderUnavailableError, SandboxLostError
from decathlon_mcp.types import JsonObject, Network

Isolation = Literal["none", "container", "namespaces"]
"""`container`: of an engine. `namespaces`: of the kernel, without an engine."""
LimitName = Literal["memory", "cpus", "pids"]
"""Limits of a sandbox that a provider may be unable to enforce."""

OUT_OF_MEMORY = "out of memory"
"""Cause of the end of a sandbox that the kernel killed at its memory limit."""
KILLED_INSIDE = "killed by a process inside"
"""Cause of the end of a sandbox whose first process can be killed from within, and was."""
CAUSE_SECONDS = 2.0
"""Limit on `Sandbox.cause_of_end`: a verdict waits for it."""
SCRATCH = PurePosixPath("/tmp")
"""Space for temporary files in a sandbox, which its archives leave out."""
CHECK_SECONDS = 2.8
"""Limit on the work of `Provider.check`, which takes at most 3 s."""
# python3-minimal lacks these modules.
_PYTHON = "import json, subprocess, selectors, sys; sys.exit(sys.version_info < (3, 10))"
PYTHON_CHECK = ("python3", "-I", "-S", "-c", _PYTHON)
"""The argv of a first process that fails where the driver could not run."""
PYTHON_CURE = "the image needs a complete Python 3.10 or later (not python3-minimal) as python3 on its PATH"
_EXIT_CODES_FROM_OUTSIDE = frozenset({"0", "137", "143"})


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use of its host. None means no limit set by this server."""

    memory_mib: int | None = 4096
    cpus: float | None = 2.0
    pids: int | None = 1024
    scratch_mib: int = 1024
    """Size of the sandbox's own /tmp."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """Describes one sandbox."""

    name: str
    """Unique for the life of the server ([a-z0-9-], at most 63 characters)."""
    command: tuple[str, ...]
    """The argv of the first process."""
    root: PurePosixPath
    """Absolute folder inside with the suite; mapped by a provider with different paths (see
    `Provider.root`)."""
    image: str | None = None
    network: Network = "none"
    limits: Limits = field(default_factory=Limits)
    survives: bool = False
    """Whether the first process goes on when its stream ends or the server dies, until it ends by itself or
    is removed. Otherwise the end of its stdin tells it that the server is gone."""
    merge_pages: bool = False
    """Whether processes inside may fix their addresses and let the kernel merge equal pages of their memory
    with other sandboxes'. Never for a sandbox that grades."""


class Sandbox(Protocol):
    """One open sandbox. It ends when the `async with` that opened it exits."""

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def root(self) -> PurePosixPath:
        """Absolute path of the suite's folder, as processes inside see it.

        The folder exists; it is empty except for what the image put there.
        """
        ...

    @property
    def stream(self) -> ByteStream:
        """stdin and stdout of the first process.

        When that process ends, everything it wrote can still be received, then `receive` raises EndOfStream.
        It must expect that a large write is carried out in part (write(2)), even if it may wait.
        If the sandbox `survives`, the stream can also end alone, and after `send_eof` it may: see `reopen`.
        To use a `streams.DirectStream` costs less.
        """
        ...

    async def reopen(self) -> None:
        """Replace `stream`, which has ended, with a new stream to the first process. Only if it `survives`.

        Bytes that were on their way may be lost, also in the middle of a message, and the new stream may
        begin with the end of an older message. While there is no stream, the first process can write at least
        32 KiB without waiting; a process that must not wait at all writes without blocking.

        Raises SandboxLostError if the first process has ended or is paused for good, and
        ProviderUnavailableError if the engine does not answer; then it can be tried again.
        """
        ...

    @property
    def log_tail(self) -> str:
        """Last part, at most 8 KiB, of the first process's stderr; complete when the stream has ended."""
        ...

    @property
    def image_digest(self) -> str | None:
        """Content address of the image, `sha256:...`, valid as an image name too. None without images."""
        ...

    async def put(self, folder: PurePosixPath, archive: ArchiveSource) -> None:
        """Unpack an archive into `folder`, an absolute path inside; created if missing.

        `folder` must not be /tmp or below. Existing files are replaced. Everything unpacked belongs to the
        first process's user, whatever the archive says.

        Raises BadRequestError if the archive is broken, contains anything but files, folders and links, or
        has a member or a relative link that leads out of `folder`, or if a file is where a folder is needed
        or the reverse; SandboxLostError if the sandbox is gone. After an error, some members may be there.
        """
        ...

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        """Pack `folder`, an absolute path inside, into a plain tar at `archive` on the host.

        Member names are relative to `folder`: "./a/b", or "a/b" without a member for `folder` itself. Links
        are packed as links, sockets are left out. A missing `folder`, or a path that is no folder, gives an
        archive without members. Works on a paused sandbox. The archive is untrusted: read it with
        `decathlon_mcp.archives`, never unpack it on the host.

        Raises LimitExceededError if the archive exceeds `limit_bytes` (then there is no file at `archive`);
        SandboxLostError if the sandbox is gone.
        """
        ...

    async def pause(self) -> None:
        """Stop all processes inside, permanently. A second call does nothing.

        Raises SandboxLostError if the sandbox is gone.
        """
        ...

    async def cause_of_end(self) -> str | None:
        """Why the first process ended ("out of memory", "exit code 137"); None if that is not known.

        Returns at once while the stream has not ended, else within 2 s. The exit code of a sandbox that was
        reattached may be unknown.
        """
        ...

    async def is_running(self) -> bool:
        """Whether the first process runs and is not paused; within 5 s, False if nobody can tell."""
        ...


def ended_from_inside(error: SandboxLostError) -> bool:
    """Whether what ran in a sandbox may have ended it: by its memory, or by a fault of its first process.

    Also if the first process runs and neither answers nor keeps to the protocol (`running`). False for an
    engine that is gone, for a first process that lost its server (exit code 0) or was killed from outside
    (137, 143), and for a sandbox whose end nobody can explain.
    """
    if error.data.get("running") is True:
        return True
    # Linux does not let the first process of a container be killed from within: it ignores signals, and
    # SIGKILL does not reach the first process of a PID namespace (pid_namespaces(7)).
    cause = str(error.data.get("cause") or "")
    code = cause.removeprefix("exit code ")
    return cause in (OUT_OF_MEMORY, KILLED_INSIDE) or (code != cause and code not in _EXIT_CODES_FROM_OUTSIDE)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`. `cure` says what to do; a check that is `ok` and has a cure is a warning.

    `required`: whether a server does not start unless this is `ok`.
    """

    what: str
    ok: bool
    detail: str
    cure: str = ""
    required: bool = True

    @property
    def is_problem(self) -> bool:
        """Whether there is something to do: also for a warning, after which a server works."""
        return not self.ok or bool(self.cure)

    @property
    def sentence(self) -> str:
        """The detail with the cure, on one line of an error or a log."""
        if not self.cure or self.cure in self.detail:
            return self.detail
        return f"{self.detail}; {self.cure}"

    def to_json(self) -> JsonObject:
        """The entry in the output of `doctor --json` and `tasks --check --json`."""
        return {"what": self.what, "ok": self.ok, "detail": self.detail, "cure": self.cure}


def finding(what: str, ok: bool, detail: str, cure: str = "", *, required: bool = True) -> Finding:
    """A finding that keeps `cure` only if it is not `ok`."""
    return Finding(what, ok, detail, "" if ok else cure, required)


@contextmanager
def limited_check(findings: list[Finding]) -> Generator[None]:
    """Ends the body early enough for `Provider.check`; a finding then says that checks are missing."""
    with anyio.move_on_after(CHECK_SECONDS) as scope:
        yield
    if scope.cancelled_caught:
        cure = "try again when the machine is less busy"
        findings.append(Finding("time", False, "the checks did not finish within 3 s", cure, required=False))


async def check_python(
    open_sandbox: Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]], image: str | None, cure: str
) -> Finding:
    """Open a sandbox that checks its own Python. Raises ImageError, ProviderUnavailableError."""
    name, root = f"check-{secrets.token_hex(8)}", PurePosixPath("/decathlon")
    spec = SandboxSpec(name, PYTHON_CHECK, root, image, limits=Limits(memory_mib=256))
    async with open_sandbox(spec) as sandbox:
        async for _ in sandbox.stream:
            pass
        cause = await sandbox.cause_of_end()
    suitable = cause == "exit code 0"
    return finding("python3", suitable, "3.10 or later" if suitable else f"unsuitable: {cause}", cure)


class Provider(Protocol):
    """Opens sandboxes, each labelled with the `owner` that the provider was created with.

    Enter it (`async with`) before opening a sandbox and exit it after the last sandbox has ended. Entering
    needs nothing of the machine: a missing engine is reported by `open` and `check`.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def isolation(self) -> Isolation: ...

    @property
    def unlimited(self) -> tuple[LimitName, ...]:
        """Limits of a spec that this provider cannot enforce here, although it isolates."""
        ...

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        """The root that a sandbox of this spec will have, known before it is opened."""
        ...

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        """Whether `localhost` inside a sandbox of this spec is the host's own."""
        ...

    @property
    def is_available(self) -> bool:
        """False while it is known that no sandbox can be opened, because the engine is gone."""
        ...

    async def environment(self, image: str | None) -> str | None:
        """Identifies what programs find in a sandbox of that image, before one is open.

        With images it is the `Sandbox.image_digest` of the next one. Without, it is a text that changes when
        the programs of the machine do, as far as that is seen within some milliseconds. None if it is not
        known; never raises.
        """
        ...

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Open a new sandbox. On exit, after errors and cancellation too, all of it is removed.

        Removal is bounded in time; a failure to remove is logged, never raised.

        Raises ProviderUnavailableError within 3 s if there is no engine; ImageError if the image is missing
        or has no suitable program for `command`; BadRequestError if the name is in use.
        """
        ...

    def reattach(self, owner: str, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """Continue a sandbox that a server labelled `owner` opened with this spec, and that survived it.

        No other server may have it open. On exit it is removed, as after `open`. A paused sandbox is
        reattached paused: files can be copied from it, and its stream has ended.

        Raises SandboxLostError if there is none or its first process has ended; it is then removed.
        Raises ProviderUnavailableError if the engine does not answer; it is then kept, and this can be tried
        again. Raises BadRequestError if this object has it open already.
        """
        ...

    async def sweep(self, owner: str, *, keep: Collection[str] = ()) -> int:
        """Remove the sandboxes labelled with `owner`; returns their number.

        Except sandboxes that this object has opened or reattached, and sandboxes with a name in `keep`.
        Sandboxes that this object could not remove at their end are removed too.

        Raises ProviderUnavailableError if the engine does not answer, or if some could not be removed: all
        have been tried then.
        """
        ...

    async def check(self, image: str | None) -> list[Finding]:
        """Whether this machine can open sandboxes (of that image). Takes at most 3 s, never raises."""
        ...


def kernel_of(provider: Provider) -> str | None:
    """The name of the kernel of a provider's sandboxes, where it is a choice of its own; see `--kernel`."""
    return getattr(provider, "kernel", None)


def check_folder(folder: PurePosixPath) -> None:
    """Raise BadRequestError for a path of a sandbox that no files can be copied to or from."""
    # Docker's archives do not see what is mounted at `SCRATCH`: files would land beneath, invisible.
    if not folder.is_absolute() or ".." in folder.parts or folder.is_relative_to(SCRATCH):
        raise BadRequestError(f"files are copied to and from absolute paths outside {SCRATCH}, not {folder}")


def check_swept(remaining: Collection[str]) -> None:
    """Raise ProviderUnavailableError if a sweep could not remove some sandboxes, given by name or id."""
    if remaining:
        raise ProviderUnavailableError(
            f"{len(remaining)} sandboxes could not be removed, {min(remaining)} among them: see the log"
        )


async def remove_all(orphans: Collection[str], remove: Callable[[str], Awaitable[bool]]) -> int:
    """Remove sandboxes, all at once; returns their number. Raises as `check_swept`.

    `remove` takes a name or an id, and returns whether that sandbox is gone.
    """
    removed: set[str] = set()

    async def try_one(orphan: str) -> None:
        if await remove(orphan):
            removed.add(orphan)

    async with anyio.create_task_group() as tasks:
        for orphan in orphans:
            tasks.start_soon(run_alone, try_one, orphan)
    check_swept({*orphans} - removed)
    return len(removed)


class BaseProvider:
    """What providers of this package share: tasks in the background, and the names of open sandboxes."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._open_names: set[str] = set()
        self._task_group: TaskGroup | None = None

    async def __aenter__(self) -> Self:
        self._task_group = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        # Not given the error: the task group would wrap it in an exception group.
        await self._tasks.__aexit__(None, None, None)

    @property
    def _tasks(self) -> TaskGroup:
        assert self._task_group is not None, "the provider has not been entered"
        return self._task_group

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        return spec.root

    @property
    def is_available(self) -> bool:
        return True

    def _check_name(self, name: str) -> None:
        """Raises BadRequestError if a sandbox of this name cannot be opened."""
        if name in self._open_names:
            raise BadRequestError(f"there is already a sandbox named {name}")
