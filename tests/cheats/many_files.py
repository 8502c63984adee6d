"""A workspace of a hundred thousand files. Takes a minute and is not collected by default.

.venv/bin/pytest tests/cheats/many_files.py
"""

from __future__ import annotations

import pytest

from tests.cheats.agent import SOLUTIONS, CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.mark.timeout(900)
async def test_workspace_with_a_hundred_thousand_files_is_graded(cheats: CheatServer) -> None:
    async with cheats.episode("sum-prices") as agent:
        assert await agent.python("import os\nfor n in range(100_000): os.mknod(f'{n}')") == ""
        await agent.shell(SOLUTIONS["sum-prices"])
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict
