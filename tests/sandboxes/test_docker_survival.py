"""Containers that survive their server, and an engine that is killed and started again."""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from docker import APIClient
from docker.errors import APIError

from decathlon_mcp.errors import ProviderUnavailableError, SandboxLostError
from decathlon_mcp.plugins.conformance.target import file_entry, pack, receive_line
from decathlon_mcp.plugins.docker import provider as docker_provider
from decathlon_mcp.plugins.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.base import Sandbox, SandboxSpec
from tests.sandboxes.conftest import Bench, docker_bench
from tests.sandboxes.own_engine import OwnEngine
from tests.sandboxes.test_docker import image_with_users

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


# Creation


@pytest.mark.parametrize(("keeping", "keeps"), [("1.24", True), ("9.99", False)])
async def test_surviving_container_is_kept_by_its_engine(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, keeping: str, keeps: bool
) -> None:
    """Its input stays open, and it has no AutoRemove on an engine that would then remove it."""
    monkeypatch.setattr("decathlon_mcp.plugins.docker.engine.KEEPING_API_VERSION", keeping)
    spec = docker.new_spec(survives=True)
    async with docker.provider.open(spec):
        container = docker.engine.inspect_container(f"decathlon-{spec.name}")
    assert not container["Config"]["StdinOnce"]
    assert container["HostConfig"]["AutoRemove"] == keeps
    await docker.assert_nothing_left()


# Taking back


async def test_files_belong_to_the_images_user_whatever_the_container_says_now(
    docker: Bench, docker_engine: Any, test_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decathlon_mcp.plugins.docker.image._ids_by_digest", {})
    script = """
import os
for line in iter(input, None):
    print(os.stat('in/a').st_uid, flush=True)
"""
    with image_with_users(docker_engine, test_image, "true", "player") as image:
        base = docker.python_spec(script, survives=True)
        spec = SandboxSpec(base.name, base.command, base.root, image, limits=base.limits, survives=True)
        await docker.leave_behind([spec], "none")
        table = pack(file_entry("passwd", b"player:x:0:0::/:\n"))
        docker_engine.put_archive(f"decathlon-{spec.name}", "/etc", table)
        async with docker.provider.reattach(docker.former_owner, spec) as sandbox:
            await sandbox.put(sandbox.root / "in", pack(file_entry("a")))
            await sandbox.stream.send(b"\n")
            assert await receive_line(sandbox) == "4321"
            assert len(await docker.resources()) == 1
        await docker.assert_nothing_left()


async def test_container_is_kept_if_no_engine_answers(docker: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking it back again succeeds once the engine answers."""
    real = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    spec = docker.new_spec(survives=True)
    await docker.leave_behind([spec], "none")
    path = anyio.Path(f"/tmp/{docker.owner}.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    async with DockerProvider(docker.owner) as provider:
        with anyio.fail_after(3), pytest.raises(ProviderUnavailableError):
            async with provider.reattach(docker.former_owner, spec):
                pass
        await path.symlink_to(real)
        try:
            async with provider.reattach(docker.former_owner, spec) as sandbox:
                await sandbox.stream.send(b"{}\n")
                await receive_line(sandbox)
        finally:
            await path.unlink()
    await docker.assert_nothing_left()


async def test_container_that_was_left_behind_is_removed_by_the_next_sweep(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_arguments: Any, **_options: Any) -> None:
        raise APIError("device is busy")

    with monkeypatch.context() as patch:
        patch.setattr(APIClient, "remove_container", refuse)
        patch.setattr(docker_provider, "REMOVE_RETRY_SECONDS", (0.01,))
        async with docker.provider.open(docker.new_spec(survives=True)):
            pass
        assert "A container was left behind" in caplog.text
        with pytest.raises(ProviderUnavailableError, match="1 sandboxes could not be removed"):
            await docker.provider.sweep(docker.owner)
    assert await docker.provider.sweep(docker.owner) == 1
    await docker.assert_nothing_left()


# An engine that is killed


@asynccontextmanager
async def bench_on(engine: OwnEngine, folder: Path, image: str) -> AsyncGenerator[Bench]:
    api: Any = APIClient(base_url=engine.host, version="auto")
    bench = docker_bench("engine-test", folder, api, image)
    try:
        async with bench.provider:
            yield bench
        await bench.assert_nothing_left()
    finally:
        api.close()


@pytest.mark.long
async def test_sandbox_that_ends_while_its_engine_is_down_is_lost(
    own_engine: OwnEngine, test_image: str, tmp_path: Path
) -> None:
    async with bench_on(own_engine, tmp_path, test_image) as bench:
        script = "import time; print(flush=True); time.sleep(2); raise SystemExit(3)"
        former, own = (bench.python_spec(script, survives=True) for _ in range(2))
        await bench.leave_behind([former], "none")
        async with bench.provider.open(own) as sandbox:
            await receive_line(sandbox)
            await own_engine.kill()
            await anyio.sleep(3)
            await own_engine.start()
            with pytest.raises(SandboxLostError):
                await reopen_when_possible(sandbox)
            await sandbox.cause_of_end()
            assert not await sandbox.is_running()
        with pytest.raises(SandboxLostError):
            async with bench.provider.reattach(bench.former_owner, former):
                pass


@pytest.mark.long
async def test_server_and_engine_die_together(own_engine: OwnEngine, test_image: str, tmp_path: Path) -> None:
    async with bench_on(own_engine, tmp_path, test_image) as bench:
        running, paused = (bench.new_spec(survives=True) for _ in range(2))
        await bench.leave_behind([running], "none")
        await bench.leave_behind([paused], "pause")
        await own_engine.kill()
        with pytest.raises(ProviderUnavailableError):
            async with bench.provider.reattach(bench.former_owner, running):
                pass
        await own_engine.start()
        async with bench.provider.reattach(bench.former_owner, running) as sandbox:
            await sandbox.stream.send(b"{}\n")
            await receive_line(sandbox)
        async with bench.provider.reattach(bench.former_owner, paused) as sandbox:
            assert not await sandbox.is_running()
            await sandbox.get(sandbox.root, tmp_path / "out.tar", 1 << 20)


async def reopen_when_possible(sandbox: Sandbox) -> None:
    while True:
        try:
            await sandbox.reopen()
        except ProviderUnavailableError:
            await anyio.sleep(0.1)
        else:
            return
