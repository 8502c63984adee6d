"""What opens sandboxes, and what a sandbox is to everything above: a byte stream, files in and out, an end.

Nothing above this room knows what Docker is, nor how a stream was made. What a sandbox *is* (image, limits,
network) stands in `SandboxSpec`; what is *done* in it (task, set-up) does not.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Literal, Protocol, Self

from anyio.abc import ByteStream

from decathlon_mcp.types import Network

Isolation = Literal["none", "container"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What one sandbox may use of its host. None: no limit of ours."""

    memory_mib: int | None = 4096
    cpus: float | None = 2.0
    pids: int | None = 1024
    scratch_mib: int = 1024
    """Size of the sandbox's own /tmp."""


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What a sandbox is.

    `name` is unique for the life of the server ([a-z0-9-], at most 63 characters). `command` is the first
    process. `root` is where the suite lives inside; a provider that cannot give every sandbox the same path
    maps it (see `Provider.root`). `environment` is added to the first process's own.
    """

    name: str
    command: tuple[str, ...]
    root: PurePosixPath
    image: str | None = None
    network: Network = "none"
    limits: Limits = field(default_factory=Limits)
    environment: tuple[tuple[str, str], ...] = ()


class Sandbox(Protocol):
    """One open sandbox. Its end is the exit of the `async with` that opened it."""

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def root(self) -> PurePosixPath:
        """Where the suite lives, as processes inside see it.

        It exists and is empty, but for what the image put there.
        """
        ...

    @property
    def stream(self) -> ByteStream:
        """stdin and stdout of the first process. Ends with EndOfStream when that process ends."""
        ...

    @property
    def log_tail(self) -> str:
        """The last of what the first process wrote to stderr, at most 8 KiB; whole at the stream's end."""
        ...

    @property
    def out_of_memory(self) -> bool:
        """Was a process inside killed for want of memory? The first may live on; `local` never knows."""
        ...

    @property
    def image_digest(self) -> str | None:
        """What its image is, by content (`sha256:...`); names such an image too. None where there is none."""
        ...

    async def put(self, folder: PurePosixPath, archive: Path | bytes) -> None:
        """Unpack a tar archive (plain or gzip) into `folder`, an absolute path inside; it is made if missing.

        Not below /tmp. What is unpacked belongs to the first process's user, whatever the archive says.
        Raises BadRequestError for an archive that is none, or has a device, a member outside `folder` or a
        relative link that leads out of it; SandboxLostError when the sandbox is gone.
        """
        ...

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        """Pack `folder` into a plain tar at `archive`; member names are relative to `folder` ("./a/b").

        Links are packed as links, sockets are left out; a folder that is not there (or is none) gives an
        archive without members. Works on a paused sandbox. What is in the archive was written by whoever is
        inside: never unpack it on the host. Raises LimitExceededError past `limit_bytes` (then there is no
        `archive`); SandboxLostError when the sandbox is gone.
        """
        ...

    async def pause(self) -> None:
        """Stop every process inside from running, for good; a second time does nothing.

        Raises SandboxLostError when the sandbox is gone.
        """
        ...

    async def cause_of_end(self) -> str | None:
        """Why the first process ended ("out of memory", "exit code 137"); None where that is not known.

        Waits at most 2 s for the news, and not at all while the stream has not ended.
        """
        ...


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `doctor`: `cure` says what to do and is empty when `ok`."""

    what: str
    ok: bool
    detail: str
    cure: str = ""


def finding(what: str, ok: bool, detail: str, cure: str = "") -> Finding:
    """A finding whose cure is told only where one is needed."""
    return Finding(what, ok, detail, "" if ok else cure)


class Provider(Protocol):
    """Opens sandboxes. Every one it opens carries the label of this server (`owner`).

    It is entered (`async with`) before anything is opened, and left after every sandbox of it has ended. To
    enter it needs nothing of the machine: an engine that is not there is said by `open` and `check`.
    """

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @property
    def name(self) -> str: ...

    @property
    def isolation(self) -> Isolation: ...

    def root(self, spec: SandboxSpec) -> PurePosixPath:
        """The root that a sandbox of this spec will have, known before it is opened."""
        ...

    def shares_loopback(self, spec: SandboxSpec) -> bool:
        """Is the `localhost` of a sandbox of this spec that of the machine it is on?"""
        ...

    def open(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]:
        """A fresh sandbox; removed on exit, on every path.

        Raises ProviderUnavailableError (no engine, within 3 s), ImageError (missing, or no Python in it).
        """
        ...

    async def sweep(self, owner: str) -> int:
        """Remove every sandbox labelled with `owner` that this object did not open; how many there were."""
        ...

    async def check(self, image: str | None) -> list[Finding]:
        """Is this machine ready to open sandboxes (of that image)? Within 3 seconds, never raises."""
        ...
