"""What is particular to sandboxes that are containers: hardening, images, networks, engines that fail."""

from __future__ import annotations

import asyncio
import io
import os
import secrets
import socket
import tarfile
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from docker import APIClient
from docker.errors import APIError
from requests import Response

from decathlon_mcp.driver_client.driver import connect
from decathlon_mcp.errors import ImageError, ProviderUnavailableError
from decathlon_mcp.sandboxes.base import Limits
from decathlon_mcp.sandboxes.docker.image import STARTER_IMAGE, missing
from decathlon_mcp.sandboxes.docker.network import DEFAULT_NETWORK
from decathlon_mcp.sandboxes.docker.provider import DockerProvider
from decathlon_mcp.suites.loading import load_suite
from tests.sandboxes.conftest import Bench
from tests.sandboxes.test_contract import packed, taken
from tests.sandboxes.test_processes import everything, line

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


# what a container may do


async def test_a_container_is_as_closed_as_it_can_be(docker: Bench) -> None:
    limits = Limits(memory_mib=256, cpus=0.5, pids=64, scratch_mib=16)
    spec = docker.spec(limits=limits)
    async with docker.provider.open(spec):
        found = docker.engine.inspect_container(f"decathlon-{spec.name}")
    host, config = found["HostConfig"], found["Config"]
    assert host["CapDrop"] == ["ALL"]
    assert not host["CapAdd"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert not host["Privileged"]
    assert host["Memory"] == host["MemorySwap"] == 256 << 20
    assert host["PidsLimit"] == 64
    assert host["NanoCpus"] == 500_000_000
    assert host["LogConfig"]["Type"] == "none"
    assert host["AutoRemove"]
    assert not host["Init"]
    assert host["NetworkMode"] == "none"
    assert not host["PortBindings"]
    assert not host["PublishAllPorts"]
    assert not host["Binds"]
    assert found["Mounts"] == []
    assert set(host["Tmpfs"]) == {"/tmp"}
    assert config["NetworkDisabled"]
    assert config["StdinOnce"]
    assert config["Labels"] == {
        **config["Labels"],
        "decathlon.owner": docker.owner,
        "decathlon.sandbox": spec.name,
    }


async def test_limits_that_are_not_set_are_the_engines(docker: Bench) -> None:
    spec = docker.spec(limits=Limits(memory_mib=None, cpus=None, pids=None))
    async with docker.provider.open(spec):
        host = docker.engine.inspect_container(f"decathlon-{spec.name}")["HostConfig"]
    assert (host["Memory"], host["NanoCpus"], host["PidsLimit"]) == (0, 0, None)


async def test_inside_there_are_no_capabilities_and_scratch_is_small(docker: Bench) -> None:
    script = """
status = open('/proc/self/status').read()
told = ('CapEff', 'CapBnd', 'NoNewPrivs')
print([line.split()[1] for line in status.splitlines() if line.startswith(told)])
try:
    open('/tmp/large', 'wb').write(bytes(32 << 20))
except OSError as error:
    print(error.strerror)
"""
    spec = docker.spec("python3", "-c", script, limits=Limits(memory_mib=256, scratch_mib=16))
    with anyio.fail_after(30):
        async with docker.provider.open(spec) as sandbox:
            said = (await everything(sandbox.stream)).decode().splitlines()
    assert said == ["['0000000000000000', '0000000000000000', '1']", "No space left on device"]


async def test_without_a_network_there_is_loopback_and_nothing_else(docker: Bench) -> None:
    script = """
import os, socket
print(sorted(os.listdir('/sys/class/net')))
listener = socket.create_server(('127.0.0.1', 0))
socket.create_connection(listener.getsockname())
try:
    socket.create_connection(('192.0.2.1', 80), timeout=5)
except OSError as error:
    print(error.strerror)
"""
    with anyio.fail_after(30):
        async with docker.provider.open(docker.python(script)) as sandbox:
            said = (await everything(sandbox.stream)).decode().splitlines()
    assert said[0] in ("['lo']", "['lo', 'tunl0']", "['lo', 'sit0', 'tunl0']")
    assert said[1] == "Network is unreachable"


async def test_with_a_network_it_is_one_of_ours_and_nothing_is_published(docker: Bench) -> None:
    spec = docker.spec(network="outbound")
    async with docker.provider.open(spec):
        found = docker.engine.inspect_container(f"decathlon-{spec.name}")
    assert [*found["NetworkSettings"]["Networks"]] == [DEFAULT_NETWORK]
    network = docker.engine.inspect_network(found["HostConfig"]["NetworkMode"])
    assert network["Options"]["com.docker.network.bridge.enable_icc"] == "false"
    assert not network["Internal"]
    assert not found["Config"].get("NetworkDisabled")
    assert not any(found["NetworkSettings"]["Ports"].values())


async def test_another_network_of_the_engines_may_be_chosen(docker: Bench, docker_network: str) -> None:
    async with DockerProvider(docker.owner, network=docker_network) as provider:
        spec, without = docker.spec(network="outbound"), docker.spec()
        async with provider.open(spec), provider.open(without):
            found = docker.engine.inspect_container(f"decathlon-{spec.name}")["NetworkSettings"]
            cut_off = docker.engine.inspect_container(f"decathlon-{without.name}")
        findings = {each.what: each for each in await provider.check(None)}
    assert [*found["Networks"]] == [docker_network]
    assert cut_off["HostConfig"]["NetworkMode"] == "none"
    assert findings["network"].ok


async def test_a_network_that_is_not_there_is_said(docker: Bench) -> None:
    async with DockerProvider(docker.owner, network="decathlon-nowhere") as provider:
        findings = {each.what: each for each in await provider.check(None)}
        with pytest.raises(ProviderUnavailableError, match="network decathlon-nowhere not found"):
            async with provider.open(docker.spec(network="outbound")):
                pytest.fail("it opened")
    assert findings["network"].cure == "docker network create decathlon-nowhere"


async def test_processes_are_limited(docker: Bench) -> None:
    script = """
import os, time
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(1000)
        made += 1
except OSError as error:
    print(error.strerror, made < 20)
"""
    spec = docker.spec("python3", "-c", script, limits=Limits(memory_mib=256, pids=16))
    with anyio.fail_after(30):
        async with docker.provider.open(spec) as sandbox:
            assert await everything(sandbox.stream) == b"Resource temporarily unavailable True\n"


# ends


async def test_a_first_process_out_of_memory_is_told_as_that(docker: Bench) -> None:
    script = "data = [bytes(1 << 20) + b'x' for _ in range(1000)]"
    spec = docker.spec("python3", "-c", script, limits=Limits(memory_mib=64))
    with anyio.fail_after(30):
        async with docker.provider.open(spec) as sandbox:
            await everything(sandbox.stream)
            assert await sandbox.cause_of_end() == "out of memory"
            assert sandbox.out_of_memory


async def test_a_child_out_of_memory_is_told_and_the_first_process_lives(docker: Bench) -> None:
    script = """
import os, subprocess, sys
eat = "data = [bytes(1 << 20) + b'x' for _ in range(1000)]"
print(subprocess.run(['python3', '-c', eat]).returncode, flush=True)
sys.stdin.read()
"""
    spec = docker.spec("python3", "-c", script, limits=Limits(memory_mib=64))
    with anyio.fail_after(30):
        async with docker.provider.open(spec) as sandbox:
            assert await line(sandbox) == "-9"
            while not sandbox.out_of_memory:  # noqa: ASYNC110  (the engine's event is on its way)
                await anyio.sleep(0.01)
            assert await sandbox.cause_of_end() is None


async def test_a_container_killed_from_outside_is_lost_with_its_exit_code(docker: Bench) -> None:
    spec = docker.spec()
    with anyio.fail_after(30):
        async with docker.provider.open(spec) as sandbox, connect(sandbox) as link:
            docker.engine.kill(f"decathlon-{spec.name}")
            await link.closed.wait()
            assert await sandbox.cause_of_end() == "exit code 137"


async def test_a_container_that_refuses_to_go_at_first_is_removed(
    docker: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[str] = []
    remove: Any = APIClient.remove_container

    def refuse(self: Any, container: str, **how: Any) -> None:
        if len(refused) < 2:
            refused.append(container)
            response = Response()
            response.status_code = 500
            raise APIError("500", response=response, explanation="device is busy")
        remove(self, container, **how)

    monkeypatch.setattr(APIClient, "remove_container", refuse)
    with anyio.fail_after(30):
        async with docker.provider.open(docker.spec()):
            pass
    assert len(refused) == 2
    assert docker.left() == []


# images


async def test_an_image_that_is_missing_is_named_with_the_way_to_get_it(docker: Bench) -> None:
    with anyio.fail_after(3), pytest.raises(ImageError, match="docker pull no/such-image:1") as caught:
        async with docker.provider.open(docker.spec(image="no/such-image:1")):
            pass
    assert caught.value.data["image"] == "no/such-image:1"
    findings = await docker.provider.check("no/such-image:1")
    assert [finding.cure for finding in findings if not finding.ok] == [
        "get it with: docker pull no/such-image:1"
    ]


async def test_the_starter_suites_image_is_made_by_a_script() -> None:
    assert load_suite("starter").profile.image == STARTER_IMAGE
    assert missing(STARTER_IMAGE).message.endswith("get it with: tests/image/build")


@pytest.fixture
def bare_image(docker_engine: Any) -> Iterator[str]:
    """An image with nothing in it at all."""
    tag = secrets.token_hex(4)
    docker_engine.import_image_from_data(
        packed(("etc", tarfile.DIRTYPE, b"")), repository="decathlon-test-bare", tag=tag
    )
    yield f"decathlon-test-bare:{tag}"
    docker_engine.remove_image(f"decathlon-test-bare:{tag}", force=True)


async def test_an_image_without_python_is_named_and_nothing_is_left(docker: Bench, bare_image: str) -> None:
    with anyio.fail_after(30), pytest.raises(ImageError, match=f"{bare_image} has no python3 on its PATH"):
        async with docker.provider.open(docker.spec(image=bare_image)):
            pass
    assert docker.left() == []
    findings = await docker.provider.check(bare_image)
    assert [finding.what for finding in findings if not finding.ok] == ["python3"]
    assert docker.left() == []


@pytest.fixture
def odd_image(docker_engine: Any, test_image: str) -> Iterator[str]:
    """Of a user by name who is not root, with an entry point, a command, a volume and a health check."""
    name = f"decathlon-test-odd:{secrets.token_hex(4)}"
    lines = [
        f"FROM {test_image}",
        "RUN useradd --uid 4321 --user-group player",
        'ENTRYPOINT ["/bin/false"]',
        'CMD ["nonsense"]',
        "VOLUME /data",
        "HEALTHCHECK --interval=1s CMD false",
        "USER player",
    ]
    said = list(
        docker_engine.build(fileobj=io.BytesIO("\n".join(lines).encode()), tag=name, rm=True, decode=True)
    )
    assert "error" not in said[-1], said
    yield name
    docker_engine.remove_image(name, force=True)


async def test_whatever_the_image_starts_by_itself_the_files_are_its_users(
    docker: Bench, odd_image: str, tmp_path: Path
) -> None:
    script = """
import os
print(os.getuid(), os.stat('.').st_uid, os.stat('in/a').st_uid)
import socket
assert socket.gethostbyname("localhost") == "127.0.0.1"
open('out', 'w').write('x')
"""
    spec = docker.spec(image=odd_image)
    with anyio.fail_after(60):
        async with docker.provider.open(spec) as sandbox, connect(sandbox) as link:
            await sandbox.put(sandbox.root / "in", packed(("a", tarfile.REGTYPE, b"")))
            result = await link.run(["python3", "-c", script], cwd=str(sandbox.root), timeout_seconds=20)
            assert (result.stdout, result.stderr) == ("4321 4321 4321\n", "")
            found = await taken(sandbox, sandbox.root, tmp_path / "out.tar")
            assert found["out"][3] == b"x"
            volumes = [
                mount["Name"] for mount in docker.engine.inspect_container(f"decathlon-{spec.name}")["Mounts"]
            ]
    assert docker.left() == []
    assert len(volumes) == 1
    assert not {volume["Name"] for volume in docker.engine.volumes()["Volumes"] or ()} & set(volumes)


# engines


@pytest.mark.parametrize(
    "host", ["unix:///nowhere/docker.sock", "tcp://127.0.0.1:9", "ssh://nobody@localhost", "junk://"]
)
async def test_an_engine_that_is_not_there_is_told_in_one_line_within_3_seconds(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    await expect_no_engine(docker, host)


async def test_an_engine_that_does_not_answer_is_told_in_one_line_within_3_seconds(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = f"/tmp/{docker.owner}.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        try:
            monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
            await expect_no_engine(docker, path)
        finally:
            await anyio.Path(path).unlink()


async def expect_no_engine(docker: Bench, where: str) -> None:
    """However many ask at once."""
    errors: list[ProviderUnavailableError] = []
    async with DockerProvider(docker.owner) as provider:

        async def one() -> None:
            with pytest.raises(ProviderUnavailableError) as caught:
                async with provider.open(docker.spec()):
                    pass
            errors.append(caught.value)

        began = time.monotonic()
        async with anyio.create_task_group() as tasks:
            for _ in range(3):
                tasks.start_soon(one)
        assert time.monotonic() - began < 3
        for error in errors:
            assert where in error.message
            assert "\n" not in error.message
            assert error.retryable
        with anyio.fail_after(3):
            findings = await provider.check(docker.image)
        assert [(finding.what, finding.ok, bool(finding.cure)) for finding in findings] == [
            ("engine", False, True)
        ]


async def test_an_engine_that_comes_back_is_used_again(
    docker: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider was entered, and asked, before there was an engine."""
    real = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")
    path = f"/tmp/{docker.owner}.sock"
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    with anyio.fail_after(60):
        async with DockerProvider(docker.owner) as provider:
            with pytest.raises(ProviderUnavailableError):
                async with provider.open(docker.spec()):
                    pass
            await anyio.Path(path).symlink_to(real)
            try:
                async with provider.open(docker.spec()) as sandbox, connect(sandbox) as link:
                    await link.ping()
            finally:
                await anyio.Path(path).unlink()


async def test_an_engine_over_tcp_serves_as_well(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with anyio.fail_after(60):
        async with engine_over_tcp() as port:
            monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
            async with DockerProvider(docker.owner) as provider:
                async with provider.open(docker.spec()) as sandbox, connect(sandbox) as link:
                    await link.arrange({"write": str(sandbox.root / "a"), "text": "x" * 100_000})
                    found = await taken(sandbox, sandbox.root, tmp_path / "out.tar")
                    assert found["a"][3] == b"x" * 100_000
                    await sandbox.stream.send_eof()
                    await link.closed.wait()
                    assert await sandbox.cause_of_end() == "exit code 0"
            assert docker.left() == []


@asynccontextmanager
async def engine_over_tcp() -> AsyncGenerator[int]:
    """The engine's socket behind a loopback port."""
    real = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(65536):
                sink.write(chunk)
                await sink.drain()
            sink.write_eof()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_engine, to_engine = await asyncio.open_unix_connection(real)
        with closing(writer), closing(to_engine):
            await asyncio.gather(copy(reader, to_engine), copy(from_engine, writer))

    server = await asyncio.start_server(serve, "127.0.0.1")
    async with server:
        yield server.sockets[0].getsockname()[1]
