"""Sandboxes of gVisor."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from decathlon_sandbox.wire import BOOT_COMMAND

from decathlon_mcp.driver.client import connect
from decathlon_mcp.errors import (
    ImageError,
    NotRunnableError,
    ProviderUnavailableError,
    SandboxLostError,
)
from decathlon_mcp.plugins.conformance.target import LastStep, receive_all
from decathlon_mcp.plugins.gvisor.runsc import (
    find_runsc,
    inside_command,
    runsc_version,
)
from decathlon_mcp.plugins.gvisor.sandbox import GvisorSandbox
from decathlon_mcp.sandboxes.base import KILLED_INSIDE, OUT_OF_MEMORY, Limits, ended_from_inside
from decathlon_mcp.sandboxes.host.image_folder import CONFIG_FILE, ROOT_FOLDER, ImageFolder
from decathlon_mcp.sandboxes.host.plugin import FOLDER
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.sandboxes.host.sandbox_folder import LEADER_FILE, living_sandboxes, read_process
from tests.driver.peer import until
from tests.sandboxes.conftest import Bench
from tests.sandboxes.test_bubblewrap import REFUSED_CALLS, output_of

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


async def test_calls_that_docker_refuses_are_refused(gvisor: Bench) -> None:
    async with gvisor.provider.open(gvisor.python_spec(REFUSED_CALLS)) as sandbox:
        # gVisor knows no personalities.
        assert await output_of(sandbox) == "the personality cannot be read\ndone\n", sandbox.log_tail


async def test_first_process_that_is_killed_from_within_counts_against_the_agent(gvisor: Bench) -> None:
    script = "import os, time\nif os.fork() == 0: os.kill(1, 9)\ntime.sleep(60)"
    async with gvisor.provider.open(gvisor.python_spec(script)) as sandbox:
        await receive_all(sandbox)
        cause = await sandbox.cause_of_end()
        assert cause == KILLED_INSIDE
        assert ended_from_inside(SandboxLostError("ended", cause=cause))


async def test_sandbox_that_is_killed_from_outside_does_not(gvisor: Bench) -> None:
    async with gvisor.provider.open(gvisor.new_spec()) as sandbox:
        leader = (Path(gvisor.scratch) / FOLDER / sandbox.spec.name / "leader").read_text().split()[0]
        os.kill(int(leader), 9)
        await receive_all(sandbox)
        assert not ended_from_inside(SandboxLostError("ended", cause=await sandbox.cause_of_end()))


@pytest.mark.parametrize("last_step", ["none", "pause"])
async def test_sandboxes_of_a_killed_server_end_after_their_survival_time(
    gvisor: Bench, last_step: LastStep
) -> None:
    """Paused ones too. No process is left, and no namespace with mounts; the next server deletes the rest."""
    specs = [replace(gvisor.new_spec(survives=True), command=BOOT_COMMAND) for _ in range(2)]
    names = {spec.name for spec in specs}
    owner, folder = gvisor.former_owner, gvisor.scratch / FOLDER
    async with gvisor.killed_server(specs, last_step, survival=2):
        leaders = [read_process(folder / name, LEADER_FILE) for name in names]
        namespaces = user_namespaces(*(str(leader.pid) for leader in leaders if leader is not None))
    assert living_sandboxes(folder, owner) == dict.fromkeys(names, True)
    await until(lambda: not (namespaces & user_namespaces()))
    assert living_sandboxes(folder, owner) == dict.fromkeys(names, False)
    async with gvisor.create_second() as provider:
        assert await provider.sweep(owner) == len(names)


def user_namespaces(*pids: str) -> set[str]:
    """Those of these processes, or of all."""
    found: set[str] = set()
    for pid in pids or [path.name for path in Path("/proc").glob("[0-9]*")]:
        with suppress(OSError):
            found.add(str(Path(f"/proc/{pid}/ns/user").readlink()))
    return found


async def test_driver_ends_what_exceeds_the_memory_and_itself_if_nothing_else_is_left(gvisor: Bench) -> None:
    fill_memory = "blocks = []\nwhile True: blocks.append(b'x' * (1 << 20))"
    # To append: the next one would first free what the last one has filled.
    fill_files = "file = open('/dev/shm/large', 'ab')\nwhile True: file.write(b'x' * (1 << 20))"
    spec = gvisor.spec(limits=Limits(memory_mib=48))
    async with gvisor.provider.open(spec) as sandbox, connect(sandbox) as driver:
        root = str(sandbox.root)
        result = await driver.run(["python3", "-c", fill_memory], cwd=root, timeout_seconds=60)
        assert result.signal == 9
        result = await driver.run(["echo", "alive"], cwd=root, timeout_seconds=60)
        assert result.stdout == "alive\n"

        async def fill() -> None:
            while True:
                await driver.run(["python3", "-c", fill_files], cwd=root, timeout_seconds=60)

        with pytest.raises(SandboxLostError) as lost:
            await fill()
        assert lost.value.data["cause"] == OUT_OF_MEMORY


async def test_outbound_network_and_unsuitable_images_are_refused(gvisor: Bench, tmp_path: Path) -> None:
    with pytest.raises(NotRunnableError, match="no outbound network"):
        async with gvisor.provider.open(gvisor.spec(network="outbound")):
            pass
    (tmp_path / "usr").mkdir()
    for image, command, message in (
        (str(tmp_path / "none"), "python3", "is no unpacked image"),
        (str(tmp_path), "python3", "has no python3"),
    ):
        with pytest.raises(ImageError, match=message):
            async with gvisor.provider.open(gvisor.spec(command, image=image)):
                pass


async def test_sandbox_that_gvisor_does_not_start_is_the_machines_fault(
    gvisor: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decathlon_mcp.plugins.gvisor.sandbox.find_runsc", lambda: Path("/bin/false"))
    async with gvisor.create_second() as provider:
        with pytest.raises(ProviderUnavailableError, match="created no sandbox"):
            async with provider.open(gvisor.new_spec()):
                pass


async def test_an_ordinary_user_can_open_sandboxes(unpacked_image: str, runsc: str) -> None:
    """The program becomes one if the tests run as root."""
    command = [sys.executable, "-m", "tests.sandboxes.unprivileged", "gvisor", unpacked_image]
    result = await anyio.run_process(command, check=False)
    assert result.stdout == b"all passed\n", result.stderr.decode()


@pytest.mark.parametrize(
    ("output", "is_recent"),
    [
        ("runsc version release-20240729.0\nspec: 1.1.0", True),
        ("runsc version 0.0~20221219.0", False),
        ("", False),
    ],
)
def test_version_is_read(output: str, is_recent: bool, tmp_path: Path) -> None:
    program = tmp_path / "runsc"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    program.chmod(0o755)
    assert runsc_version(program)[1] is is_recent


async def test_missing_program_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ProviderUnavailableError, match="no runsc on the PATH: install runsc"):
        find_runsc()
    async with HostProvider("owner", tmp_path, kernel=GvisorSandbox) as provider:
        (found,) = await provider.check("/images/mine")
    assert found.cure.startswith("install runsc of 2024-07-29 or later")


def test_python_of_the_home_runs_no_program_of_the_server(tmp_path: Path) -> None:
    """An agent could replace it by one that fails, and its attempt would have no reward instead of 0."""
    for name in ("root/.pyenv/shims/python3", "usr/bin/python3"):
        program = tmp_path / ROOT_FOLDER / name
        program.parent.mkdir(parents=True)
        program.touch(0o755)
    path = {"PATH": "/linked:/root/.pyenv/shims:/usr/bin"}
    (tmp_path / ROOT_FOLDER / "linked").symlink_to("/root/.pyenv/shims")
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"version": 1, "env": path}))
    assert inside_command(ImageFolder.read(tmp_path), "pack")[0] == "/usr/bin/python3"
    program.unlink()
    with pytest.raises(ImageError, match="no python3 on its PATH outside of the home folder"):
        inside_command(ImageFolder.read(tmp_path), "pack")
