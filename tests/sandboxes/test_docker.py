"""Sandboxes that are containers: hardening, networks, exits, images, and engines that fail."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import os
import secrets
import socket
import time
from collections.abc import AsyncGenerator, Generator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from docker import APIClient
from docker.errors import APIError
from requests import Response

from decathlon_mcp.archives.writing import pack_empty_folders
from decathlon_mcp.driver.client import connect
from decathlon_mcp.errors import DecathlonError, ImageError, ProviderUnavailableError
from decathlon_mcp.plugins.conformance.target import download, file_entry, pack, receive_all, receive_line
from decathlon_mcp.plugins.docker import image as docker_image
from decathlon_mcp.plugins.docker.checks import check_runtime
from decathlon_mcp.plugins.docker.engine import regular_file
from decathlon_mcp.plugins.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.base import Finding, Limits
from decathlon_mcp.types import JsonObject
from tests.sandboxes.conftest import Bench

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


# Hardening


async def test_container_has_no_privileges_no_network_and_limits(docker: Bench) -> None:
    limits = Limits(memory_mib=256, cpus=0.5, pids=64, scratch_mib=16)
    spec = docker.spec(limits=limits)
    async with docker.provider.open(spec):
        container = docker.engine.inspect_container(f"decathlon-{spec.name}")
    host, config = container["HostConfig"], container["Config"]
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
    assert container["Mounts"] == []
    assert set(host["Tmpfs"]) == {"/tmp"}
    assert config["NetworkDisabled"]
    assert config["StdinOnce"]
    assert config["Labels"] == {
        **config["Labels"],
        "decathlon.owner": docker.owner,
        "decathlon.sandbox": spec.name,
    }


ATTACKS = Path(__file__).parent / "driver_threads.py"
LONG_SEARCH: dict[str, Any] = {"absent": ["no such name"], "under": "/usr", "except": []}


async def test_limits_of_the_drivers_threads_cannot_be_set(docker: Bench) -> None:
    """Threads have ids of their own; slowing them is possible and does not end the driver."""
    spec = docker.spec()
    report: dict[str, Any] = {}
    with anyio.fail_after(120):
        async with docker.provider.open(spec) as sandbox, connect(sandbox) as driver:
            root = str(sandbox.root)
            await sandbox.put(sandbox.root, pack(file_entry("attacks.py", ATTACKS.read_bytes())))
            async with anyio.create_task_group() as tasks:
                # A thread of the driver works on this until it is cancelled.
                tasks.start_soon(driver.arrange, *[LONG_SEARCH] * 20_000)
                await driver.ping()
                result = await driver.run(
                    ["python3", "attacks.py"], cwd=root, timeout_seconds=100, env={"HOME": root}
                )
                await driver.ping()
                assert result.exit_code == 0, result.stderr
                report = json.loads(result.stdout)
                tasks.cancel_scope.cancel()
            assert report["threads"] > 1
            assert report["accepted"] == []
            assert report["errors"] == []
            result = await driver.run(["cat", "/proc/1/limits"], cwd=root, timeout_seconds=10)
            assert "Max cpu time              unlimited            unlimited" in result.stdout


async def test_configured_network_is_used(docker: Bench, docker_network: str) -> None:
    async with DockerProvider(docker.owner, network=docker_network) as provider:
        spec, without = docker.spec(network="outbound"), docker.spec()
        async with provider.open(spec), provider.open(without):
            settings = docker.engine.inspect_container(f"decathlon-{spec.name}")["NetworkSettings"]
            isolated = docker.engine.inspect_container(f"decathlon-{without.name}")
        findings = {finding.what: finding for finding in await provider.check(None)}
    assert [*settings["Networks"]] == [docker_network]
    assert isolated["HostConfig"]["NetworkMode"] == "none"
    assert findings["network"].ok


async def test_missing_network_and_runtime_are_reported(docker: Bench) -> None:
    missing = {"network": "decathlon-nowhere", "runtime": "nowhere"}
    for kind, name in missing.items():
        options: dict[str, Any] = {kind: name}
        async with DockerProvider(docker.owner, **options) as provider:
            findings = {finding.what: finding for finding in await provider.check(None)}
            with pytest.raises(ProviderUnavailableError, match=f"the engine has no {kind} {name}"):
                async with provider.open(docker.spec(network="outbound")):
                    pytest.fail("it opened")
        cure = "runc" if kind == "runtime" else "docker network create decathlon-nowhere"
        assert cure in findings[kind].cure


@pytest.mark.parametrize(
    ("runtime", "keeps_files"),
    [
        ({"path": "runc"}, None),
        ({"path": "/usr/bin/runsc"}, "no"),
        ({"path": "/usr/bin/runsc", "runtimeArgs": ["--overlay2=none"]}, "yes"),
        # What a script or a shim passes to gVisor, the engine does not know.
        ({"path": "/usr/bin/runsc-with-options"}, "perhaps"),
    ],
    ids=str,
)
def test_runtime_of_gvisor_is_recognised_by_its_program(runtime: JsonObject, keeps_files: str | None) -> None:
    facts: JsonObject = {"Runtimes": {"mine": runtime}, "DefaultRuntime": "mine"}
    findings = check_runtime(facts, "mine")
    if keeps_files is None:
        assert findings == [Finding("runtime", True, "mine")]
        assert check_runtime(facts, None) == []
        return
    assert check_runtime(facts, None) == findings
    files, isolation = findings
    assert (files.what, files.ok, bool(files.cure)) == ("runtime", keeps_files != "no", keeps_files != "yes")
    assert files.required
    assert "overlay2" in files.detail
    assert (isolation.what, isolation.ok) == ("isolation", True)
    assert "--provider host --kernel gvisor" in isolation.cure


# Exits


async def test_container_killed_from_outside_is_not_out_of_memory_because_a_child_was(docker: Bench) -> None:
    script = """
import subprocess, sys
eat = "data = [bytes(1 << 20) + b'x' for _ in range(1000)]"
print(subprocess.run(['python3', '-c', eat]).returncode, flush=True)
sys.stdin.read()
"""
    spec = docker.spec("python3", "-c", script, limits=Limits(memory_mib=64))
    with anyio.fail_after(30):
        async with docker.provider.open(spec) as sandbox:
            assert await receive_line(sandbox) == "-9"
            assert await sandbox.cause_of_end() is None, "a child that is killed does not end it"
            docker.engine.kill(f"decathlon-{spec.name}")
            await receive_all(sandbox)
            assert await sandbox.cause_of_end() == "killed by the engine, exit code 137"


ENGINES_PATH = "/var/lib/docker/overlay2/merged"
OPENING = ("inspect_image", "create_container_from_config", "put", "attach_socket", "start", "networks")
"""Requests to an engine by which a sandbox is opened and filled."""


def refused_request(status: int = 500) -> APIError:
    response = Response()
    response.status_code = status
    return APIError(str(status), response=response, explanation=f"lstat {ENGINES_PATH}: not a directory")


def refuse_request(monkeypatch: pytest.MonkeyPatch, name: str, status: int = 500) -> None:
    def refuse(self: Any, *arguments: Any, **options: Any) -> None:
        raise refused_request(status)

    monkeypatch.setattr(APIClient, name, refuse)


def assert_only_logged(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Assert that the engine's message is in the log and not in the error."""
    assert ENGINES_PATH not in f"{error} {getattr(error, 'data', '')}"
    assert any(ENGINES_PATH in str(getattr(record, "fields", "")) for record in caplog.records)


async def test_opening_that_the_engine_refuses_does_not_repeat_its_message(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def open_and_fill() -> None:
        async with docker.provider.open(docker.spec(network="outbound")) as sandbox:
            await sandbox.put(sandbox.root, pack(file_entry("file")))

    monkeypatch.setattr(docker_image, "IMAGE_SECONDS", -1)
    for number, request_name in enumerate(OPENING):
        caplog.clear()
        with monkeypatch.context() as patch:
            refuse_request(patch, request_name, 403 if number % 2 else 500)
            with pytest.raises(DecathlonError) as raised:
                await open_and_fill()
        assert_only_logged(raised.value, caplog)


def refuse_archives(monkeypatch: pytest.MonkeyPatch, times: int) -> list[str]:
    """Let an engine refuse so many requests for archives; returns the paths of all such requests."""
    get: Any = APIClient.get
    paths: list[str] = []

    def refuse(self: Any, url: str, **options: Any) -> Any:
        if not url.endswith("/archive"):
            return get(self, url, **options)
        paths.append(options["params"]["path"])
        if len(paths) <= times:
            raise refused_request()
        return get(self, url, **options)

    monkeypatch.setattr(APIClient, "get", refuse)
    return paths


async def test_refusal_that_passes_does_not_make_a_folder_look_empty_and_one_that_does_not_is_a_failure(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async with docker.provider.open(docker.spec()) as sandbox:
        await sandbox.put(sandbox.root, pack(file_entry("file", b"work")))
        with monkeypatch.context() as patch:
            paths = refuse_archives(patch, 1)
            listing = await download(sandbox, sandbox.root, tmp_path / "out.tar")
        assert listing["file"][1] == b"work"
        assert paths == [f"{sandbox.root}/.", "/", f"{sandbox.root}/."]
        refuse_archives(monkeypatch, 2)
        with pytest.raises(ProviderUnavailableError, match="the engine refused a request"):
            await sandbox.get(sandbox.root, tmp_path / "none.tar", 1 << 20)
        assert not (tmp_path / "none.tar").exists()


# Images


async def test_missing_image_error_says_how_to_get_it(docker: Bench) -> None:
    with anyio.fail_after(3), pytest.raises(ImageError, match="docker pull no/such-image:1") as caught:
        async with docker.provider.open(docker.spec(image="no/such-image:1")):
            pass
    assert caught.value.data["image"] == "no/such-image:1"
    findings = await docker.provider.check("no/such-image:1")
    assert [finding.cure for finding in findings if not finding.ok] == [
        "get it with: docker pull no/such-image:1"
    ]


@pytest.fixture
def bare_image(docker_engine: Any) -> Iterator[str]:
    """An image with one empty folder."""
    tag = secrets.token_hex(4)
    archive = pack_empty_folders(["etc"])
    docker_engine.import_image_from_data(archive, repository="decathlon-test-bare", tag=tag)
    yield f"decathlon-test-bare:{tag}"
    docker_engine.remove_image(f"decathlon-test-bare:{tag}", force=True)


async def test_image_without_python_is_an_error_and_leaves_nothing(docker: Bench, bare_image: str) -> None:
    with anyio.fail_after(30), pytest.raises(ImageError, match=f"{bare_image} has no python3 on its PATH"):
        async with docker.provider.open(docker.spec(image=bare_image)):
            pass
    await docker.assert_nothing_left()
    findings = await docker.provider.check(bare_image)
    assert [finding.what for finding in findings if not finding.ok] == ["python3"]
    await docker.assert_nothing_left()


@pytest.fixture
def odd_image(docker_engine: Any, test_image: str) -> Iterator[str]:
    """An image with a user by name, an entry point, a command, a volume and a health check."""
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
    dockerfile = io.BytesIO("\n".join(lines).encode())
    messages = list(docker_engine.build(fileobj=dockerfile, tag=name, rm=True, decode=True))
    assert "error" not in messages[-1], messages
    yield name
    docker_engine.remove_image(name, force=True)


async def test_image_with_its_own_user_and_entry_point_works(
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
        async with docker.provider.open(spec) as sandbox, connect(sandbox) as driver:
            await sandbox.put(sandbox.root / "in", pack(file_entry("a")))
            result = await driver.run(["python3", "-c", script], cwd=str(sandbox.root), timeout_seconds=20)
            assert (result.stdout, result.stderr) == ("4321 4321 4321\n", "")
            listing = await download(sandbox, sandbox.root, tmp_path / "out.tar")
            assert listing["out"][1] == b"x"
            volumes = [
                mount["Name"] for mount in docker.engine.inspect_container(f"decathlon-{spec.name}")["Mounts"]
            ]
    await docker.assert_nothing_left()
    assert len(volumes) == 1
    assert not {volume["Name"] for volume in docker.engine.volumes()["Volumes"] or ()} & set(volumes)


@contextmanager
def image_with_users(docker_engine: Any, base: str, command: str, user: str) -> Generator[str]:
    name = f"decathlon-test-user:{secrets.token_hex(4)}"
    lines = [f"FROM {base}", f"RUN useradd --uid 4321 --user-group player && {command}", f"USER {user}"]
    dockerfile = io.BytesIO("\n".join(lines).encode())
    messages = list(docker_engine.build(fileobj=dockerfile, tag=name, rm=True, decode=True))
    assert "error" not in messages[-1], messages
    yield name
    docker_engine.remove_image(name, force=True)


async def test_image_whose_users_are_no_file_is_refused_before_it_starts(
    docker: Bench, docker_engine: Any, test_image: str
) -> None:
    command = "rm /etc/passwd && mkdir /opt/users && ln -s /opt/users /etc/passwd"
    with image_with_users(docker_engine, test_image, command, "77") as image, anyio.fail_after(60):
        with pytest.raises(ImageError, match="/opt/users is no regular file"):
            async with docker.provider.open(docker.spec(image=image)):
                pass
        await docker.assert_nothing_left()


# Not with a real engine: one that opens such a pipe answers no request about all containers any more.
@pytest.mark.parametrize("bit", [31, 26, 25])
def test_pipe_or_device_is_no_regular_file(bit: int) -> None:
    stat = json.dumps({"mode": 1 << bit | 0o644, "linkTarget": ""}).encode()
    response = SimpleNamespace(
        ok=True, headers={"X-Docker-Container-Path-Stat": base64.b64encode(stat).decode()}
    )

    def head(*_: object, **__: object) -> SimpleNamespace:
        return response

    api: Any = SimpleNamespace(base_url="", api_version="1", head=head)
    with pytest.raises(ValueError, match="no regular file"):
        regular_file(api, "container", "/etc/passwd")


# Engines


@pytest.mark.parametrize("host", ["unix:///nowhere/docker.sock", "ssh://nobody@localhost"])
async def test_missing_engine_is_reported_within_3_seconds(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    await assert_engine_unavailable(docker, host)


async def test_silent_engine_is_reported_within_3_seconds(
    docker: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = f"/tmp/{docker.owner}.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        try:
            monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
            await assert_engine_unavailable(docker, path)
        finally:
            await anyio.Path(path).unlink()


async def assert_engine_unavailable(docker: Bench, address: str) -> None:
    """All callers get the error within 3 s, on one line."""
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
            assert address in error.message
            assert "\n" not in error.message
            assert error.retryable
        with anyio.fail_after(3):
            findings = await provider.check(docker.image)
        assert [(finding.what, finding.ok, bool(finding.cure)) for finding in findings] == [
            ("engine", False, True)
        ]


async def test_engine_over_tcp_works(docker: Bench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with anyio.fail_after(120):
        async with engine_over_tcp() as port:
            monkeypatch.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{port}")
            async with DockerProvider(docker.owner) as provider:
                async with provider.open(docker.spec()) as sandbox, connect(sandbox) as driver:
                    await driver.arrange({"write": str(sandbox.root / "a"), "text": "x" * 100_000})
                    listing = await download(sandbox, sandbox.root, tmp_path / "out.tar")
                    assert listing["a"][1] == b"x" * 100_000
                    await sandbox.stream.send_eof()
                    await driver.closed.wait()
                    assert await sandbox.cause_of_end() == "exit code 0"
            await docker.assert_nothing_left()


@asynccontextmanager
async def engine_over_tcp() -> AsyncGenerator[int]:
    """Forwards a loopback port to the engine's socket."""
    real = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock").removeprefix("unix://")

    async def copy(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while chunk := await source.read(65536):
                sink.write(chunk)
                await sink.drain()
            sink.write_eof()

    connections = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        from_engine, to_engine = await asyncio.open_unix_connection(real)
        with closing(writer), closing(to_engine):
            await asyncio.gather(copy(reader, to_engine), copy(from_engine, writer))

    server = await asyncio.start_server(serve, "127.0.0.1")
    async with server:
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            for task in connections:
                task.cancel()
            await asyncio.gather(*connections, return_exceptions=True)
