"""Sandboxes that are ordinary processes."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path, PurePosixPath

import anyio
import pytest

from decathlon_mcp.driver_client.driver import connect
from decathlon_mcp.errors import BadRequestError, ImageError, SandboxLostError
from decathlon_mcp.sandboxes.conformance import file_entry, pack, receive_all
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio


async def test_first_log_message_warns_that_nothing_is_isolated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with LocalProvider("somebody", tmp_path) as provider:
            assert provider.isolation == "none"
    assert "isolates nothing" in caplog.records[0].message


async def test_python3_inside_is_the_servers_own(local: Bench) -> None:
    with anyio.fail_after(30):
        async with local.provider.open(local.spec()) as sandbox, connect(sandbox) as driver:
            script = "import sys, mcp; print(sys.prefix)"
            result = await driver.run(["python3", "-c", script], cwd=str(sandbox.root), timeout_seconds=20)
            assert result.stdout == f"{sys.prefix}\n"


async def test_settings_of_the_server_are_not_inherited(
    local: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DECATHLON_TOKENS", "/secret")
    script = "import os; print([name for name in os.environ if name.startswith('DECATHLON_')])"
    with anyio.fail_after(30):
        async with local.provider.open(local.python_spec(script)) as sandbox:
            assert await receive_all(sandbox) == b"['DECATHLON_SANDBOX']\n"


async def test_temporary_files_are_removed_with_the_sandbox(local: Bench) -> None:
    script = "import tempfile; print(tempfile.mkdtemp())"
    with anyio.fail_after(30):
        async with local.provider.open(local.python_spec(script)) as sandbox:
            scratch = anyio.Path((await receive_all(sandbox)).decode().strip())
            assert await scratch.is_dir()
        assert not await scratch.exists()


async def test_folder_without_permissions_is_removed(local: Bench) -> None:
    with anyio.fail_after(30):
        async with local.provider.open(local.spec()) as sandbox:
            folder = Path(sandbox.root) / "a" / "b"
            folder.mkdir(parents=True)
            (folder / "file").write_text("")
            folder.chmod(0)
            folder.parent.chmod(0)
        await local.assert_nothing_left()


async def test_folders_outside_the_root_are_refused(local: Bench, tmp_path: Path) -> None:
    async with local.provider.open(local.spec()) as sandbox:
        for folder in (PurePosixPath("/etc"), sandbox.root / ".." / "..", PurePosixPath("relative")):
            with pytest.raises(BadRequestError, match="below"):
                await sandbox.get(folder, tmp_path / "out.tar", 1 << 20)
            with pytest.raises(BadRequestError, match="below"):
                await sandbox.put(folder, b"")


async def test_archives_are_never_unpacked_through_a_link(local: Bench, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with local.provider.open(local.spec()) as sandbox:
        link = anyio.Path(sandbox.root / "link")
        await link.symlink_to(outside)
        with pytest.raises(BadRequestError, match="cannot unpack"):
            await sandbox.put(sandbox.root, pack(file_entry("link/file", b"written")))
        with pytest.raises(BadRequestError):
            await sandbox.put(sandbox.root / "link", pack(file_entry("file", b"written")))
        await sandbox.put(sandbox.root, pack(file_entry("link", b"replacement")))
        assert await link.read_text() == "replacement"
    assert list(outside.iterdir()) == []


async def test_missing_program_is_an_error_and_leaves_nothing(local: Bench) -> None:
    with pytest.raises(ImageError, match="no-such-program"):
        async with local.provider.open(local.spec("no-such-program")):
            pass
    await local.assert_nothing_left()


async def test_processes_of_a_killed_driver_end_with_the_sandbox(local: Bench) -> None:
    """Such a process may have little of the driver's environment, its own session, and no parent."""
    with anyio.fail_after(30):
        async with local.provider.open(local.spec()) as sandbox, connect(sandbox) as driver:
            script = "import os, time; os.chdir('/'); os.kill(os.getppid(), 9); time.sleep(1000)"
            with pytest.raises(SandboxLostError, match="exit code 137"):
                await driver.run(
                    ["python3", "-c", script], cwd=str(sandbox.root), inherit="minimal", timeout_seconds=20
                )
            assert list(local.processes()) == [sandbox.spec.name]
        await local.assert_nothing_left()


async def test_first_process_killed_by_a_signal_has_an_exit_code_above_128(local: Bench) -> None:
    async with local.provider.open(local.python_spec("import os; os.abort()")) as sandbox:
        assert await receive_all(sandbox) == b""
        assert await sandbox.cause_of_end() == "exit code 134"


async def test_sweep_tolerates_sandboxes_that_another_server_removes_meanwhile(tmp_path: Path) -> None:
    stop = threading.Event()

    def come_and_go(number: int) -> None:
        folder = tmp_path / f"sandbox-{number}"
        while not stop.is_set():
            folder.mkdir()
            (folder / "owner").write_text("other")
            (folder / "owner").unlink()
            folder.rmdir()

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    try:
        async with LocalProvider("somebody", tmp_path) as provider:
            assert [await provider.sweep("dead") for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        for thread in threads:
            thread.join()
