"""Where attempts are graded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from secrets import token_hex

import pytest

from decathlon_mcp.sandboxes.docker.provider import DockerProvider
from decathlon_mcp.sandboxes.local.provider import LocalProvider
from tests.grading.scene import Grading


@pytest.fixture
async def grading(tmp_path: Path) -> AsyncGenerator[Grading]:
    """Where attempts are graded: fresh sandboxes of the local provider."""
    folder = tmp_path / "grading"
    folder.mkdir()
    async with LocalProvider("tests-rewards", folder / "sandboxes") as provider:
        yield Grading(folder, provider)


@pytest.fixture
async def docker_grading(tmp_path: Path, test_image: str) -> AsyncGenerator[Grading]:
    """The same in containers without a network."""
    folder = tmp_path / "grading"
    folder.mkdir()
    async with DockerProvider(f"tests-rewards-{token_hex(4)}") as provider:
        yield Grading(folder, provider, test_image)
