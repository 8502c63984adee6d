"""Branches by the client, over HTTP and embedded, and its summary, which leaves them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from decathlon_client import Decathlon, RequestError, SetUpError, UnknownEpisodeError
from decathlon_client.batch_results import Result, Summary

from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from tests.probe.serving import SUITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_a_branch_is_opened_and_played_to_its_verdict(d: Decathlon) -> None:
    async with d.episode("find-answer", labels={"run": "whole"}) as e:
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await e.call("probe__write", {"path": "answer.txt", "text": "41"})
        await e.call("probe__shell", {"command": "cat /proc/sys/kernel/random/uuid"})
        async with d.branch(e, at=1, labels={"why": "first answer"}) as b:
            assert (await b.call("probe__read", {"path": "answer.txt"})).text == "42"
            await b.claim_done()
            verdict = await b.evaluate()
        assert verdict.reward == 1.0
        assert verdict.metrics["calls"] == 2
        assert verdict.raw["labels"] == {"run": "whole", "why": "first answer"}
        assert verdict.raw["branch"] == {"episode": e.public_id, "at": 1, "differences": 0}
        with pytest.raises(SetUpError, match=r"call 3 \(probe__shell\) .* identifier: "):
            async with d.branch(e, at=3):
                pass
        async with d.branch(e.id, at=3, on_difference="report") as b:
            status = (await d.call_lobby("episode_status", {"episode": b.id})).structured
            assert status is not None
            assert status["branch"]["differences"] == 1
        with pytest.raises(RequestError, match="there is no call 4"):
            async with d.branch(e, at=4):
                pass
        with pytest.raises(UnknownEpisodeError):
            async with d.branch(e.public_id, at=1):
                pass
    results = [_result("find-answer", verdict), _result("find-answer", None)]
    assert [task.episodes for task in Summary.of(results).tasks] == [1]
    assert [task.episodes for task in Summary.of(results, with_branches=True).tasks] == [2]


def _result(task: str, verdict: Any) -> Result[None]:
    return Result(0, task, 0, 0, None, None, verdict, None, None, 0.0)


async def test_the_rewards_along_a_finished_attempt_say_what_each_call_was_worth(tmp_path: Path) -> None:
    async with Decathlon.embedded(SUITE, "host", state=tmp_path, drain_seconds=5) as d:
        async with d.episode("dense", labels={"run": "whole"}) as e:
            for name in ("a.txt", "b.txt"):
                await e.call("probe__write", {"path": name, "text": "x"})
            verdict = await e.evaluate()
        along = await d.rewards_along(e, concurrency=2)
        with pytest.raises(ValueError, match="at least 1"):
            await d.rewards_along(e, concurrency=0)
    assert [each and each.reward for each in along] == [0.25, 0.75, verdict.reward]
    assert verdict.reward == 1.75
    assert {each.raw["branch"]["episode"] for each in along if each} == {e.public_id}
    report = EpisodeHistory([tmp_path]).run("whole")
    assert report is not None
    assert report.summary.counts.episodes == 1
