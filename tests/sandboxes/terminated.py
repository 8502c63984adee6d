"""A test to end by a signal: has two sandboxes, and waits. Collected only by `test_termination.py`.

The program of the first ends with its input, as all programs in tests' sandboxes must: nobody else ends them
after a kill.
"""

from __future__ import annotations

import os
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.driver.client import connect
from tests.sandboxes.conftest import plain_bench

pytestmark = pytest.mark.anyio


async def test_sandbox_is_open_until_the_end(tmp_path: Path) -> None:
    bench = plain_bench(os.environ["TERMINATED_OWNER"], tmp_path)
    async with (
        bench.provider,
        bench.provider.open(bench.spec("cat")),
        bench.provider.open(bench.spec()) as sandbox,
        connect(sandbox) as driver,
    ):
        await driver.ping()
        await anyio.Path(os.environ["TERMINATED_READY"]).touch()
        await anyio.sleep_forever()
