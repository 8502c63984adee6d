"""A server that is killed while it makes the calls of a branch's source again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_client import Decathlon

from tests.driver.peer import until
from tests.probe.serving import folder_of
from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.mark.long
async def test_a_branch_whose_server_was_killed_has_each_replayed_call_once(tmp_path: Path) -> None:
    state = tmp_path / "state"

    def lines(episode: str) -> list[dict[str, Any]]:
        text = (folder_of(state, episode) / "trajectory.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    async with supervised_server(state) as server, Decathlon(server.url) as d:
        async with d.episode("find-answer") as e:
            for number in range(3):
                await e.call("probe__shell", {"command": f"echo {number} >> runs.txt; sleep 1"})
            arguments = {"branch_of": e.id, "at": 3, "wait": False}
            branch = (await d.call_lobby("start_episode", arguments)).structured
            assert branch is not None
            public_id, handle = branch["public_id"], branch["episode"]
            early: list[str] = []

            async def call_early() -> None:
                # Waits for the replayed calls, over two servers.
                async with d.attach(handle) as b:
                    early.append((await b.call("probe__shell", {"command": "cat runs.txt"})).text)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(call_early)
                await until(lambda: any(line["event"] == "reply" for line in lines(public_id)))
                assert not any(line["event"] == "ready" for line in lines(public_id))
                await server.kill()
            assert early == ["0\n1\n2\n"]
            events = lines(public_id)
            calls = [(line["seq"], line.get("replayed", False)) for line in events if line["event"] == "call"]
            assert calls == [(1, True), (2, True), (3, True), (4, False)]
            assert [line["seq"] for line in events if line["event"] == "reply"] == [1, 2, 3, 4]
            # The next server trusts the record.
            await server.kill()
            async with d.attach(handle) as b:
                await b.call("probe__write", {"path": "answer.txt", "text": "42"})
                verdict = await b.evaluate()
            assert (verdict.reward, verdict.metrics["calls"]) == (1.0, 5)
            assert verdict.raw["branch"] == {"episode": e.public_id, "at": 3, "differences": 0}
