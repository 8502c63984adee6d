"""A workspace of a hundred thousand files: half a minute of the engine's, and so not in every run.

.venv/bin/pytest tests/cheats/crowd.py
"""

from __future__ import annotations

import pytest

from tests.cheats.agent import HONEST, Arena

pytestmark = [pytest.mark.anyio, pytest.mark.docker]


@pytest.mark.timeout(900)
async def test_a_hundred_thousand_files_are_borne(arena: Arena) -> None:
    async with arena.playing("sum-prices") as agent:
        await agent.python("import os\nfor n in range(100_000): os.mknod(f'{n}')")
        await agent.shell(HONEST["sum-prices"])
        verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict
