"""Fixtures for all tests, and a deadline for every asynchronous test."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from fcntl import LOCK_EX, flock
from functools import cache, partial, wraps
from inspect import iscoroutinefunction
from pathlib import Path
from shutil import rmtree
from typing import Any, NoReturn, cast

import anyio
import httpcore2
import pytest

from decathlon_mcp.errors import ProviderUnavailableError, SettingsError
from decathlon_mcp.sandboxes.host.image_folder import CONFIG_FILE
from decathlon_mcp.sandboxes.host.isolation import why_no_own_network, why_unavailable
from tests.cpu_time import CpuTime
from tests.disks import memory_folder
from tests.sandboxes.own_engine import OwnEngine, engine_with
from tests.selection import LEFT_OUT, is_left_out, leave_to_test_all

DEADLINE_SECONDS = 180
"""Deadline of an asynchronous test, sized for a slow machine."""
MARGIN_SECONDS = 60
"""For a test with its own `timeout` marker, the deadline is this much earlier than that timeout."""
TEST_IMAGE = "decathlon-test:latest"
"""`plugins.docker.image.STARTER_IMAGE`: the core's tests run without plug-ins too."""


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(CpuTime())
    # The other processes of pytest-xdist inherit it.
    if _is_fast(config) and "TMPDIR" not in os.environ and (folder := memory_folder()) is not None:
        os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = None
        config.add_cleanup(partial(rmtree, folder, ignore_errors=True))
    # Each client would read the machine's certificates, which takes 20 ms.
    httpcore2.default_ssl_context = cache(httpcore2.default_ssl_context)
    # As an interrupt: otherwise the process ends at once, and sandboxes and their helpers stay.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Thousands of tests are made now that stay: to look for garbage among them takes a third of the time.
    gc.disable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave modules out of which no test is to run: two of seven, with a third of all tests."""
    if _is_fast(config) and collection_path.suffix == ".py" and is_left_out(collection_path, config.rootpath):
        return True
    return None  # other plugins decide


def _is_fast(config: pytest.Config) -> bool:
    """Whether only the tests of `make test` run."""
    return all(f"not {mark}" in config.option.markexpr for mark in LEFT_OUT)


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that other commands run. gVisor's are long: Debian has it only since its release 13."""
    leave_to_test_all(items)
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        names = {*getattr(item, "fixturenames", ()), *filter(_is_text, parameters.values())}
        if names & {"runsc", "gvisor"}:
            item.add_marker(pytest.mark.gvisor)
            item.add_marker(pytest.mark.long)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """asyncio only: the Docker engine's attached socket and uvicorn need it."""
    return ("asyncio", {"use_uvloop": True})


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> None:
    """Fail an asynchronous test that hangs before pytest-timeout ends the whole process."""
    # The deadline is set inside the test's own coroutine. A fixture's cancel scope would cancel the task
    # that the anyio plugin shares among all tests.
    if iscoroutinefunction(test := pyfuncitem.obj):
        timeout = pyfuncitem.get_closest_marker("timeout")
        seconds = timeout.args[0] - MARGIN_SECONDS if timeout else DEADLINE_SECONDS

        @wraps(test)
        async def bounded(**arguments: Any) -> None:
            with anyio.fail_after(seconds):
                await test(**arguments)

        pyfuncitem.obj = bounded


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Record how the session ended, which `.ci/run` needs to know if all tests have run."""
    config = session.config
    if hasattr(config, "cache") and not hasattr(config, "workerinput"):
        config.cache.set("decathlon/exitstatus", int(exitstatus))


@pytest.fixture(scope="session")
def docker_engine() -> Iterator[Any]:
    """The engine's API (`docker.APIClient`). Without an engine the test is skipped, or fails in CI."""
    from docker import APIClient
    from docker.errors import DockerException
    from docker.utils import kwargs_from_env

    try:
        engine: Any = APIClient(**cast("dict[str, Any]", kwargs_from_env()), version="auto", timeout=30)
    except DockerException as error:
        skip_or_fail(f"no Docker engine answers; on Debian: apt-get install docker.io ({error})")
    try:
        yield engine
    finally:
        engine.close()


@pytest.fixture(scope="session")
def test_image(docker_engine: Any) -> str:
    """Name of the tests' image. If it has not been built, the test is skipped, or fails in CI."""
    from docker.errors import ImageNotFound

    try:
        docker_engine.inspect_image(TEST_IMAGE)
    except ImageNotFound:
        skip_or_fail(f"there is no image {TEST_IMAGE}; build it with tests/image/build")
    return TEST_IMAGE


@pytest.fixture(scope="session")
def namespaces() -> None:
    """This machine isolates sandboxes. Where it does not, the test is skipped, or fails in CI."""
    if (reason := why_unavailable()) is not None:
        skip_or_fail(reason, "NAMESPACES")


@pytest.fixture(scope="session")
def own_network(namespaces: None) -> None:
    """This machine gives sandboxes a network of their own. Otherwise as `namespaces`."""
    if (reason := why_no_own_network()) is not None:
        skip_or_fail(reason, "NAMESPACES")


@pytest.fixture(scope="session")
def runsc() -> str:
    """The program of gVisor. Without a recent one the test is skipped, or fails in CI."""
    # The core's tests run without the plug-ins too.
    from decathlon_mcp.plugins.gvisor.runsc import INSTALL_RUNSC, find_runsc, runsc_version

    try:
        program = find_runsc()
        version, is_recent = runsc_version(program)
    except ProviderUnavailableError as error:
        skip_or_fail(error.message, "GVISOR")
    if not is_recent:
        skip_or_fail(f"{version} is too old: {INSTALL_RUNSC}", "GVISOR")
    return str(program)


@pytest.fixture(scope="session")
def unpacked_image(docker_engine: Any, test_image: str, namespaces: None) -> str:
    """Folder with the tests' image, for bubblewrap. All test processes, and later runs, share it."""
    digest = docker_engine.inspect_image(test_image)["Id"].removeprefix("sha256:")[:16]
    # Not in pytest's own folder, into which only its user may look: root's sandboxes run as another one.
    base = Path(tempfile.gettempdir()) / f"decathlon-test-image-{os.geteuid()}-{digest}"
    base.mkdir(mode=0o755, exist_ok=True)
    with (base / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        folder = base / "image"
        if not (folder / CONFIG_FILE).exists():
            rmtree(folder, ignore_errors=True)
            command = (sys.executable, "-m", "decathlon_mcp.cli", "doctor", "--unpack", test_image, folder)
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return str(folder)


@pytest.fixture(scope="module")
async def _shared_engine(
    docker_engine: Any, test_image: str, anyio_backend: object
) -> AsyncIterator[OwnEngine]:
    async with engine_with(test_image) as engine:
        yield engine


@pytest.fixture
def own_engine(_shared_engine: OwnEngine, monkeypatch: pytest.MonkeyPatch) -> OwnEngine:
    """A second Docker engine, which the test may kill; new connections to Docker lead to it."""
    monkeypatch.setenv("DOCKER_HOST", _shared_engine.host)
    return _shared_engine


@pytest.fixture(scope="session")
def mitmdump() -> Path:
    """The program of the real web proxy. Without it the test is skipped, or fails in CI."""
    # Imported here: the core's tests run without plug-ins too.
    from decathlon_mcp.plugins.web.proxy import find_program

    try:
        return find_program(None)
    except SettingsError as error:
        skip_or_fail(error.message, "MITMPROXY")


@pytest.fixture
def docker_network(docker_engine: Any) -> Iterator[str]:
    """Name of a Docker network without outbound access."""
    name = f"decathlon-test-{secrets.token_hex(4)}"
    network_id = docker_engine.create_network(name, driver="bridge", internal=True)["Id"]
    try:
        yield name
    finally:
        docker_engine.remove_network(network_id)


def skip_or_fail(reason: str, requirement: str = "DOCKER") -> NoReturn:
    if os.environ.get(f"DECATHLON_REQUIRE_{requirement}") == "1":
        pytest.fail(reason)
    pytest.skip(reason)
