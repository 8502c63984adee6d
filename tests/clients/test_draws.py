"""Drawing tasks with the client: `sample`, and episodes of what is drawn."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from decathlon_client import Decathlon, RequestError

from tests.probe.serving import SUITE

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture
async def d(tmp_path: Path) -> AsyncGenerator[Decathlon]:
    results = tmp_path / "results.jsonl"
    passes = {"find-answer": True, "dense": False}
    results.write_text("\n".join(json.dumps({"task": task, "success": it}) for task, it in passes.items()))
    settings = {"state": tmp_path / "state", "drain_seconds": 5, "results": results}
    async with Decathlon.embedded(SUITE, "host", task="say-answer", **settings) as d:
        yield d


async def test_a_sample_is_reproducible_by_seed_and_draws_without_seed_continue(d: Decathlon) -> None:
    sample = [task.id for task in await d.sample(6, "train", seed=7, needs=["probe"], without=["dead"])]
    again = await d.sample(6, "train", seed=7, needs="probe", without=("dead", "network"))
    assert sample == [task.id for task in again]
    assert len(set(sample)) == 6
    drawn = [(await d.sample(order="easy_first", prompts=False))[0].id for _ in range(2)]
    assert drawn == ["find-answer", "dense"]


async def test_an_episode_takes_a_sampled_task_a_draw_or_the_default_task(d: Decathlon) -> None:
    (task,) = await d.sample(search="find-", prompts=False)
    async with d.episode(task) as e:
        assert e.task == "find-answer"
    async with d.episode(order="hard_first", seed=0) as e:
        assert e.task == "dense"
    async with d.episode() as e:
        assert e.task == "say-answer"


async def test_errors_of_a_draw_name_the_valid_values(d: Decathlon) -> None:
    with pytest.raises(RequestError, match="what they need is network"):
        await d.sample(needs=["teleport"])
    with pytest.raises(RequestError, match="the splits are"):
        async with d.episode(split="nowhere"):
            pass
    with pytest.raises(RequestError, match="`task` cannot be combined with `split`"):
        async with d.episode("dense", split="train"):
            pass
