"""Snapshots of gVisor's sandboxes: those that runsc refuses, and drivers in copies."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.client import DriverClient, connect
from decathlon_mcp.driver.stream import ReconnectPolicy
from decathlon_mcp.errors import SnapshotError
from decathlon_mcp.plugins.gvisor.runsc import IMAGE_FILES, check_snapshot, describe_snapshot
from decathlon_mcp.sandboxes.base import Limits, SandboxSpec
from decathlon_mcp.sandboxes.capabilities import Snapshot, snapshots_of
from decathlon_mcp.sandboxes.host.image_folder import ImageFolder
from decathlon_mcp.sandboxes.host.mounts import SandboxUser
from tests.sandboxes.conftest import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, None),
        ({"version": "runsc 2"}, "made by runsc 1, and only that can open it; here is runsc 2"),
        ({"image": {"digest": "sha256:2"}}, "of a sandbox with another image"),
        ({"image": {"user": SandboxUser(1000, 1000)}}, "of a sandbox with another image"),
        ({"spec": {"command": ("python3", "-V")}}, "another image, root, command or limits"),
        ({"spec": {"limits": Limits(pids=7)}}, "another image, root, command or limits"),
        ({"spec": {"name": "copy", "survives": True}}, None),
        ({"file": "checkpoint.img"}, "damaged"),
    ],
    ids=str,
)
def test_snapshot_is_of_one_kind_of_sandbox(
    tmp_path: Path, change: dict[str, Any], message: str | None
) -> None:
    for name in IMAGE_FILES:
        (tmp_path / name).write_text(name)
    program = tmp_path / "usr/bin/python3"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    spec = SandboxSpec("original", ("python3", "-c", ""), PurePosixPath("/root"))
    image = replace(ImageFolder.read(tmp_path), digest="sha256:1")
    describe_snapshot(tmp_path, spec, image, "runsc 1")
    if "file" in change:
        (tmp_path / change["file"]).write_text("changed")
    spec, image = replace(spec, **change.get("spec", {})), replace(image, **change.get("image", {}))
    with nullcontext() if message is None else pytest.raises(SnapshotError, match=message):
        check_snapshot(Snapshot(tmp_path), spec, image, change.get("version", "runsc 1"))


async def test_copies_of_a_driver_answer_for_themselves_only(gvisor: Bench, tmp_path: Path) -> None:
    provider = snapshots_of(gvisor.provider)
    assert provider is not None
    spec = gvisor.spec()
    root = str(spec.root)

    async def run(driver: DriverClient, script: str) -> str:
        return (await driver.run(["sh", "-c", script], cwd=root, timeout_seconds=30)).stdout.strip()

    async with provider.open(spec) as sandbox, connect(sandbox) as driver:
        replies: list[str] = []

        async def run_long() -> None:
            replies.append(await run(driver, "sleep 1; echo >> calls; wc -l < calls"))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_long)
            await driver.ping(saving=True)
            snapshot = await sandbox.snapshot(tmp_path / "saved")
            async with (
                provider.open(gvisor.spec(), snapshot=snapshot) as first,
                connect(first, reconnect=ReconnectPolicy(generation=2), reattached=True) as one,
                provider.open(gvisor.spec(), snapshot=snapshot) as second,
                connect(second, reconnect=ReconnectPolicy(generation=2), reattached=True) as two,
            ):
                # The command of the call runs on in each copy, and nobody gets its reply there.
                wait = "while [ ! -s calls ]; do sleep 0.05; done; "
                assert await run(one, f"{wait} echo >> calls; wc -l < calls") == "2"
                assert await run(one, "echo >> calls; wc -l < calls") == "3"
                assert await run(two, f"{wait} wc -l < calls") == "1"
                # A copy of a copy has again a higher generation.
                again = await first.snapshot(tmp_path / "again")
                async with (
                    provider.open(gvisor.spec(), snapshot=again) as third,
                    connect(third, reconnect=ReconnectPolicy(generation=3), reattached=True) as three,
                ):
                    assert await run(three, "wc -l < calls") == "3"
                    assert await run(one, "wc -l < calls") == "3"
        assert replies == ["1"]
        assert await run(driver, "wc -l < calls") == "1"
    await gvisor.assert_nothing_left()


async def test_copies_of_an_old_state_live_although_their_clock_has_gone_on(
    gvisor: Bench, tmp_path: Path
) -> None:
    provider = snapshots_of(gvisor.provider)
    assert provider is not None
    policy = ReconnectPolicy(5)
    async with provider.open(gvisor.spec()) as sandbox, connect(sandbox, reconnect=policy) as driver:
        await driver.ping(saving=True)
        snapshot = await sandbox.snapshot(tmp_path / "saved")
        # Longer than a driver waits for a server.
        await anyio.sleep(7)
        async with (
            provider.open(gvisor.spec(), snapshot=snapshot) as copy,
            connect(copy, reconnect=ReconnectPolicy(60, 2), reattached=True) as copied,
        ):
            await copied.ping()
    shutil.rmtree(tmp_path / "saved")
    with pytest.raises(SnapshotError, match="gone"):
        async with provider.open(gvisor.spec(), snapshot=Snapshot(tmp_path / "saved")):
            pass
