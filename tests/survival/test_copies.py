"""A server that is killed while its episodes are copies of saved states."""

from __future__ import annotations

from pathlib import Path

import pytest
from decathlon_client import Decathlon

from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.long]


async def test_copies_and_states_outlive_their_server(
    tmp_path: Path, runsc: str, unpacked_image: str
) -> None:
    state = tmp_path / "state"
    async with (
        supervised_server(state, "--kernel", "gvisor", "--image", unpacked_image) as server,
        Decathlon(server.url) as d,
        d.episode("find-answer", snapshots=1) as e,
    ):
        await e.call("probe__shell", {"command": "echo $$ > one; sleep 1000 > one 2>&1 &"})
        async with d.branch(e, at=1, snapshots=1) as b:
            await b.call("probe__shell", {"command": "echo 42 > answer.txt"})
            # It waits for the one that is saved after the call.
            assert await d.snapshot(b) == 2
            await server.kill()
            # The copy goes on, and what it was copied from is still there, as are its own states.
            assert (await b.call("probe__shell", {"command": "cat answer.txt; ls"})).text.split()[0] == "42"
            async with d.branch(e, at=1) as again, d.branch(b, at=2) as deeper:
                assert "answer.txt" not in (await again.call("probe__shell", {"command": "ls"})).text
                verdicts = [await episode.evaluate() for episode in (b, deeper, again)]
            await server.kill()
            assert "answer.txt" not in (await e.call("probe__shell", {"command": "ls"})).text
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0, 0.0]
    assert [verdict.raw["branch"]["exact"] for verdict in verdicts] == [True, True, True]
