"""The `podman` provider against a Podman service of the test's own, where Podman is installed and can run.

    python -m pytest tests/sandboxes/podman.py

Not part of `make test`: it takes a minute or two, and depends on the machine's Podman.
"""

from __future__ import annotations

import os
import resource
import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncGenerator, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import docker
import pytest

from decathlon_mcp.plugins.conformance.conformance import Check, checks_for
from decathlon_mcp.plugins.conformance.first_processes import (
    FILL_MEMORY,
    memory_over_the_limit_is_the_cause_of_end,
)
from decathlon_mcp.plugins.podman import API_VERSION, OWN_STACK, PodmanProvider
from tests.sandboxes.conftest import Bench, docker_bench
from tests.sandboxes.test_conformance import SLOW

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.slow]


@dataclass(frozen=True, slots=True)
class Service:
    """A running Podman service. `image`: the tests' image."""

    socket: str
    image: str
    notices_memory: bool
    """Whether Podman reports that the kernel killed a container at its limit on memory."""


@pytest.fixture(scope="module")
def service(test_image: str) -> Generator[Service]:
    """A Podman service with files of its own, and the tests' image from the Docker engine."""
    if shutil.which("podman") is None:
        pytest.skip("podman is not installed")
    if os.geteuid() != 0:
        pytest.skip("the test's own Podman service needs root")
    # Podman refuses a folder for its state whose path has more than 50 characters, as pytest's have.
    folder = Path(tempfile.mkdtemp(prefix="podman-"))
    # A machine may not allow Podman's default limits, which are above those of this process.
    files = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    configuration = folder / "containers.conf"
    configuration.touch()
    environment = {**os.environ, "CONTAINERS_CONF": str(configuration)}
    podman = ["podman", "--root", f"{folder}/root", "--runroot", f"{folder}/run"]
    with subprocess.Popen(["docker", "save", test_image], stdout=subprocess.PIPE) as saving:
        subprocess.run([*podman, "load"], stdin=saving.stdout, env=environment, check=True, timeout=200)

    def refusal(runtime: str) -> str:
        """Configure a runtime; returns why it cannot run a container here."""
        configuration.write_text(
            f'[containers]\ndefault_ulimits = ["nofile={files}:{files}", "nproc=4096:4096"]\n'
            f'[engine]\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\nruntime = "{runtime}"\n'
        )
        trial = [*podman, "run", "--rm", "--network=none", test_image, "true"]
        run = subprocess.run(trial, env=environment, capture_output=True, text=True, timeout=60, check=False)
        return run.stderr[-300:] if run.returncode != 0 else ""

    # Podman's default refuses a machine with control groups of both versions.
    reason = refusal("crun") and refusal("runc")
    socket = f"{folder}/sock"
    with (folder / "log").open("wb") as log:
        command = [*podman, "system", "service", "--time=0", f"unix://{socket}"]
        # conmon writes the file `oom` where it is started.
        running = subprocess.Popen(command, env=environment, cwd=folder, stdout=log, stderr=log)
    try:
        if reason:
            pytest.skip(f"podman cannot run containers here: {reason}")
        deadline = time.monotonic() + 30
        while not Path(socket).exists():
            assert running.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < deadline, "the service did not begin to listen"
            time.sleep(0.05)
        yield Service(socket, test_image, notices_memory=_notices_memory(podman, test_image, environment))
    finally:
        running.terminate()
        running.wait(20)
        subprocess.run([*podman, "rm", "--all", "--force"], env=environment, check=False, timeout=60)
        # Its storage is mounted there.
        subprocess.run(["umount", f"{folder}/root/overlay"], stderr=subprocess.DEVNULL, check=False)
        shutil.rmtree(folder, ignore_errors=True)


def _notices_memory(podman: list[str], image: str, environment: dict[str, str]) -> bool:
    """Not where control groups of both versions are mounted, at least with conmon 2.1.6."""
    limits = ("--memory=64m", "--memory-swap=64m", "--network=none")
    run = [*podman, "run", "--name=trial", *limits, image, "python3", "-c", FILL_MEMORY]
    folder = Path(environment["CONTAINERS_CONF"]).parent
    subprocess.run(run, env=environment, cwd=folder, capture_output=True, timeout=60, check=False)
    inspect = [*podman, "inspect", "trial", "--format={{.State.OOMKilled}}"]
    return subprocess.check_output(inspect, env=environment, timeout=60).strip() == b"true"


@pytest.fixture
async def podman(service: Service, tmp_path: Path) -> AsyncGenerator[Bench]:
    owner = f"test-{secrets.token_hex(4)}"
    engine: Any = docker.APIClient(base_url=f"unix://{service.socket}", version=API_VERSION)

    # A machine without the program is not ready for the default network.
    network = OWN_STACK if shutil.which(OWN_STACK) else "podman"
    create = partial(PodmanProvider, socket=service.socket, network=network)
    bench = docker_bench(owner, tmp_path, engine, service.image, create, survives=False)
    async with bench.provider:
        yield bench
        await bench.assert_nothing_left()
    engine.close()


@pytest.mark.parametrize(
    "check",
    [check for check in checks_for(survives=False) if check not in SLOW],
    ids=lambda check: check.__name__,
)
async def test_podman_conforms(podman: Bench, service: Service, check: Check) -> None:
    if check is memory_over_the_limit_is_the_cause_of_end and not service.notices_memory:
        pytest.skip("Podman does not notice here that the kernel killed a container for its memory")
    await check(podman)
