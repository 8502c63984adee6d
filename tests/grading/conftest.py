"""Fixtures that grade attempts in real sandboxes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

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
