"""Drivers under each Python that a sandbox may have."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.driver.peer import DriverPeer, driver


def find_python(version: str) -> str | None:
    """A Python of that minor version: on the PATH, or where pyenv keeps them."""
    candidates = [shutil.which(f"python{version}"), shutil.which("python3")]
    kept = sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python3"))
    for candidate in [*candidates, *map(str, kept)]:
        if candidate is not None and (found := _executable(candidate)) is not None and found[0] == version:
            return found[1]
    return None


def _executable(python: str) -> tuple[str, str] | None:
    """Its minor version and what it really is: the one on the PATH may be a script that changes much."""
    said = subprocess.run(
        [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2], sys.executable)"],
        capture_output=True,
        text=True,
        check=False,
    )
    version, _, path = said.stdout.strip().partition(" ")
    return (version, path) if path else None


@pytest.fixture(scope="session", params=["3.11", "3.10"])
def python(request: pytest.FixtureRequest) -> str:
    found = find_python(request.param)
    if found is None:
        pytest.skip(f"no Python {request.param} here")
    return found


@pytest.fixture
async def peer(python: str) -> AsyncGenerator[DriverPeer]:
    async with driver(python) as peer:
        yield peer
