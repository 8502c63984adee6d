"""What other processes and users of the machine can do to a server's local sandboxes: nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.host.plugin import HostInventory
from decathlon_mcp.sandboxes.host.processes import ProcessId
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.sandboxes.host.sandbox_folder import GROUPS_FILE, LEADER_FILE, OWNER_FILE, write_process
from tests.sandboxes.conftest import open_to_everyone

pytestmark = pytest.mark.anyio

OWNER = "test-0123456789ab"
ANOTHER_USER = 1_000_000
CLAIMED_MIB = 256
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


@contextmanager
def stranger(variables: Mapping[str, str]) -> Generator[subprocess.Popen[Any]]:
    """A process with these variables, of another user if that is possible."""
    options: dict[str, Any] = {"user": ANOTHER_USER, "group": ANOTHER_USER} if os.geteuid() == 0 else {}
    process = subprocess.Popen(["/bin/sleep", "1000"], env=variables, cwd="/", **options)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def record_of(process: subprocess.Popen[Any], folder: Path) -> None:
    """Files as those by which a sandbox of a dead server is found, naming that process."""
    (folder / OWNER_FILE).write_text(OWNER)
    process_id = ProcessId.of(process.pid)
    assert process_id is not None
    write_process(folder / LEADER_FILE, process_id)


async def test_text_in_an_environment_names_no_folder_and_no_process(tmp_path: Path) -> None:
    sandboxes, named = tmp_path / "sandboxes", tmp_path / "named"
    sandboxes.mkdir(mode=0o700)
    named.mkdir()
    with stranger({}) as victim:
        record_of(victim, named)
        for name in ("../named", str(named), f"/{named}"):
            with stranger({"DECATHLON_SANDBOX": f"{OWNER}/{name}"}) as forger:
                inventory = HostInventory(sandboxes)
                assert await inventory.sandboxes(OWNER) == {}
                assert await inventory.owners() == set()
                assert await HostProvider("own", sandboxes).sweep(OWNER) == 0
                assert forger.poll() is None
        assert victim.poll() is None
    assert {path.name for path in named.iterdir()} == {OWNER_FILE, LEADER_FILE}


async def test_entries_that_no_server_made_are_no_sandboxes(tmp_path: Path) -> None:
    """They are neither followed nor waited for nor read as a whole."""
    sandboxes, elsewhere = tmp_path / "sandboxes", tmp_path / "elsewhere"
    elsewhere.mkdir()
    sandboxes.mkdir(mode=0o700)
    (sandboxes / "link").symlink_to(elsewhere)
    for name in ("fifo", "linked", "folder", "long", "empty"):
        (sandboxes / name).mkdir()
    os.mkfifo(sandboxes / "fifo" / OWNER_FILE)
    (sandboxes / "folder" / OWNER_FILE).mkdir()
    (sandboxes / "linked" / OWNER_FILE).symlink_to(elsewhere / OWNER_FILE)
    with (sandboxes / "long" / OWNER_FILE).open("wb") as file:
        file.truncate(1 << 40)
    with stranger({}) as victim:
        record_of(victim, elsewhere)
        with anyio.fail_after(10):
            assert await HostProvider("own", sandboxes).sweep(OWNER) == 0
            assert await HostInventory(sandboxes).sandboxes(OWNER) == {}
        assert victim.poll() is None
    assert len([*elsewhere.iterdir()]) == 2


@needs_root
async def test_folder_that_another_user_made_is_no_sandbox(tmp_path: Path) -> None:
    sandboxes = tmp_path / "sandboxes"
    (sandboxes / "forged").mkdir(parents=True)
    with stranger({}) as victim:
        record_of(victim, sandboxes / "forged")
        os.chown(sandboxes / "forged", ANOTHER_USER, ANOTHER_USER)
        assert await HostProvider("own", sandboxes).sweep(OWNER) == 0
        assert victim.poll() is None
    assert (sandboxes / "forged").is_dir()


@pytest.mark.parametrize("reason", ["writable", pytest.param("foreign", marks=needs_root)])
async def test_sandboxes_where_others_can_put_theirs_are_refused(tmp_path: Path, reason: str) -> None:
    sandboxes = tmp_path / "sandboxes"
    (sandboxes / "forged").mkdir(parents=True)
    with stranger({}) as victim:
        record_of(victim, sandboxes / "forged")
        if reason == "writable":
            sandboxes.chmod(0o777)
        else:
            os.chown(sandboxes, ANOTHER_USER, ANOTHER_USER)
        with pytest.raises(ProviderUnavailableError, match="must belong to the server's user"):
            await HostProvider("own", sandboxes).sweep(OWNER)
        assert victim.poll() is None
    assert (sandboxes / "forged").is_dir()


async def test_only_a_control_group_of_the_sandbox_is_removed_with_it(tmp_path: Path) -> None:
    sandbox, others = tmp_path / "sandboxes" / "dead", tmp_path / "others"
    sandbox.mkdir(parents=True)
    others.mkdir()
    (others / f"decathlon-{OWNER}-dead").mkdir()
    (sandbox / OWNER_FILE).write_text(OWNER)
    names = (others, others / f"decathlon-{OWNER}-dead", f"/sys/fs/cgroup/../../..{others}")
    (sandbox / GROUPS_FILE).write_text("".join(f"{name}\n" for name in names))
    assert await HostProvider("own", tmp_path / "sandboxes").sweep(OWNER) == 1
    assert (others / f"decathlon-{OWNER}-dead").is_dir()


@contextmanager
def claimed_environment() -> Generator[subprocess.Popen[str]]:
    program = Path(__file__).with_name("claimed_environment.py")
    process = subprocess.Popen(
        [sys.executable, str(program), str(CLAIMED_MIB)], stdout=subprocess.PIPE, text=True, cwd="/"
    )
    assert process.stdout is not None
    try:
        answer = process.stdout.readline().strip()
        if answer != "claimed":
            pytest.skip(f"this kernel lets nobody claim an environment: {answer}")
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


async def test_claimed_environment_of_a_stranger_takes_no_memory() -> None:
    with claimed_environment(), open_to_everyone() as folder:
        program = [sys.executable, "-m", "tests.sandboxes.peak_memory", str(folder)]
        with anyio.fail_after(60):
            result = await anyio.run_process(program)
    assert int(result.stdout) < CLAIMED_MIB // 4
