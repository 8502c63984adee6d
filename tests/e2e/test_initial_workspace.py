"""An agent's workspace begins with every file of the task's, whatever it is called."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from decathlon_client import Decathlon

from tests.cheats.agent import SUITE as SHELL_SUITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
NAMES = (b".git/HEAD", b"notes/__pycache__/a", b".DS_Store", b"caf\xe9.txt", b"\xff/\xfe")


@pytest.mark.usefixtures("namespaces")
async def test_repository_caches_and_names_that_are_not_utf8_reach_agent_and_grader(tmp_path: Path) -> None:
    shutil.copytree(SHELL_SUITE, tmp_path / "suite")
    (task,) = (tmp_path / "suite").glob("tasks/*/sum-prices")
    for name in NAMES:
        file = task / "initial_workspace" / os.fsdecode(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("here")
    state = tmp_path / "state"
    async with (
        Decathlon.embedded(tmp_path / "suite", "host", state=state, isolation="namespaces") as d,
        d.episode("sum-prices") as episode,
    ):
        listing = await episode.call(
            "root__shell", {"command": "find . -type f -print0 | LC_ALL=C od -An -c -v -w4096"}
        )
        for name in NAMES:
            shown = "".join(chr(byte) if byte < 0x80 else f"{byte:03o}" for byte in name)
            assert shown in "".join(listing.text.split()), name
        await episode.claim_done()
        assert (await episode.evaluate()).status == "scored"
