"""Wrong options of batches and labels: refused at once, and never the fault of the infrastructure."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_client import Decathlon, Episode, RequestError

from tests.probe.serving import Served

pytestmark = pytest.mark.anyio


async def player(e: Episode) -> None:
    await e.claim_done()


NAN = float("nan")


@pytest.mark.parametrize(
    ("tasks", "options", "error"),
    [
        ("find-answer", {}, TypeError),
        (["find-answer"], {"labels": {"step": 5}}, TypeError),
        (["find-answer"], {"player_seconds": NAN}, ValueError),
        (["find-answer"], {"group_seconds": 0}, ValueError),
        (["find-answer"], {"late": "wait"}, ValueError),
        (["find-answer"], {"patience_seconds": NAN}, ValueError),
        (["find-answer"], {"concurrency": 0}, ValueError),
        (["find-answer"], {"n": 0}, ValueError),
        (["find-answer"], {"tries": 0}, ValueError),
        (["find-answer"], {"max_turns": 50}, TypeError),
        (["find-answer"], {"labels": {"run": "a", "group": "b"}}, ValueError),
        (["find-answer"] * 3, {"labels": {"step": "x" * 5_000}}, RequestError),
        (["find-answer"] * 3, {"launch_time": "yesterday"}, RequestError),
    ],
)
async def test_wrong_options_end_a_batch_with_an_error(
    served: Served, tasks: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    before = set(served.episodes.live)
    async with Decathlon(served.url) as d:
        with pytest.raises(error):
            await _play(d, tasks, options)
    assert set(served.episodes.live) == before


async def _play(d: Decathlon, tasks: Any, options: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"concurrency": 1, "progress": False, **options}
    async with d.batch(tasks, **chosen) as batch:
        async for result in batch.run(player):
            assert isinstance(result.failure, RequestError)


async def test_a_timeout_that_is_no_number_is_refused(served: Served) -> None:
    with pytest.raises(ValueError, match="resend_seconds"):
        Decathlon(served.url, resend_seconds=NAN)
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        for call in (e.call("probe__echo", {"text": "x"}, timeout=NAN), e.note("x", timeout=NAN)):
            with pytest.raises(ValueError, match="must be a number"):
                await call


FEW_FILES = """
import resource, sys
import anyio
from decathlon_client import ClientError, Decathlon
from tests.probe.serving import SUITE

async def main():
    resource.setrlimit(resource.RLIMIT_NOFILE, (96, 96))
    try:
        async with Decathlon.embedded(SUITE, "host", state=sys.argv[1]):
            pass
    except ClientError as error:
        print(error)

anyio.run(main)
"""


async def test_a_server_that_may_open_too_few_files_does_not_start(tmp_path: Path) -> None:
    done = await anyio.run_process([sys.executable, "-c", FEW_FILES, str(tmp_path)])
    assert done.stdout == b"this process may open 96 files, and a server needs at least 138: ulimit -n 138\n"


async def test_a_second_run_of_a_batch_is_an_error(served: Served) -> None:
    async with (
        Decathlon(served.url) as d,
        d.batch(["find-answer"], concurrency=1, progress=False) as batch,
    ):
        assert len([result async for result in batch.run(player)]) == 1
        with pytest.raises(RuntimeError, match="run before"):
            _ = [result async for result in batch.run(player)]
