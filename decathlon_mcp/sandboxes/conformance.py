"""Checks that every provider of sandboxes must pass.

Each check is a coroutine that takes a `ProviderUnderTest` and raises AssertionError, or whatever the provider
raised, if it fails. They need no test framework:

    async with provider:
        failures = await failed_checks(ProviderUnderTest(provider=provider, ...))

With pytest, one test for each check:

    @pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
    async def test_provider_conforms(check: Check, target: ProviderUnderTest) -> None:
        await check(target)

The checks run on asyncio, since one of them cancels a task the way asyncio does. Every check has a time limit
of its own (TimeoutError). All of them together take one to two minutes with containers.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import anyio

from decathlon_mcp.archives.reading import ArchiveReader, Kind, Member
from decathlon_mcp.archives.writing import Entry, archive_chunks
from decathlon_mcp.errors import BadRequestError, LimitExceededError, SandboxLostError
from decathlon_mcp.sandboxes.base import Limits, Provider, Sandbox, SandboxSpec
from decathlon_mcp.sandboxes.streams import LOG_TAIL_BYTES

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


LastStep = Literal["none", "pause", "end"]
"""What a server does to its sandboxes before it is killed: nothing, pause them, or wait for their end."""


@dataclass(frozen=True, kw_only=True)
class ProviderUnderTest:
    """A provider to check. It must be entered, and have no sandbox open.

    `create_second` makes another provider of the same owner on the same machine. `leave_behind` opens
    sandboxes in a server with the owner `former_owner` and kills that server with SIGKILL, after it has done
    to each what the given step says. `resources` lists everything on the machine that belongs to both owners'
    sandboxes (containers, processes, folders). `scratch` is an existing folder for archives. `runs_commands`
    is false for a fake, whose only first process is one that answers as `PROBE_COMMAND` does. `survives` is
    that of the provider's `ProviderPlugin`.
    """

    owner: str
    provider: Provider
    create_second: Callable[[], Provider]
    former_owner: str
    leave_behind: Callable[[Sequence[SandboxSpec], LastStep], Awaitable[None]]
    resources: Callable[[], Awaitable[Collection[str]]]
    scratch: Path
    image: str | None = None
    root: PurePosixPath = ROOT
    runs_commands: bool = True
    survives: bool = True

    def new_spec(self, command: tuple[str, ...] = PROBE_COMMAND, *, survives: bool = False) -> SandboxSpec:
        """A sandbox with a new name."""
        return SandboxSpec(
            name=f"{self.owner}-{secrets.token_hex(4)}",
            command=command,
            root=self.root,
            image=self.image,
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
_checks: list[Check] = []
_command_checks: list[Check] = []
_survival_checks: list[Check] = []


def _check(
    *, seconds: float = 30, commands: bool = False, survival: bool = False
) -> Callable[[Check], Check]:
    """Register a check and give it a time limit.

    `commands`: it needs a provider that runs commands. `survival`: one whose sandboxes outlive their server.
    """

    def register(check: Check) -> Check:
        @wraps(check)
        async def bounded(target: ProviderUnderTest) -> None:
            with anyio.fail_after(seconds):
                await check(target)

        (_command_checks if commands else _checks).append(bounded)
        if survival:
            _survival_checks.append(bounded)
        return bounded

    return register


def checks_for(*, runs_commands: bool = True, survives: bool = True) -> tuple[Check, ...]:
    """The checks that apply; see the fields of `ProviderUnderTest` of the same names."""
    return tuple(
        check
        for check in (ALL_CHECKS if runs_commands else CHECKS)
        if survives or check not in SURVIVAL_CHECKS
    )


async def failed_checks(target: ProviderUnderTest) -> Mapping[str, Exception]:
    """Run all checks that apply; the errors of those that failed, by name. Empty if the provider conforms."""
    failures: dict[str, Exception] = {}
    for check in checks_for(runs_commands=target.runs_commands, survives=target.survives):
        try:
            await check(target)
        except Exception as error:  # noqa: BLE001  (reported, whatever it is)
            failures[check.__name__] = error
    return failures


@contextmanager
def _raises(expected: type[Exception], text: str = "") -> Generator[None]:
    message: str | None = None
    try:
        yield
    except expected as error:
        message = str(error)
    assert message is not None, f"{expected.__name__} was not raised"
    assert text in message, f"{message!r} does not mention {text!r}"


class _Probe:
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
        for member, content in _read_archive(archive)
    }


def _read_archive(archive: Path) -> list[tuple[Member, bytes]]:
    with archive.open("rb") as file:
        reader = ArchiveReader.of_file(file)
        return [(member, b"".join(reader.body())) for member in reader]


# Opening and ending


@_check()
async def first_process_answers_on_the_stream(target: ProviderUnderTest) -> None:
    """The first process receives what is sent, answers on the stream, and is Python 3.10 or later."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await _Probe(sandbox).ping()
        await _Probe(sandbox).ping()


@_check()
async def root_is_known_before_opening(target: ProviderUnderTest) -> None:
    """`Provider.root` gives the absolute root that the sandbox then has."""
    spec = target.new_spec()
    root = target.provider.root(spec)
    async with target.provider.open(spec) as sandbox:
        assert sandbox.root == root
        assert sandbox.root.is_absolute()
        assert sandbox.spec is spec


@_check()
async def environment_is_known_before_opening(target: ProviderUnderTest) -> None:
    """`Provider.environment` is the digest of the image that the sandbox then has; it stays the same."""
    environment = await target.provider.environment(target.image)
    async with target.provider.open(target.new_spec()) as sandbox:
        assert sandbox.image_digest in (None, environment)
    assert await target.provider.environment(target.image) == environment


@_check()
async def end_of_input_ends_the_first_process(target: ProviderUnderTest) -> None:
    """After `send_eof` the first process exits, the stream ends, and the cause is its exit code."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await _Probe(sandbox).ping()
        assert await sandbox.cause_of_end() is None
        await sandbox.stream.send_eof()
        assert await receive_all(sandbox) == b""
        assert await sandbox.cause_of_end() == "exit code 0"


@_check()
async def nothing_is_left_after_exit(target: ProviderUnderTest) -> None:
    """When the context manager has exited, the sandbox is removed."""
    async with target.provider.open(target.new_spec()):
        assert await target.resources()
    await target.assert_nothing_left()


@_check()
async def error_inside_propagates_and_nothing_is_left(target: ProviderUnderTest) -> None:
    """An error raised while the sandbox is open comes out unchanged, and the sandbox is removed."""
    with _raises(KeyError, "mine"):
        async with target.provider.open(target.new_spec()):
            raise KeyError("mine")
    await target.assert_nothing_left()


@_check()
async def name_in_use_is_refused(target: ProviderUnderTest) -> None:
    """A second sandbox of the same name is refused, and the first one is not affected."""
    spec = target.new_spec()
    async with target.provider.open(spec) as sandbox:
        with _raises(BadRequestError, "already"):
            async with target.provider.open(spec):
                pass
        await _Probe(sandbox).ping()


@_check(seconds=60)
async def many_sandboxes_open_and_end_at_once(target: ProviderUnderTest) -> None:
    """Twelve sandboxes open and answer side by side, then end in the same moment, half of them cancelled."""
    all_answered, to_be_cancelled = anyio.Event(), anyio.CancelScope()
    answered = 0

    async def one() -> None:
        nonlocal answered
        async with target.provider.open(target.new_spec()) as sandbox:
            await _Probe(sandbox).ping()
            answered += 1
            if answered == 12:
                all_answered.set()
                to_be_cancelled.cancel()
            await all_answered.wait()

    async with anyio.create_task_group() as tasks:

        async def cancelled_ones() -> None:
            with to_be_cancelled:
                async with anyio.create_task_group() as cancelled:
                    for _ in range(6):
                        cancelled.start_soon(one)

        tasks.start_soon(cancelled_ones)
        for _ in range(6):
            tasks.start_soon(one)
    await target.assert_nothing_left()


@_check()
async def closed_sandbox_is_lost(target: ProviderUnderTest) -> None:
    """After its end, every method that needs the sandbox raises SandboxLostError."""
    async with target.provider.open(target.new_spec()) as sandbox:
        pass
    with _raises(SandboxLostError):
        await sandbox.get(sandbox.root, target.scratch / "out.tar", 1 << 20)
    with _raises(SandboxLostError):
        await sandbox.put(sandbox.root, pack())
    with _raises(SandboxLostError):
        await sandbox.pause()


@_check(seconds=60)
async def sweep_removes_sandboxes_of_other_providers_only(target: ProviderUnderTest) -> None:
    """`sweep` removes this owner's sandboxes that another provider opened, and spares its own."""
    async with target.create_second() as second, second.open(target.new_spec()) as orphan:
        async with target.provider.open(target.new_spec()) as sandbox:
            assert await target.provider.sweep(target.owner) == 1
            assert await target.provider.sweep(target.owner) == 0
            assert await target.provider.sweep(f"not-{target.owner}") == 0
            await _Probe(sandbox).ping()
        assert await receive_all(orphan) == b""
    await target.assert_nothing_left()


@_check(seconds=10)
async def ready_machine_passes_the_providers_own_check(target: ProviderUnderTest) -> None:
    """`Provider.check` finds this machine ready, with nothing to do."""
    findings = await target.provider.check(target.image)
    assert findings
    assert [finding for finding in findings if not finding.ok or finding.cure] == []


# Cancellation


@_check(seconds=120)
async def cancelled_opening_leaves_nothing(target: ProviderUnderTest) -> None:
    """An opening that is cancelled at any moment, by a cancel scope, leaves nothing behind."""

    async def cancel(opening: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        with anyio.move_on_after(seconds):
            await opening()

    await _cancel_at_stepped_moments(target, cancel)


@_check(seconds=120)
async def cancelled_task_leaves_nothing(target: ProviderUnderTest) -> None:
    """An opening whose asyncio task is cancelled at any moment leaves nothing behind."""

    # Frameworks cancel tasks themselves. Unlike a scope's, this cancellation ignores anyio's shields.
    async def cancel(opening: Callable[[], Coroutine[Any, Any, None]], seconds: float) -> None:
        task = asyncio.create_task(opening())
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()):
            raise error

    await _cancel_at_stepped_moments(target, cancel)


async def _cancel_at_stepped_moments(
    target: ProviderUnderTest,
    cancel: Callable[[Callable[[], Coroutine[Any, Any, None]], float], Awaitable[None]],
) -> None:
    """Cancel an opening and its first answer after ever longer waits, until one is not cancelled."""
    finished = False

    async def opening() -> None:
        nonlocal finished
        async with target.provider.open(target.new_spec()) as sandbox:
            await _Probe(sandbox).ping()
        finished = True

    for step in range(60):
        await cancel(opening, step * 0.012)
        # An exit that is itself cancelled does not wait until killed processes are gone.
        await target.wait_until_nothing_left()
        if finished and step > 5:
            break
    assert finished


# Streams that are reopened


@_check(survival=True)
async def reopened_stream_reaches_the_same_first_process(target: ProviderUnderTest) -> None:
    """A sandbox that survives goes on when its stream is closed, and new streams reach its first process."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await _Probe(sandbox).ping()
        for _ in range(3):
            closed = sandbox.stream
            await closed.aclose()
            await sandbox.reopen()
            assert sandbox.stream is not closed
            await _Probe(sandbox, reopened=True).ping()
        assert await sandbox.is_running()
        assert await sandbox.cause_of_end() is None
    await target.assert_nothing_left()


@_check(survival=True)
async def stream_cut_inside_a_message_is_reopened(target: ProviderUnderTest) -> None:
    """Messages that were cut in either direction do not prevent what is sent after a line feed."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        for cut in (b'{"echo', b'{"echo": 1}\n{"echo": 2}\n{"ec'):
            await sandbox.stream.send(cut)
            await sandbox.stream.aclose()
            await sandbox.reopen()
            await _Probe(sandbox, reopened=True).ping()


@_check(survival=True)
async def stream_with_unread_answers_is_reopened(target: ProviderUnderTest) -> None:
    """What was sent is done though nobody receives the answer, and the next stream works."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        request = {"write": str(sandbox.root / "file"), "text": "done"}
        await sandbox.stream.send(json.dumps(request).encode() + b"\n")
        await _wait_for_file(target, sandbox, "file")
        await sandbox.stream.aclose()
        await sandbox.reopen()
        await _Probe(sandbox, reopened=True).ping()


async def _wait_for_file(target: ProviderUnderTest, sandbox: Sandbox, name: str) -> None:
    while name not in await download(sandbox, sandbox.root, target.scratch / "out.tar"):  # noqa: ASYNC110
        await anyio.sleep(0.05)


@_check(survival=True)
async def end_of_input_does_not_end_a_sandbox_that_survives(target: ProviderUnderTest) -> None:
    """After `send_eof` the first process goes on, and the stream can be reopened."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await _Probe(sandbox).ping()
        await sandbox.stream.send_eof()
        await sandbox.reopen()
        await _Probe(sandbox, reopened=True).ping()


@_check(survival=True)
async def stream_of_an_ended_sandbox_is_not_reopened(target: ProviderUnderTest) -> None:
    """When the first process has ended by itself, `reopen` raises SandboxLostError."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await _Probe(sandbox).ping()
        await sandbox.stream.send(b'{"exit": 3}\n')
        assert await receive_all(sandbox) == b""
        with _raises(SandboxLostError):
            await sandbox.reopen()
        assert await sandbox.cause_of_end() == "exit code 3"
        assert not await sandbox.is_running()
    await target.assert_nothing_left()


@_check(survival=True)
async def stream_of_a_paused_sandbox_is_not_reopened(target: ProviderUnderTest) -> None:
    """`reopen` of a paused sandbox raises SandboxLostError."""
    async with target.provider.open(target.new_spec(survives=True)) as sandbox:
        await sandbox.pause()
        with _raises(SandboxLostError):
            await sandbox.reopen()
    await target.assert_nothing_left()


@_check(commands=True, survival=True)
async def output_without_a_stream_does_not_stop_the_first_process(target: ProviderUnderTest) -> None:
    """32 KiB to each of stdout and stderr that nobody receives do not keep the first process waiting."""
    script = f"""
import sys, time
print("ready", flush=True)
time.sleep(0.5)
sys.stdout.write("o" * {OUTPUT_BYTES - 1} + "\\n")
sys.stderr.write("e" * {OUTPUT_BYTES})
open("done", "w").close()
print("answer", input())
input()
"""
    async with target.provider.open(target.python_spec(script, survives=True)) as sandbox:
        assert await receive_line(sandbox) == "ready"
        await sandbox.stream.aclose()
        await _wait_for_file(target, sandbox, "done")
        await sandbox.reopen()
        await sandbox.stream.send(b"1\n")
        received = b""
        while not received.endswith(b"answer 1\n"):
            received += await sandbox.stream.receive()


# Sandboxes that survive their server


@_check(seconds=60, survival=True)
async def sandbox_is_taken_back(target: ProviderUnderTest) -> None:
    """Another provider continues the sandbox of a killed server: its process, files, exit and removal."""
    spec = target.new_spec(survives=True)
    await target.leave_behind([spec], "none")
    async with target.provider.take_back(target.former_owner, spec) as sandbox:
        assert sandbox.spec is spec
        assert sandbox.root == target.provider.root(spec)
        assert await sandbox.is_running()
        assert await sandbox.cause_of_end() is None
        with _raises(BadRequestError, "already"):
            async with target.provider.take_back(target.former_owner, spec):
                pass
        probe = _Probe(sandbox, reopened=True)
        await sandbox.put(sandbox.root, pack(file_entry("in/file", b"old", mode=0o600)))
        await probe.write(sandbox.root / "in" / "file", "new")
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
        assert listing["in/file"][1] == b"new"
        await sandbox.stream.aclose()
        await sandbox.reopen()
        await probe.ping()
        await sandbox.stream.send(b'{"exit": 3}\n')
        await receive_all(sandbox)
        assert await sandbox.cause_of_end() in ("exit code 3", None)
        assert not await sandbox.is_running()
        with _raises(SandboxLostError):
            await sandbox.reopen()
    await target.assert_nothing_left()


@_check(seconds=60, survival=True)
async def sandbox_that_was_taken_back_is_removed_at_its_exit(target: ProviderUnderTest) -> None:
    """A running sandbox of a killed server is removed with all its processes when it is exited."""
    spec = target.new_spec(survives=True)
    await target.leave_behind([spec], "none")
    async with target.provider.take_back(target.former_owner, spec) as sandbox:
        await _Probe(sandbox, reopened=True).ping()
    await target.assert_nothing_left()


@_check(seconds=60, survival=True)
async def paused_sandbox_is_taken_back_paused(target: ProviderUnderTest) -> None:
    """Files of a paused sandbox of a killed server can be copied; its stream has ended."""
    spec = target.new_spec(survives=True)
    await target.leave_behind([spec], "pause")
    async with target.provider.take_back(target.former_owner, spec) as sandbox:
        assert not await sandbox.is_running()
        assert await receive_all(sandbox) == b""
        await download(sandbox, sandbox.root, target.scratch / "out.tar")
        await sandbox.pause()
        with _raises(SandboxLostError):
            await sandbox.reopen()
    await target.assert_nothing_left()


@_check(seconds=60, survival=True)
async def ended_sandbox_is_not_taken_back(target: ProviderUnderTest) -> None:
    """A sandbox whose first process ended meanwhile is lost, and nothing of it is left."""
    spec = target.new_spec(("python3", "-c", "") if target.runs_commands else PROBE_COMMAND, survives=True)
    await target.leave_behind([spec], "end")
    with _raises(SandboxLostError):
        async with target.provider.take_back(target.former_owner, spec):
            pass
    await target.assert_nothing_left()


@_check(seconds=60, survival=True)
async def unknown_sandbox_is_not_taken_back(target: ProviderUnderTest) -> None:
    """A sandbox that does not exist or belongs to another owner cannot be taken back, and is not touched."""
    with _raises(SandboxLostError):
        async with target.provider.take_back(target.former_owner, target.new_spec(survives=True)):
            pass
    spec = target.new_spec(survives=True)
    async with target.create_second() as second, second.open(spec) as sandbox:
        with _raises(SandboxLostError):
            async with target.provider.take_back(target.former_owner, spec):
                pass
        await _Probe(sandbox).ping()
    await target.assert_nothing_left()


@_check(seconds=60)
async def sandbox_that_does_not_survive_ends_with_its_server(target: ProviderUnderTest) -> None:
    """The first process of a killed server ends by itself, and what is left of it cannot be taken back."""
    spec = target.new_spec()
    await target.leave_behind([spec], "none")
    with anyio.move_on_after(1):
        await target.wait_until_nothing_left()
    with _raises(SandboxLostError):
        async with target.provider.take_back(target.former_owner, spec):
            pass
    await target.assert_nothing_left()


@_check(seconds=60, survival=True)
async def sweep_keeps_the_sandboxes_that_it_is_given(target: ProviderUnderTest) -> None:
    """`sweep` spares sandboxes with a name in `keep` and those that this provider has taken back."""
    removed, kept, taken_back = (target.new_spec(survives=True) for _ in range(3))
    await target.leave_behind([removed, kept, taken_back], "none")
    async with target.provider.take_back(target.former_owner, taken_back) as sandbox:
        assert await target.provider.sweep(target.former_owner, keep={kept.name}) == 1
        assert await target.provider.sweep(target.former_owner, keep=[kept.name]) == 0
        await _Probe(sandbox, reopened=True).ping()
        async with target.provider.take_back(target.former_owner, kept) as sandbox:
            await _Probe(sandbox, reopened=True).ping()
    await target.assert_nothing_left()


@_check(seconds=120, survival=True)
async def cancelled_taking_back_leaves_nothing(target: ProviderUnderTest) -> None:
    """A taking back that is cancelled at any moment, by a cancel scope or a task, leaves nothing behind."""
    steps = 12
    specs = [target.new_spec(survives=True) for _ in range(2 * steps)]
    await target.leave_behind(specs, "none")
    finished = 0

    async def take_back(spec: SandboxSpec) -> None:
        nonlocal finished
        async with target.provider.take_back(target.former_owner, spec) as sandbox:
            await _Probe(sandbox, reopened=True).ping()
        finished += 1

    for step in range(steps):
        seconds = step * 0.003
        with anyio.move_on_after(seconds):
            await take_back(specs.pop())
        # This cancellation ignores anyio's shields.
        task = asyncio.create_task(take_back(specs.pop()))
        await asyncio.sleep(0)  # a task that is cancelled before its first step never begins
        await asyncio.wait([task], timeout=seconds)
        task.cancel()
        await asyncio.wait([task])
    while finished < 2:
        await target.leave_behind([spec := target.new_spec(survives=True)], "none")
        await take_back(spec)
    await target.wait_until_nothing_left()


# Files


@_check()
async def files_survive_a_round_trip(target: ProviderUnderTest) -> None:
    """Names of any bytes and length, contents, modes and links come out of `get` as they went into `put`."""
    long_name = "/".join(["x" * 120] * 3)
    files = {
        "new\nline": b"1",
        "späße ☃": b"2",
        "bytes \udcff\udcfe": b"3",
        "deep/er/file": b"4" * 1000,
        long_name: b"5",
    }
    links = {"link": "deep/er/file", "dangling": "/no/such/thing", "deep/er/up": "../../empty"}
    archive = pack(
        *(file_entry(name, content, mode=0o755) for name, content in files.items()),
        (Member(name="empty", kind=Kind.FOLDER, mode=0o755), ()),
        *(link_entry(name, link) for name, link in links.items()),
    )
    async with target.provider.open(target.new_spec()) as sandbox:
        folder = sandbox.root / "new" / "with space"
        await sandbox.put(folder, archive)
        listing = await download(sandbox, folder, target.scratch / "out.tar")
    received = {name: content for name, (member, content) in listing.items() if member.kind is Kind.FILE}
    assert received == files
    assert {listing[name][0].mode & 0o777 for name in files} == {0o755}
    assert {name: member.link for name, (member, _) in listing.items() if member.link} == links
    folders = {name for name, (member, _) in listing.items() if member.kind is Kind.FOLDER}
    assert {"empty", "deep", "deep/er"} <= folders


@_check()
async def member_names_are_relative_to_the_folder(target: ProviderUnderTest) -> None:
    """Members of `get`'s archive are named "." and "./..." from the folder on."""
    archive = target.scratch / "out.tar"
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root / "a", pack(file_entry("b/c")))
        await sandbox.get(sandbox.root / "a", archive, 1 << 20)
    assert sorted(member.name.rstrip("/") for member, _ in _read_archive(archive)) == [".", "./b", "./b/c"]


@_check()
async def unpacked_files_belong_to_the_first_process(target: ProviderUnderTest) -> None:
    """The first process may write to a file that the archive assigned to another user."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("folder/file", b"old", mode=0o600)))
        await _Probe(sandbox).write(sandbox.root / "folder" / "file", "new")
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
    assert listing["folder/file"][1] == b"new"


@_check()
async def archive_may_be_a_compressed_file(target: ProviderUnderTest) -> None:
    """`put` takes a path as well as bytes, and gzip as well as a plain tar."""
    archive = target.scratch / "in.tar.gz"
    archive.write_bytes(gzip.compress(pack(file_entry("a", b"1"))))
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, archive)
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
    assert listing["a"][1] == b"1"


@_check()
async def unpacking_replaces_existing_files(target: ProviderUnderTest) -> None:
    """A later `put` replaces files and links of the same names."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("a", b"1"), link_entry("b", "a")))
        await sandbox.put(sandbox.root, pack(file_entry("a", b"2"), file_entry("b", b"3")))
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
    assert (listing["a"][1], listing["b"][1]) == (b"2", b"3")


@_check()
async def dangerous_members_are_refused(target: ProviderUnderTest) -> None:
    """`put` refuses members and links that lead out of the folder, and anything but files and links."""
    dangerous: tuple[tuple[Entry, str], ...] = (
        (file_entry("../outside"), "outside"),
        (file_entry("a/../../outside"), "outside"),
        (file_entry("/etc/outside"), "outside"),
        (link_entry("hard", "../../etc/passwd", Kind.HARD_LINK), "outside"),
        (link_entry("a/soft", "../../outside"), "outside"),
        ((Member(name="device", kind=Kind.CHARACTER_DEVICE), ()), "no file"),
        ((Member(name="pipe", kind=Kind.FIFO), ()), "no file"),
    )
    async with target.provider.open(target.new_spec()) as sandbox:
        for entry, message in dangerous:
            with _raises(BadRequestError, message):
                await sandbox.put(sandbox.root, pack(entry))


@_check()
async def files_and_folders_never_replace_each_other(target: ProviderUnderTest) -> None:
    """`put` refuses a folder where a file is, and a file where a folder is."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file"), file_entry("folder/x")))
        for folder, name in (("file", "x"), ("file/below", "x"), ("", "file/x"), ("", "folder")):
            with _raises(BadRequestError, "cannot unpack"):
                await sandbox.put(sandbox.root / folder, pack(file_entry(name)))


@_check()
async def broken_archives_are_refused(target: ProviderUnderTest) -> None:
    """`put` refuses an archive that is cut short, empty or no archive."""
    whole = pack(file_entry("a", b"1" * 100_000))
    async with target.provider.open(target.new_spec()) as sandbox:
        for broken in (b"no archive", whole[:50_000], b"", gzip.compress(whole)[:100]):
            with _raises(BadRequestError, "not a whole tar archive"):
                await sandbox.put(sandbox.root, broken)


@_check()
async def missing_folder_gives_an_empty_archive(target: ProviderUnderTest) -> None:
    """`get` of a folder that does not exist, or is a file, gives an archive without members."""
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file")))
        assert await download(sandbox, sandbox.root / "not" / "here", target.scratch / "out.tar") == {}
        assert await download(sandbox, sandbox.root / "file", target.scratch / "out.tar") == {}


@_check()
async def download_above_the_limit_is_refused(target: ProviderUnderTest) -> None:
    """`get` raises LimitExceededError above its limit and leaves no archive; below it, it works."""
    archive = target.scratch / "limited.tar"
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file", b"1" * 3_000_000)))
        with _raises(LimitExceededError):
            await sandbox.get(sandbox.root, archive, 1_000_000)
        assert not archive.exists()
        await sandbox.get(sandbox.root, archive, 4_000_000)


@_check(seconds=60)
async def ten_thousand_files_and_a_large_one_survive_a_round_trip(target: ProviderUnderTest) -> None:
    """10,000 small files and one of 64 MiB go in and come out."""
    small = [file_entry(f"many/{number // 100}/{number}", b"x" * 100) for number in range(10_000)]
    large = bytes(range(256)) * (1 << 18)
    archive = target.scratch / "in.tar"
    archive.write_bytes(pack(*small, file_entry("large", large)))
    async with target.provider.open(target.new_spec()) as sandbox:
        await sandbox.put(sandbox.root, archive)
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
    assert listing["large"][1] == large
    files = [name for name, (member, _) in listing.items() if member.kind is Kind.FILE]
    assert sum(name.startswith("many/") for name in files) == len(small)


# Pausing


@_check()
async def paused_sandbox_does_nothing_and_its_files_can_be_read(target: ProviderUnderTest) -> None:
    """After `pause`, called twice, no process runs; `get` works, and the sandbox can be removed."""
    async with target.provider.open(target.new_spec()) as sandbox:
        probe, path = _Probe(sandbox), sandbox.root / "a"
        await probe.write(path, "before")
        await sandbox.pause()
        await sandbox.pause()
        with anyio.move_on_after(0.3) as scope:
            await probe.write(path, "after")
        assert scope.cancelled_caught, "a paused process answered"
        listing = await download(sandbox, sandbox.root, target.scratch / "out.tar")
        assert listing["a"][1] == b"before"
    await target.assert_nothing_left()


# First processes of all kinds


@_check(seconds=120, commands=True)
async def bytes_survive_a_round_trip(target: ProviderUnderTest) -> None:
    """1 byte, 100 kB and 20 MB sent to a process that echoes them come back unchanged."""
    echo = "import os\nwhile data := os.read(0, 65536):\n    while data: data = data[os.write(1, data):]"
    for size in (1, 100_000, 20_000_000):
        data = (bytes(range(251)) * (size // 251 + 1))[:size]
        spec = target.python_spec(echo)
        async with target.provider.open(spec) as sandbox, anyio.create_task_group() as tasks:
            tasks.start_soon(_send_all, sandbox, data)
            received = await receive_all(sandbox)
            assert received == data, f"{size} bytes came back as {len(received)} others"


async def _send_all(sandbox: Sandbox, data: bytes) -> None:
    await sandbox.stream.send(data)
    await sandbox.stream.send_eof()


@_check(commands=True)
async def output_before_exit_is_received(target: ProviderUnderTest) -> None:
    """Everything that a process wrote before it exited is received, then EndOfStream, repeatedly."""
    async with target.provider.open(target.python_spec("print('x' * 100_000)")) as sandbox:
        assert await receive_all(sandbox) == b"x" * 100_000 + b"\n"
        with _raises(anyio.EndOfStream):
            await sandbox.stream.receive()


@_check(commands=True)
async def end_of_stderr_is_kept_apart(target: ProviderUnderTest) -> None:
    """stderr is not on the stream; `log_tail` has the last 8 KiB of it."""
    script = "import sys; sys.stderr.write('e' * 100_000 + ' the end'); sys.stderr.flush(); print('out')"
    async with target.provider.open(target.python_spec(script)) as sandbox:
        assert await receive_all(sandbox) == b"out\n"
        assert len(sandbox.log_tail) == LOG_TAIL_BYTES
        assert sandbox.log_tail.endswith("e the end")


@_check(commands=True)
async def sandbox_runs_until_its_first_process_ends(target: ProviderUnderTest) -> None:
    """`is_running` is true until the first process ends, and false for a sandbox that is paused."""
    async with target.provider.open(target.python_spec("input()")) as sandbox:
        assert await sandbox.is_running()
        await sandbox.stream.send(b"\n")
        await receive_all(sandbox)
        await sandbox.cause_of_end()
        assert not await sandbox.is_running()
    async with target.provider.open(target.python_spec("input()")) as sandbox:
        await sandbox.pause()
        assert not await sandbox.is_running()


@_check(commands=True)
async def exit_code_is_the_cause_of_end(target: ProviderUnderTest) -> None:
    """When the stream has ended, `cause_of_end` gives the first process's exit code."""
    for code in (0, 3, 134):
        async with target.provider.open(target.python_spec(f"raise SystemExit({code})")) as sandbox:
            await receive_all(sandbox)
            assert await sandbox.cause_of_end() == f"exit code {code}"


@_check(commands=True)
async def stream_ends_with_the_first_process(target: ProviderUnderTest) -> None:
    """The stream ends when the first process exits, though a descendant holds its stdout."""
    script = "import subprocess; subprocess.Popen(['sleep', '1000']); print('leaving')"
    async with target.provider.open(target.python_spec(script)) as sandbox:
        assert await receive_all(sandbox) == b"leaving\n"
    await target.assert_nothing_left()


@_check(commands=True)
async def detached_processes_end_with_the_sandbox(target: ProviderUnderTest) -> None:
    """Processes that left both their session and their parent are gone after the exit."""
    script = """
import os, sys, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(0)
print(os.getpid(), flush=True)
sys.stdin.read()
time.sleep(1000)
"""
    async with target.provider.open(target.python_spec(script)) as sandbox:
        await receive_line(sandbox)
    await target.assert_nothing_left()


CHECKS: tuple[Check, ...] = tuple(_checks)
"""Checks for every provider."""
COMMAND_CHECKS: tuple[Check, ...] = tuple(_command_checks)
"""Checks for providers whose sandboxes run any command, which is all but fakes."""
ALL_CHECKS: tuple[Check, ...] = CHECKS + COMMAND_CHECKS
SURVIVAL_CHECKS = frozenset(_survival_checks)
"""Those of `ALL_CHECKS` that need sandboxes that outlive their server."""
