"""Workspaces of a hundred thousand files, or links. Take a minute and are not collected by default.

.venv/bin/pytest tests/cheats/many_files.py
"""

from __future__ import annotations

import time

import pytest

from tests.cheats.agent import SOLUTIONS, CheatServer

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

MAX_LINKS = 64_000
"""Below the 65,000 names that a file of ext4 can have."""
FILES = "import os\nfor n in range({number}): os.mknod(f'{{n}}')"
LINKS = "import os\nopen('a', 'wb').write(b'a' * 30_000)\nfor n in range({number}): os.link('a', f'{{n}}')"


async def cpu_seconds_to_verdict(cheats: CheatServer, program: str) -> float:
    """CPU time of the server until the verdict of an attempt that deserves the reward."""
    async with cheats.episode("sum-prices") as agent:
        assert await agent.python(program) == ""
        await agent.shell(SOLUTIONS["sum-prices"])
        start = time.process_time()
        verdict = await agent.verdict()
        seconds = time.process_time() - start
    assert (verdict["status"], verdict.get("reward")) == ("scored", 1.0), verdict
    return seconds


@pytest.mark.timeout(900)
async def test_workspace_with_a_hundred_thousand_files_is_graded(cheats: CheatServer) -> None:
    await cpu_seconds_to_verdict(cheats, FILES.format(number=100_000))


@pytest.mark.timeout(900)
async def test_link_to_a_file_costs_no_more_than_an_empty_file(cheats: CheatServer) -> None:
    links = await cpu_seconds_to_verdict(cheats, LINKS.format(number=MAX_LINKS))
    files = await cpu_seconds_to_verdict(cheats, FILES.format(number=MAX_LINKS))
    assert links < 1.3 * files
