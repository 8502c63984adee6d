"""Fixtures: drivers under every Python version that is tested."""

from __future__ import annotations

import shutil
import subprocess
import sys
import uuid
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.driver.peer import DriverPeer, driver

OLDEST = "3.10"
"""Python of Ubuntu 22.04, on which the images of Toolathlon and toolathlon_gym are built."""
ON_EACH_CHANGE = "test_no_module_is_imported_from_the_file_system_after_the_first_child"
ON_OLDEST = (
    ON_EACH_CHANGE,
    "test_backpressure_bounds_memory_and_loses_no_reply",
    "test_driver_ends_with_all_its_processes_when_no_server_comes",
    "test_steps_run_in_order_until_one_fails",
    "test_freeze_kills_everything_and_refuses_calls_for_good",
    "test_first_process_kills_processes_that_are_not_its_descendants",
    "test_run_returns_exit_code_and_output",
    "test_processes_are_counted_unless_they_end_within_the_linger_time",
    "test_process_whose_main_thread_has_exited_is_killed",
    "test_server_that_does_not_start_fails_the_request_and_stops_the_others",
    "test_long_result_is_cut_before_its_length_counts",
    "test_flood_of_output_does_not_affect_other_servers",
    "test_servers_start_and_answer_concurrently",
    "test_request_without_room_for_its_response_waits",
    "test_dial_that_is_cancelled_after_it_connected_gives_its_place_back",
)
"""The tests that run on it too, of every module of the driver."""


def find_python(version: str) -> str | None:
    """Path of a Python of that minor version, from the PATH or from pyenv."""
    # The Python on the PATH can be a wrapper script, so it is asked for the real executable.
    program = "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"
    in_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python3"))
    # The wrapper of pyenv takes longer than a Python.
    for candidate in filter(None, [*in_pyenv, shutil.which(f"python{version}"), shutil.which("python3")]):
        process = subprocess.run([candidate, "-c", program], capture_output=True, text=True, check=False)
        found, _, executable = process.stdout.strip().partition(" ")
        if found == version:
            return executable
    return None


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("python") == OLDEST and not item.name.startswith(ON_EACH_CHANGE):
            item.add_marker(pytest.mark.slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "python" in metafunc.fixturenames:
        versions = ["running", *[OLDEST] * (metafunc.function.__name__ in ON_OLDEST)]
        metafunc.parametrize("python", versions, indirect=True, scope="session")


@pytest.fixture(scope="session")
def python(request: pytest.FixtureRequest) -> str:
    """The Python that runs the tests, or the oldest that a driver supports."""
    if request.param == "running":
        return sys.executable
    executable = find_python(OLDEST)
    if executable is None:
        skip_or_fail(f"there is no Python {OLDEST}", "OLDEST_PYTHON")
    return executable


@pytest.fixture
async def peer(python: str) -> AsyncGenerator[DriverPeer]:
    async with driver(python) as peer:
        yield peer


@pytest.fixture(scope="module")
async def _driver_of_the_module(anyio_backend: object) -> AsyncGenerator[DriverPeer]:
    async with driver(sys.executable) as peer:
        yield peer


@pytest.fixture
def shared(_driver_of_the_module: DriverPeer) -> Generator[DriverPeer]:
    """The driver of all tests of a module that leave none of their processes; each has a token of its own."""
    _driver_of_the_module.token = uuid.uuid4().hex
    yield _driver_of_the_module
    assert _driver_of_the_module.living() == []
