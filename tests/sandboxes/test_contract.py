"""What every provider does alike, the tests' fake included, with the driver as its first process."""

from __future__ import annotations

import asyncio
import gzip
import io
import tarfile
from collections.abc import Callable, Coroutine
from pathlib import Path, PurePosixPath

import anyio
import pytest

from decathlon_mcp.driver_client.driver import connect
from decathlon_mcp.errors import BadRequestError, LimitExceededError, SandboxLostError
from decathlon_mcp.sandboxes.base import Sandbox
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio

Listing = dict[str, tuple[bytes, int, str, bytes]]
"""Name to kind, mode, link's target, content."""


def packed(*members: tuple[str, bytes, bytes | str], mode: int = 0o644) -> bytes:
    """A tar of (name, kind, content or link's target), whose members belong to nobody in particular."""
    into = io.BytesIO()
    with tarfile.open(fileobj=into, mode="w") as tar:
        for name, kind, said in members:
            info = tarfile.TarInfo(name)
            info.type, info.mode, info.uid, info.gid = kind, mode, 1234, 1234
            if isinstance(said, str):
                info.linkname = said
                tar.addfile(info)
            else:
                info.size = len(said)
                tar.addfile(info, io.BytesIO(said))
    return into.getvalue()


def listed(archive: Path) -> Listing:
    found: Listing = {}
    with tarfile.open(archive) as tar:
        for info in tar:
            file = tar.extractfile(info) if info.isreg() else None
            name = info.name.removeprefix("./")
            found[name] = (info.type, info.mode & 0o777, info.linkname, file.read() if file else b"")
    return found


async def taken(
    sandbox: Sandbox, folder: PurePosixPath, archive: Path, limit_bytes: int = 1 << 28
) -> Listing:
    await sandbox.get(folder, archive, limit_bytes)
    return listed(archive)


# opening and ending


async def test_the_first_process_answers_on_the_stream(bench: Bench) -> None:
    with anyio.fail_after(30):
        async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as link:
            await link.ping()
            result = await link.run(["echo", "hello"], cwd=str(sandbox.root), timeout_seconds=10)
            assert result.stdout == "hello\n"


async def test_the_root_is_known_before_it_is_opened(bench: Bench) -> None:
    spec = bench.spec()
    async with bench.provider.open(spec) as sandbox:
        assert bench.provider.root(spec) == sandbox.root
        assert sandbox.root.is_absolute()
        assert sandbox.spec is spec


async def test_the_end_of_the_input_ends_the_first_process_and_the_stream(bench: Bench) -> None:
    with anyio.fail_after(30):
        async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as link:
            assert await sandbox.cause_of_end() is None
            await sandbox.stream.send_eof()
            await link.closed.wait()
            assert await sandbox.cause_of_end() == "exit code 0"
            assert not sandbox.out_of_memory


async def test_nothing_is_left_after_the_exit(bench: Bench) -> None:
    with anyio.fail_after(30):
        async with bench.provider.open(bench.spec()):
            assert bench.left() != []
        assert bench.left() == []


async def test_an_error_inside_comes_out_as_it_is_and_nothing_is_left(bench: Bench) -> None:
    with pytest.raises(KeyError, match="mine"), anyio.fail_after(30):
        async with bench.provider.open(bench.spec()):
            raise KeyError("mine")
    assert bench.left() == []


async def test_a_name_in_use_is_refused_and_its_holder_lives_on(bench: Bench) -> None:
    with anyio.fail_after(30):
        spec = bench.spec()
        async with bench.provider.open(spec) as sandbox, connect(sandbox) as link:
            with pytest.raises(BadRequestError, match="already"):
                async with bench.provider.open(spec):
                    pass
            await link.ping()


async def test_many_open_side_by_side(bench: Bench) -> None:
    async def one() -> None:
        async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as link:
            await link.ping()

    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            for _ in range(12):
                tasks.start_soon(one)
    assert bench.left() == []


async def test_a_closed_sandbox_says_that_it_is_gone(bench: Bench, tmp_path: Path) -> None:
    async with bench.provider.open(bench.spec()) as sandbox:
        pass
    with pytest.raises(SandboxLostError):
        await sandbox.get(sandbox.root, tmp_path / "a.tar", 1 << 20)
    with pytest.raises(SandboxLostError):
        await sandbox.put(sandbox.root, packed())
    with pytest.raises(SandboxLostError):
        await sandbox.pause()


async def test_a_sweep_removes_what_another_provider_has_left_and_spares_its_own(bench: Bench) -> None:
    with anyio.fail_after(60):
        async with bench.again() as earlier, earlier.open(bench.spec()) as left:
            async with bench.provider.open(bench.spec()) as mine, connect(mine) as link:
                assert await bench.provider.sweep(bench.owner) == 1
                assert await bench.provider.sweep(bench.owner) == 0
                assert await bench.provider.sweep("somebody-else") == 0
                await link.ping()
            with pytest.raises(anyio.EndOfStream):
                await left.stream.receive()
    assert bench.left() == []


async def test_a_ready_machine_is_found_ready(bench: Bench) -> None:
    with anyio.fail_after(10):
        findings = await bench.provider.check(bench.image)
    assert findings
    assert [finding for finding in findings if not finding.ok or finding.cure] == []


# cancellation


@pytest.mark.slow
@pytest.mark.parametrize("way", ["scope", "task"])
async def test_an_opening_cancelled_at_any_moment_leaves_nothing(bench: Bench, way: str) -> None:
    """Stepped through an opening and the first answer, by ever longer waits, until one is not cancelled."""
    finished = False

    async def one() -> None:
        nonlocal finished
        async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as link:
            await link.ping()
        finished = True

    with anyio.fail_after(120):
        for step in range(60):
            seconds = step * 0.012
            if way == "scope":
                with anyio.move_on_after(seconds):
                    await one()
            else:
                await cancelled_as_asyncio_does(one, seconds)
            # What is killed may take a moment to go, and nobody waits for an exit that is itself cancelled.
            await bench.nothing_is_left()
            if finished and step > 5:
                break
    assert finished


async def cancelled_as_asyncio_does(one: Callable[[], Coroutine[None, None, None]], seconds: float) -> None:
    """Frameworks cancel tasks themselves, past every shield of ours but the last."""
    task = asyncio.create_task(one())
    await asyncio.wait([task], timeout=seconds)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()):
        raise error


# files


async def test_files_come_out_as_they_went_in(bench: Bench, tmp_path: Path) -> None:
    long = "/".join(["x" * 120] * 3)
    archive = packed(
        ("new\nline", tarfile.REGTYPE, b"1"),
        ("späße ☃", tarfile.REGTYPE, b"2"),
        ("bytes \udcff\udcfe", tarfile.REGTYPE, b"3"),
        ("empty", tarfile.DIRTYPE, b""),
        ("deep/er/file", tarfile.REGTYPE, b"4" * 1000),
        (long, tarfile.REGTYPE, b"5"),
        ("link", tarfile.SYMTYPE, "deep/er/file"),
        ("dangling", tarfile.SYMTYPE, "/no/such/thing"),
        ("deep/er/up", tarfile.SYMTYPE, "../../empty"),
        mode=0o755,
    )
    with anyio.fail_after(30):
        async with bench.provider.open(bench.spec()) as sandbox:
            folder = sandbox.root / "made" / "on the way"
            await sandbox.put(folder, archive)
            found = await taken(sandbox, folder, tmp_path / "out.tar")
    assert {name: said for name, said in found.items() if said[0] == tarfile.REGTYPE} == {
        "new\nline": (tarfile.REGTYPE, 0o755, "", b"1"),
        "späße ☃": (tarfile.REGTYPE, 0o755, "", b"2"),
        "bytes \udcff\udcfe": (tarfile.REGTYPE, 0o755, "", b"3"),
        "deep/er/file": (tarfile.REGTYPE, 0o755, "", b"4" * 1000),
        long: (tarfile.REGTYPE, 0o755, "", b"5"),
    }
    assert {name: said[2] for name, said in found.items() if said[0] == tarfile.SYMTYPE} == {
        "link": "deep/er/file",
        "dangling": "/no/such/thing",
        "deep/er/up": "../../empty",
    }
    assert {"empty", "deep", "deep/er"} <= {
        name for name, said in found.items() if said[0] == tarfile.DIRTYPE
    }


async def test_every_member_is_named_from_the_folder_on(bench: Bench, tmp_path: Path) -> None:
    async with bench.provider.open(bench.spec()) as sandbox:
        await sandbox.put(sandbox.root / "a", packed(("b/c", tarfile.REGTYPE, b"")))
        await sandbox.get(sandbox.root / "a", tmp_path / "out.tar", 1 << 20)
    with tarfile.open(tmp_path / "out.tar") as tar:
        assert sorted(tar.getnames()) == [".", "./b", "./b/c"]


async def test_what_is_unpacked_belongs_to_the_first_process(bench: Bench) -> None:
    with anyio.fail_after(30):
        async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as link:
            await sandbox.put(sandbox.root, packed(("folder/file", tarfile.REGTYPE, b"old"), mode=0o600))
            file = str(sandbox.root / "folder" / "file")
            await link.arrange({"write": file, "text": "new"})


async def test_an_archive_may_be_a_file_and_may_be_compressed(bench: Bench, tmp_path: Path) -> None:
    (tmp_path / "in.tar.gz").write_bytes(gzip.compress(packed(("a", tarfile.REGTYPE, b"1"))))
    async with bench.provider.open(bench.spec()) as sandbox:
        await sandbox.put(sandbox.root, tmp_path / "in.tar.gz")
        found = await taken(sandbox, sandbox.root, tmp_path / "out.tar")
    assert found["a"][3] == b"1"


async def test_what_is_unpacked_later_takes_the_place_of_what_was_there(bench: Bench, tmp_path: Path) -> None:
    async with bench.provider.open(bench.spec()) as sandbox:
        await sandbox.put(sandbox.root, packed(("a", tarfile.REGTYPE, b"1"), ("b", tarfile.SYMTYPE, "a")))
        await sandbox.put(sandbox.root, packed(("a", tarfile.REGTYPE, b"2"), ("b", tarfile.REGTYPE, b"3")))
        found = await taken(sandbox, sandbox.root, tmp_path / "out.tar")
    assert (found["a"][3], found["b"][3]) == (b"2", b"3")


@pytest.mark.parametrize(
    "member",
    [
        ("../outside", tarfile.REGTYPE, b""),
        ("a/../../outside", tarfile.REGTYPE, b""),
        ("/etc/outside", tarfile.REGTYPE, b""),
        ("hard", tarfile.LNKTYPE, "../../etc/passwd"),
        ("a/soft", tarfile.SYMTYPE, "../../outside"),
        ("device", tarfile.CHRTYPE, b""),
        ("pipe", tarfile.FIFOTYPE, b""),
    ],
    ids=lambda member: member[0],
)
async def test_what_must_not_be_unpacked_is_refused(
    bench: Bench, member: tuple[str, bytes, bytes | str]
) -> None:
    async with bench.provider.open(bench.spec()) as sandbox:
        with pytest.raises(BadRequestError, match=r"outside|no file"):
            await sandbox.put(sandbox.root, packed(member))


async def test_a_file_is_no_folder_to_unpack_into_and_a_folder_no_file(bench: Bench) -> None:
    async with bench.provider.open(bench.spec()) as sandbox:
        await sandbox.put(
            sandbox.root, packed(("file", tarfile.REGTYPE, b""), ("folder/x", tarfile.REGTYPE, b""))
        )
        for folder, name in (("file", "x"), ("file/below", "x"), ("", "file/x"), ("", "folder")):
            with pytest.raises(BadRequestError, match="cannot unpack"):
                await sandbox.put(sandbox.root / folder, packed((name, tarfile.REGTYPE, b"")))


async def test_what_is_no_archive_is_refused(bench: Bench) -> None:
    whole = packed(("a", tarfile.REGTYPE, b"1" * 100_000))
    async with bench.provider.open(bench.spec()) as sandbox:
        for wrong in (b"no archive", whole[:50_000], b""):
            with pytest.raises(BadRequestError, match="not a whole tar archive"):
                await sandbox.put(sandbox.root, wrong)


async def test_a_folder_that_is_not_there_gives_an_archive_without_members(
    bench: Bench, tmp_path: Path
) -> None:
    async with bench.provider.open(bench.spec()) as sandbox:
        await sandbox.put(sandbox.root, packed(("file", tarfile.REGTYPE, b"")))
        assert await taken(sandbox, sandbox.root / "nothing" / "here", tmp_path / "out.tar") == {}
        assert await taken(sandbox, sandbox.root / "file", tmp_path / "out.tar") == {}


async def test_more_than_the_limit_is_not_taken(bench: Bench, tmp_path: Path) -> None:
    async with bench.provider.open(bench.spec()) as sandbox:
        await sandbox.put(sandbox.root, packed(("file", tarfile.REGTYPE, b"1" * 3_000_000)))
        with pytest.raises(LimitExceededError):
            await sandbox.get(sandbox.root, tmp_path / "out.tar", 1_000_000)
        assert not (tmp_path / "out.tar").exists()
        await sandbox.get(sandbox.root, tmp_path / "out.tar", 4_000_000)


@pytest.mark.slow
async def test_ten_thousand_files_and_a_large_one_go_in_and_out(bench: Bench, tmp_path: Path) -> None:
    members = [(f"many/{number // 100}/{number}", tarfile.REGTYPE, b"x" * 100) for number in range(10_000)]
    large = bytes(range(256)) * (1 << 18)
    (tmp_path / "in.tar").write_bytes(packed(*members, ("large", tarfile.REGTYPE, large)))
    with anyio.fail_after(60):
        async with bench.provider.open(bench.spec()) as sandbox:
            await sandbox.put(sandbox.root, tmp_path / "in.tar")
            found = await taken(sandbox, sandbox.root, tmp_path / "out.tar")
    assert found["large"][3] == large
    assert (
        sum(name.startswith("many/") and said[0] == tarfile.REGTYPE for name, said in found.items()) == 10_000
    )


# pausing


async def test_a_paused_sandbox_does_nothing_and_its_files_can_be_taken(bench: Bench, tmp_path: Path) -> None:
    with anyio.fail_after(30):
        async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as link:
            await link.arrange({"write": str(sandbox.root / "a"), "text": "as it was"})
            await sandbox.pause()
            await sandbox.pause()
            with anyio.move_on_after(0.3) as waiting:
                await link.arrange({"write": str(sandbox.root / "a"), "text": "too late"})
            assert waiting.cancelled_caught
            found = await taken(sandbox, sandbox.root, tmp_path / "out.tar")
            assert found["a"][3] == b"as it was"
        assert bench.left() == []
