"""The resumable connection over a container's attached stream, with server processes that are killed."""

from __future__ import annotations

import fcntl
import marshal
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox import wire

from decathlon_mcp.driver_client.driver import MARSHAL_VERSION
from tests.driver.resumable_attacher import TAKEN_OVER_EXIT, Store

pytestmark = pytest.mark.docker
REPOSITORY = Path(__file__).parents[2]
KILLS = 40
STEP_SECONDS = 0.0015
BOUND_SECONDS = 120.0
UNLIMITED = 10**9
LAST_CALLS = 50


class Container:
    """A container whose stdin stays open when the attached connection closes, and its server processes."""

    def __init__(self, engine: Any, image: str, folder: Path) -> None:
        host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
        if not host.startswith("unix://"):
            pytest.skip("the engine is not at a unix socket")
        self._socket = host.removeprefix("unix://")
        self.store = folder / "store.jsonl"
        self._boot = folder / "boot"
        self._boot.write_bytes(boot_message())
        config: dict[str, Any] = {
            "Image": image,
            "Entrypoint": list(wire.BOOT_COMMAND),
            "Cmd": [],
            "Labels": {"decathlon.test": "resumable"},
            "OpenStdin": True,
            "StdinOnce": False,
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
            "NetworkDisabled": True,
            "HostConfig": {"NetworkMode": "none", "LogConfig": {"Type": "none", "Config": {}}},
        }
        self.id: str = engine.create_container_from_config(
            config, f"decathlon-resumable-{secrets.token_hex(6)}"
        )["Id"]

    def start_process(self, calls: int) -> subprocess.Popen[str]:
        argv = [self._socket, self.id, str(self.store), str(calls), str(self._boot)]
        return subprocess.Popen(
            [sys.executable, "-m", "tests.driver.resumable_attacher", *argv],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=REPOSITORY,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY / "sandbox")},
        )

    def stop_process(self, process: subprocess.Popen[str]) -> None:
        """Stop a process while it does not hold the lock of the store, for which the next one would wait."""
        with self.store.open("rb") as store:
            fcntl.flock(store, fcntl.LOCK_EX)
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)

    def stored(self) -> Store:
        store = Store(self.store)
        store.read()
        return store

    def finish(self) -> None:
        """Let a last process make some more calls; then every call ran once and has its reply in the log."""
        calls = len(self.stored().calls) + LAST_CALLS
        with running(self.start_process(calls)) as process:
            finish(process)
        self.check(calls)

    def check(self, calls: int) -> None:
        store = self.stored()
        assert [call["serial"] for call in store.calls.values()] == list(range(calls))
        assert sorted(store.replies) == list(range(1, calls + 1))
        replies = [store.replies[number] for number in sorted(store.replies)]
        assert [reply["run"] for reply in replies] == list(range(1, calls + 1))
        assert [reply["call"] for reply in replies] == list(store.calls.values())


def boot_message() -> bytes:
    """As `driver_client.driver.boot_message`, with the test's program in place of the driver."""
    package = resources.files("decathlon_sandbox")
    names = {"decathlon_sandbox": "__init__", "decathlon_sandbox.wire": "wire"}
    names["decathlon_sandbox.resumable"] = "resumable"
    sources = {name: (package / f"{stem}.py").read_bytes() for name, stem in names.items()}
    program = Path(__file__).with_name("resumable_container.py")
    body = marshal.dumps({**sources, "decathlon_sandbox.driver": program.read_bytes()}, MARSHAL_VERSION)
    return b"%d\n%b" % (len(body), body)


@pytest.fixture
def container(docker_engine: Any, test_image: str, tmp_path: Path) -> Iterator[Container]:
    container = Container(docker_engine, test_image, tmp_path)
    try:
        docker_engine.start(container.id)
        yield container
    finally:
        docker_engine.remove_container(container.id, v=True, force=True)


@contextmanager
def running(process: subprocess.Popen[str]) -> Generator[subprocess.Popen[str]]:
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_attached(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line == "attached\n", (line, process.communicate(timeout=5))


def finish(process: subprocess.Popen[str]) -> None:
    output, errors = process.communicate(timeout=BOUND_SECONDS)
    assert process.returncode == 0, errors
    assert output.endswith("done\n")


@pytest.mark.slow
def test_server_processes_killed_at_stepped_moments_lose_nothing(container: Container) -> None:
    for number in range(KILLS):
        with running(container.start_process(UNLIMITED)) as process:
            wait_attached(process)
            time.sleep(number % 20 * STEP_SECONDS)
    container.finish()


@pytest.mark.slow
def test_server_processes_killed_while_they_attach_lose_nothing(container: Container) -> None:
    with running(container.start_process(UNLIMITED)) as process:
        wait_attached(process)
    generation = Path(f"{container.store}.generation")
    for number in range(KILLS // 2):
        before = generation.read_bytes()
        with running(container.start_process(UNLIMITED)):
            while generation.read_bytes() == before:  # a file offers no event to wait for
                time.sleep(0.0002)
            time.sleep(number * STEP_SECONDS / 5)
    container.finish()


def test_stopped_server_process_that_continues_is_refused_and_harms_nothing(container: Container) -> None:
    for number in range(5):
        with running(container.start_process(UNLIMITED)) as old:
            wait_attached(old)
            time.sleep(number * STEP_SECONDS)
            container.stop_process(old)
            with running(container.start_process(UNLIMITED)) as new:
                wait_attached(new)
                old.send_signal(signal.SIGCONT)
                _, errors = old.communicate(timeout=BOUND_SECONDS)
                assert old.returncode == TAKEN_OVER_EXIT, errors
    container.finish()
