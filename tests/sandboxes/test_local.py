"""What is particular to sandboxes that are plain processes."""

from __future__ import annotations

import logging
import sys
from pathlib import Path, PurePosixPath

import anyio
import pytest

from decathlon_mcp.driver_client.driver import connect
from decathlon_mcp.errors import BadRequestError, ImageError, SandboxLostError
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from tests.sandboxes.conftest import Bench
from tests.sandboxes.test_contract import packed
from tests.sandboxes.test_processes import everything

pytestmark = pytest.mark.anyio


async def test_it_says_first_of_all_that_it_isolates_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        async with LocalProvider("somebody", tmp_path) as provider:
            assert provider.isolation == "none"
    assert "isolates nothing" in caplog.records[0].message


async def test_python3_inside_is_the_servers_own_with_its_packages(local: Bench) -> None:
    with anyio.fail_after(30):
        async with local.provider.open(local.spec()) as sandbox, connect(sandbox) as link:
            script = "import sys, mcp; print(sys.prefix)"
            result = await link.run(["python3", "-c", script], cwd=str(sandbox.root), timeout_seconds=20)
            assert result.stdout == f"{sys.prefix}\n"


async def test_settings_of_the_server_stay_outside(local: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DECATHLON_TOKENS", "/secret")
    script = "import os; print([name for name in os.environ if name.startswith('DECATHLON_')])"
    with anyio.fail_after(30):
        async with local.provider.open(local.python(script)) as sandbox:
            assert await everything(sandbox.stream) == b"['DECATHLON_SANDBOX']\n"


async def test_scratch_files_go_with_the_sandbox(local: Bench) -> None:
    script = "import tempfile; print(tempfile.mkdtemp())"
    with anyio.fail_after(30):
        async with local.provider.open(local.python(script)) as sandbox:
            scratch = anyio.Path((await everything(sandbox.stream)).decode().strip())
            assert await scratch.is_dir()
        assert not await scratch.exists()


async def test_a_folder_that_forbids_its_removal_is_removed(local: Bench) -> None:
    with anyio.fail_after(30):
        async with local.provider.open(local.spec()) as sandbox:
            folder = Path(sandbox.root) / "a" / "b"
            folder.mkdir(parents=True)
            (folder / "file").write_text("")
            folder.chmod(0)
            folder.parent.chmod(0)
        assert local.left() == []


async def test_files_of_the_machine_are_out_of_reach(local: Bench, tmp_path: Path) -> None:
    async with local.provider.open(local.spec()) as sandbox:
        for folder in (PurePosixPath("/etc"), sandbox.root / ".." / "..", PurePosixPath("relative")):
            with pytest.raises(BadRequestError, match="below"):
                await sandbox.get(folder, tmp_path / "out.tar", 1 << 20)
            with pytest.raises(BadRequestError, match="below"):
                await sandbox.put(folder, b"")


async def test_nothing_is_unpacked_through_a_link_that_was_laid(local: Bench, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with local.provider.open(local.spec()) as sandbox:
        link = anyio.Path(sandbox.root / "link")
        await link.symlink_to(outside)
        with pytest.raises(BadRequestError, match="cannot unpack"):
            await sandbox.put(sandbox.root, packed(("link/file", b"0", b"written")))
        with pytest.raises(BadRequestError):
            await sandbox.put(sandbox.root / "link", packed(("file", b"0", b"written")))
        await sandbox.put(sandbox.root, packed(("link", b"0", b"in its place")))
        assert await link.read_text() == "in its place"
    assert list(outside.iterdir()) == []


async def test_a_program_that_is_not_there_is_an_error_and_nothing_is_left(local: Bench) -> None:
    with pytest.raises(ImageError, match="no-such-program"):
        async with local.provider.open(local.spec("no-such-program")):
            pass
    assert local.left() == []


async def test_what_a_killed_driver_had_started_ends_with_the_sandbox(local: Bench) -> None:
    """A server inherits little of the driver's environment, has a session of its own, may be an orphan."""
    with anyio.fail_after(30):
        async with local.provider.open(local.spec()) as sandbox, connect(sandbox) as link:
            script = "import os, time; os.chdir('/'); os.kill(os.getppid(), 9); time.sleep(1000)"
            with pytest.raises(SandboxLostError, match="exit code 137"):
                await link.run(
                    ["python3", "-c", script], cwd=str(sandbox.root), inherit="minimal", timeout_seconds=20
                )
            assert list(local.processes()) == [sandbox.spec.name]
        assert local.left() == []
