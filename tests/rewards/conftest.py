"""Where attempts are graded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from decathlon_mcp.providers.local import LocalProvider
from tests.rewards.scene import Grading


@pytest.fixture
async def grading(tmp_path: Path) -> AsyncGenerator[Grading]:
    """Where attempts are graded: fresh sandboxes of the local provider."""
    folder = tmp_path / "grading"
    folder.mkdir()
    async with LocalProvider("tests-rewards", folder / "sandboxes") as provider:
        yield Grading(folder, provider)
