"""The short form of `tests.fuzz.http`: the corpus and generated inputs at a server in this process."""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncGenerator, Iterable
from random import Random

import anyio
import pytest

from tests.cheats.http_attacks import open_session
from tests.fuzz.http import CORPUS, HEALTH, HEALTH_SECONDS, LIMITS, exchange, fault_in, generate
from tests.probe.serving import Served, serving

pytestmark = pytest.mark.anyio
AT_ONCE = 8
GENERATED = 100


@pytest.fixture(scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Served]:
    state = tmp_path_factory.mktemp("state")
    async with serving(state, provider="host", limits=LIMITS, max_sandboxes=2, idle_seconds=2) as served:
        yield served


async def assert_no_fault(
    served: Served, inputs: Iterable[tuple[str, bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    """Send each input, named in a failure, on a connection of its own."""
    host, _, port = served.url.removeprefix("http://").rpartition(":")
    session = (await open_session(host, int(port))).encode()
    limiter = anyio.CapacityLimiter(AT_ONCE)

    async def check(name: str, data: bytes) -> None:
        async with limiter:
            sent = data.replace(b"{session}", session).replace(b"{long}", b"c" * 1000)
            assert fault_in(await exchange(host, int(port), sent, Random(name))) is None, name

    with caplog.at_level(logging.ERROR):
        async with anyio.create_task_group() as tasks:
            for name, data in inputs:
                tasks.start_soon(check, name, data)
        health = await exchange(host, int(port), HEALTH, Random(0), seconds=HEALTH_SECONDS)
    assert health.startswith(b"HTTP/1.1 200")
    assert [record.message for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_corpus_is_answered_without_faults(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    await assert_no_fault(served, ((file.name, file.read_bytes()) for file in CORPUS.iterdir()), caplog)


async def test_generated_requests_are_answered_without_faults(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    first = secrets.randbelow(10**9)
    seeds = range(first, first + GENERATED)
    await assert_no_fault(served, ((f"seed {seed}", generate(Random(seed))) for seed in seeds), caplog)
