"""Groups of episodes of which one is set up, and the others begin as copies of it, on sandboxes of gVisor."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_client import Decathlon, Lockstep, Verdict

from tests.probe.serving import SUITE
from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.docker]
WHEN = "2026-03-04T05:06:07+00:00"
START_OF_SERVER = {"command": "cut -d' ' -f22 /proc/$PPID/stat"}
"""When the server started that runs this command, in ticks since its sandbox was opened."""


async def verdicts_of(slots: Lockstep) -> AsyncGenerator[Verdict]:
    for verdict in await slots.evaluate():
        assert verdict is not None
        yield verdict


async def test_a_group_is_set_up_once(tmp_path: Path, runsc: str, unpacked_image: str) -> None:
    settings: dict[str, Any] = {"image": unpacked_image, "state": tmp_path, "drain_seconds": 5}
    async with Decathlon.embedded(
        SUITE, "host", kernel="gvisor", prepared=True, keep="workspace", **settings
    ) as d:
        async with d.lockstep(["made-answer"] * 4, launch_time=WHEN) as slots:
            assert [slot.failure for slot in slots] == [None] * 4
            started = {(await slot.episode.call("probe__shell", START_OF_SERVER)).text for slot in slots}
            assert len(started) == 1
            for number, slot in enumerate(slots):
                text = "made-by-preprocess" if number % 2 else f"wrong {number}"
                await slot.episode.call("probe__write", {"path": "answer.txt", "text": text})
            first = await slots[0].episode.call("probe__read", {"path": "answer.txt"})
            assert first.text == "wrong 0"
            verdicts = [verdict async for verdict in verdicts_of(slots)]
        assert [verdict.reward for verdict in verdicts] == [0.0, 1.0, 0.0, 1.0]
        assert sum(verdict.raw.get("prepared", False) for verdict in verdicts) == 3
        # A copy of a copy, with its calls.
        async with d.episode("made-answer", launch_time=WHEN) as e:
            await e.call("probe__write", {"path": "answer.txt", "text": "made-by-preprocess"})
            async with d.branch(e, at=await d.snapshot(e)) as b:
                verdict = await b.evaluate()
        assert (verdict.reward, verdict.raw["prepared"], verdict.raw["branch"]["exact"]) == (1.0, True, True)
    assert [path async for path in anyio.Path(tmp_path).glob("scratch/*")] == []


def states(state: Path) -> list[Path]:
    return list(state.glob("scratch/*/prepared/*"))


async def test_copies_outlive_their_server_and_states_do_not(
    tmp_path: Path, runsc: str, unpacked_image: str
) -> None:
    state = tmp_path / "state"
    options = ("--prepared", "--kernel", "gvisor", "--image", unpacked_image)
    async with (
        supervised_server(state, *options) as server,
        Decathlon(server.url) as d,
        d.lockstep(["find-answer"] * 2, launch_time=WHEN) as slots,
    ):
        for slot in slots:
            await slot.episode.call("probe__write", {"path": "answer.txt", "text": "42"})
        (before,) = states(state)
        await server.kill()
        async with d.episode("find-answer", launch_time=WHEN) as later:
            assert not (await later.evaluate()).raw.get("prepared", False)
        verdicts = [verdict async for verdict in verdicts_of(slots)]
        assert states(state) not in ([], [before])
    assert [verdict.reward for verdict in verdicts] == [1.0, 1.0]
    assert sorted(verdict.raw.get("prepared", False) for verdict in verdicts) == [False, True]
