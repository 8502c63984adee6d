"""Fixtures: drivers under every Python version that is tested."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.conftest import skip_or_fail
from tests.driver.peer import DriverPeer, driver

OLDEST = "3.10"
"""Python of Ubuntu 22.04, on which the images of Toolathlon and toolathlon_gym are built."""
ON_EACH_CHANGE = {"test_start_up_imports_no_slow_module", "test_real_server_starts_and_answers"}
"""The tests of `make test` that run on it too; `make test-all` runs all of them."""


def find_python(version: str) -> str | None:
    """Path of a Python of that minor version, from the PATH or from pyenv."""
    on_path = [shutil.which(f"python{version}"), shutil.which("python3")]
    in_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python3"))
    for candidate in [*on_path, *map(str, in_pyenv)]:
        if candidate is not None:
            candidate_version, executable = _version_and_executable(candidate)
            if candidate_version == version:
                return executable
    return None


def _version_and_executable(python: str) -> tuple[str, str]:
    # The Python on the PATH can be a wrapper script, so it is asked for the real executable.
    process = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"],
        capture_output=True,
        text=True,
        check=False,
    )
    version, _, executable = process.stdout.strip().partition(" ")
    return version, executable


@pytest.hookimpl(tryfirst=True)  # before tests are selected by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("python") == OLDEST and item.name.partition("[")[0] not in ON_EACH_CHANGE:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(scope="session", params=["running", OLDEST])
def python(request: pytest.FixtureRequest) -> str:
    """The Python that runs the tests, and the oldest that a driver supports."""
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
