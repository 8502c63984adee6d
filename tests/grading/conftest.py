"""Fixtures that grade attempts in real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from secrets import token_hex

import pytest

from decathlon_mcp.sandboxes.host.provider import HostProvider
from tests.grading.support import SandboxGrader


@pytest.fixture
async def grader(tmp_path: Path) -> AsyncGenerator[SandboxGrader]:
    """Grades in sandboxes of the local provider."""
    folder = tmp_path / "grading"
    folder.mkdir()
    async with HostProvider("tests-rewards", folder / "sandboxes", isolation="none") as provider:
        yield SandboxGrader(folder, provider)


@pytest.fixture
async def docker_grader(tmp_path: Path, test_image: str) -> AsyncGenerator[SandboxGrader]:
    """Grades in containers without a network."""
    folder = tmp_path / "grading"
    folder.mkdir()
    # Imported here: the core's tests run without plug-ins too.
    from decathlon_mcp.plugins.docker.provider import DockerProvider

    async with DockerProvider(f"tests-rewards-{token_hex(4)}") as provider:
        yield SandboxGrader(folder, provider, test_image)
