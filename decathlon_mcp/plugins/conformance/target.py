"""The target of checks, a provider; and the register, the first process and the archives of checks."""

from __future__ import annotations

import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import anyio

from decathlon_mcp.archives.reading import ArchiveReader, Kind, Member
from decathlon_mcp.archives.writing import Entry, archive_chunks
from decathlon_mcp.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from decathlon_mcp.types import Network

ROOT = PurePosixPath("/episode")
_PROBE = """
import json, sys
for line in sys.stdin.buffer:
    try:
        request = json.loads(line)
    except ValueError:
        continue
    if "write" in request:
        with open(request["write"], "w") as file:
            file.write(request["text"])
    if "exit" in request:
        sys.exit(request["exit"])
    print(json.dumps({"python": sys.version_info[:2], "echo": request.get("echo")}), flush=True)
"""
PROBE_COMMAND = ("python3", "-I", "-S", "-u", "-c", _PROBE)
"""First process of most checks. Answers each line of JSON with one; torn lines are ignored.

If the line says so, it writes a file ("write", "text") or exits ("exit").
"""
OUTPUT_BYTES = 32 << 10
"""What a first process that survives can write without a stream and without waiting, see `Sandbox.reopen`."""


LastStep = Literal["none", "pause", "end", "save", "copy"]
"""What a server does to its sandboxes before it is killed: nothing, pause them, or wait for their end.

For providers with snapshots: `save` saves them and opens copies of other names, over and over, until it is
killed. `copy` has each replaced by a copy of the same name. The snapshots are in folders with
"saved-by-server" in their names, next to the provider's own."""


@dataclass(frozen=True, kw_only=True)
class ProviderUnderTest:
    """A provider to check. It must be entered, and have no sandbox open."""

    owner: str
    provider: Provider
    create_second: Callable[[], Provider]
    """Makes another provider of the same owner on the same machine."""
    former_owner: str
    leave_behind: Callable[[Sequence[SandboxSpec], LastStep], Awaitable[None]]
    """Opens sandboxes in a server of `former_owner`, takes each to the given step, and kills the server
    (SIGKILL)."""
    resources: Callable[[], Awaitable[Collection[str]]]
    """Lists all containers, processes and folders of both owners' sandboxes on the machine."""
    scratch: Path
    """An existing folder for archives."""
    image: str | None = None
    root: PurePosixPath = ROOT
    runs_commands: bool = True
    """False for a fake, whose only first process answers as `PROBE_COMMAND` does."""
    survives: bool = True
    network: Network = "none"

    def new_spec(self, command: tuple[str, ...] = PROBE_COMMAND, *, survives: bool = False) -> SandboxSpec:
        """A sandbox with a new name."""
        return SandboxSpec(
            name=f"{self.owner}-{secrets.token_hex(4)}",
            command=command,
            root=self.root,
            image=self.image,
            network=self.network,
            limits=Limits(memory_mib=512),
            survives=survives,
        )

    def python_spec(self, script: str, *, survives: bool = False) -> SandboxSpec:
        """A sandbox whose first process is a Python script."""
        return self.new_spec(("python3", "-I", "-S", "-u", "-c", script), survives=survives)

    async def assert_nothing_left(self) -> None:
        """Assert that this owner has nothing on the machine."""
        remaining = await self.resources()
        assert not remaining, f"left on the machine: {sorted(remaining)}"

    async def wait_until_nothing_left(self) -> None:
        """For removals that nobody waits for; the check's time limit bounds it."""
        while await self.resources():  # noqa: ASYNC110  (nothing reports that a process is gone)
            await anyio.sleep(0.05)


Check = Callable[[ProviderUnderTest], Coroutine[Any, Any, None]]
"""One check."""
Need = Literal["commands", "survival", "snapshots"]
"""What a check needs: commands of any kind, sandboxes that outlive their server, or that can be saved."""
checks: dict[Check, frozenset[Need]] = {}


def registered(*needs: Need, seconds: float = 30) -> Callable[[Check], Check]:
    """Register a check and give it a time limit."""

    def decorate(check: Check) -> Check:
        @wraps(check)
        async def bounded(target: ProviderUnderTest) -> None:
            with anyio.fail_after(seconds):
                await check(target)

        checks[bounded] = frozenset(needs)
        return bounded

    return decorate


def file_entry(name: str, content: bytes = b"", mode: int = 0o644) -> Entry:
    """A file of an archive, owned by nobody in particular."""
    member = Member(name=name, kind=Kind.FILE, size=len(content), mode=mode, user=1234, group=1234)
    return member, (content,)


def link_entry(name: str, target: str, kind: Kind = Kind.SYMLINK) -> Entry:
    return Member(name=name, kind=kind, link=target, mode=0o777), ()


def pack(*entries: Entry) -> bytes:
    """A whole archive."""
    return b"".join(archive_chunks(entries))


async def download(
    sandbox: Sandbox, folder: PurePosixPath, archive: Path, limit_bytes: int = 1 << 28
) -> dict[str, tuple[Member, bytes]]:
    """What `Sandbox.get` packed: each member and its content, by its name without "./"."""
    await sandbox.get(folder, archive, limit_bytes)
    return {
        member.name.removeprefix("./").rstrip("/"): (member, content)
        for member, content in read_archive(archive)
    }


def read_archive(archive: Path) -> list[tuple[Member, bytes]]:
    """Each member of an archive, and its content."""
    with archive.open("rb") as file:
        reader = ArchiveReader.of_file(file)
        return [(member, b"".join(reader.body())) for member in reader]


@contextmanager
def raises(expected: type[Exception], text: str = "") -> Generator[None]:
    message: str | None = None
    try:
        yield
    except expected as error:
        message = str(error)
    assert message is not None, f"{expected.__name__} was not raised"
    assert text in message, f"{message!r} does not mention {text!r}"


class Probe:
    """Talks to `PROBE_COMMAND` in a sandbox. `reopened`: torn and old lines may come before an answer."""

    def __init__(self, sandbox: Sandbox, *, reopened: bool = False) -> None:
        self._sandbox = sandbox
        self._reopened = reopened

    async def ping(self) -> None:
        await self._request({})

    async def write(self, path: PurePosixPath, text: str) -> None:
        await self._request({"write": str(path), "text": text})

    async def _request(self, request: dict[str, str]) -> None:
        token = secrets.token_hex(8)
        # The line feed ends a torn line.
        await self._sandbox.stream.send(b"\n" + json.dumps(request | {"echo": token}).encode() + b"\n")
        reply: Any = None
        while reply is None:
            for line in (await receive_line(self._sandbox)).split("\n"):
                with suppress(*[ValueError] * self._reopened):
                    answer = json.loads(line)
                    if answer["echo"] == token or not self._reopened:
                        reply = answer
        assert reply["python"] >= [3, 10]
        assert reply["echo"] == token


async def receive_line(sandbox: Sandbox) -> str:
    """The next line of the first process, without its end. Nothing may follow it yet."""
    data = b""
    while not data.endswith(b"\n"):
        data += await sandbox.stream.receive()
    return data.decode().rstrip("\n")


async def receive_all(sandbox: Sandbox) -> bytes:
    """Everything that the first process still writes to stdout."""
    chunks: list[bytes] = []
    with suppress(anyio.EndOfStream):
        while True:
            chunks.append(await sandbox.stream.receive())
    return b"".join(chunks)
