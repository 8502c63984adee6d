"""Requests are sent again under their operation id: after a loss of the connection until the server answers,
and while the server does not reach the sandbox.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import pytest
from decathlon_client import (
    CallTimeoutError,
    ClientError,
    ConnectionLostError,
    Decathlon,
    Episode,
)

from decathlon_mcp.background import background_tasks
from decathlon_mcp.driver import link
from decathlon_mcp.driver.stream import ReconnectPolicy
from tests.clients.relay import Relay, relayed
from tests.driver.peer import until
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider
from tests.http.test_lost_clients import served_by_fake
from tests.probe.serving import Served, serving
from tests.sandboxes.own_engine import OwnEngine
from tests.survival.servers import SupervisedServer, supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

OUTAGE_SECONDS = 1.0
REPLY_CUTS = (0, 17, 200, 700)
"""Bytes of replies after which a connection ends: within status lines, headers and bodies."""


@asynccontextmanager
async def playing(
    served: Served, resend_seconds: float = 60
) -> AsyncGenerator[tuple[Relay, Decathlon, Episode]]:
    async with (
        relayed(served) as (relay, url),
        Decathlon(url, resend_seconds=resend_seconds) as d,
        d.episode("find-answer") as e,
    ):
        yield relay, d, e


async def restore_later(relay: Relay) -> None:
    await anyio.sleep(OUTAGE_SECONDS)
    await relay.listen()


async def test_a_call_that_is_cut_off_is_sent_again_under_its_operation_id(served: Served) -> None:
    async with playing(served) as (relay, _, e):
        cuts = 0

        async def cut_twice(progress: float, total: float | None, message: str | None) -> None:
            nonlocal cuts
            if cuts < 2:
                cuts += 1
                await relay.cut()

        before = len(relay.operations)
        # On a busy machine it takes seconds until the client is connected again.
        reply = await e.call("probe__count", {"to": 20, "pause": 0.2}, on_progress=cut_twice)
        operations = relay.operations[before:]
    assert reply.text == "counted to 20"
    assert cuts == 2
    assert len(operations) == 3
    assert len(set(operations)) == 1


RUN_SLOWLY = {"command": "echo run >> runs.txt; sleep 2; wc -l < runs.txt"}


async def test_a_reply_that_is_cut_anywhere_is_that_of_the_only_run(served: Served) -> None:
    async with playing(served) as (relay, _, e):
        for run, cut in enumerate(REPLY_CUTS, 1):
            relay.reply_limits = [cut, 1 << 30] * 3
            await relay.cut()
            command = {"command": "echo run >> runs.txt; wc -l < runs.txt"}
            assert (await e.call("probe__shell", command)).text.strip() == str(run)
            relay.reply_limits = []


async def test_a_start_whose_reply_is_cut_off_starts_one_episode(served: Served) -> None:
    times_sent = 0
    async with relayed(served) as (relay, url), Decathlon(url) as d:
        # Within the reply of `initialize`, between the two replies, and within that of `start_episode`.
        for reply_limit in (600, 900, 1300, 1700, 2100):
            before = {live.id for live in served.episodes.live}
            operations = len(relay.operations)
            relay.reply_limits = [reply_limit]
            await relay.cut()
            async with d.episode(search="find-answer") as e:
                assert {live.id for live in served.episodes.live} - before == {e.id}
            times_sent = max(times_sent, len(relay.operations) - operations)
    assert times_sent > 2  # with that of `close_episode`


async def test_requests_wait_while_the_server_is_refused(served: Served) -> None:
    async with playing(served) as (relay, d, e), anyio.create_task_group() as tasks:
        await relay.refuse()
        tasks.start_soon(restore_later, relay)
        started = time.monotonic()
        assert (await e.call("probe__echo", {"text": "after"})).text == "after"
        assert time.monotonic() - started >= 0.9 * OUTAGE_SECONDS
        assert await d.tasks(prompts=False)
        await relay.refuse()
        tasks.start_soon(restore_later, relay)
        assert not (await e.claim_done()).is_error
        await relay.refuse()
        tasks.start_soon(restore_later, relay)
        assert (await e.evaluate()).reward == 0.0


async def test_the_errors_of_a_proxy_without_a_server_are_an_outage(served: Served) -> None:
    async with playing(served) as (relay, _, e):
        relay.statuses = [502, 503, 504]
        await relay.cut()
        assert (await e.call("probe__echo", {"text": "through"})).text == "through"
        assert relay.statuses == []


async def test_an_outage_longer_than_resend_seconds_fails_the_call(served: Served) -> None:
    async with playing(served, resend_seconds=0.5) as (relay, _, e):
        await relay.refuse()
        with anyio.fail_after(10), pytest.raises(ConnectionLostError) as caught:
            await e.call("probe__echo", {"text": ""})
        await relay.listen()
        assert caught.value.retryable
        assert (await e.call("probe__echo", {"text": "next"})).text == "next"


async def test_a_timeout_and_a_cancellation_end_the_wait_for_a_server(served: Served) -> None:
    async with playing(served) as (relay, d, e):
        await relay.refuse()
        with anyio.fail_after(10):
            with pytest.raises(CallTimeoutError):
                await e.call("probe__echo", {"text": ""}, timeout=0.5)
            with anyio.move_on_after(0.5) as scope:
                async with d.episode("find-answer"):
                    pass
            assert scope.cancelled_caught
        await relay.listen()


@pytest.mark.long
async def test_a_batch_goes_on_while_its_server_is_killed_again_and_again(tmp_path: Path) -> None:
    async def player(e: Episode) -> list[str]:
        counts = [(await e.call("probe__shell", RUN_SLOWLY)).text.strip() for _ in range(3)]
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await e.claim_done()
        return counts

    async def kill(server: SupervisedServer) -> None:
        for _ in range(3):
            await anyio.sleep(4)
            await server.kill()

    async with supervised_server(tmp_path / "state") as server, background_tasks() as tasks:
        async with Decathlon(server.url) as d:
            async with d.batch(["find-answer"] * 8, concurrency=4, progress=False) as batch:
                tasks.start_soon(kill, server)
                results = [result async for result in batch.run(player)]
    assert [result.failure for result in results] == [None] * 8
    assert [result.played for result in results] == [["1", "2", "3"]] * 8
    assert [result.reward for result in results] == [1.0] * 8


@dataclass(slots=True)
class Engine:
    """An engine that can go away, and the tool of its sandboxes, which returns once `finish` is set."""

    relay: Relay
    url: str
    provider: FakeProvider
    runs: list[str] = field(default_factory=list[str])
    running: anyio.Event = field(default_factory=anyio.Event)
    finish: anyio.Event = field(default_factory=anyio.Event)

    async def work(self, call: FakeCall) -> str:
        self.runs.append("run")
        self.running.set()
        await self.finish.wait()
        return f"run {len(self.runs)}"

    def go(self) -> None:
        self.provider.unavailable = True
        for sandbox in self.provider.opened:
            sandbox.break_stream()

    def come_back(self) -> None:
        self.provider.unavailable = False

    async def be_away_for_tries(self, tries: int) -> None:
        """Go away while a call runs that ends meanwhile, and come back once it was sent so often again."""
        await self.running.wait()
        before = len(self.relay.operations)
        self.go()
        self.finish.set()
        await until(lambda: len(self.relay.operations) >= before + tries)
        self.come_back()


@asynccontextmanager
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[Engine]:
    """A server whose engine is a fake one. It answers the calls of a sandbox out of reach after 0.3 s."""
    monkeypatch.setattr(link, "ABSENT_SECONDS", 0.3)

    async def work(call: FakeCall) -> str:
        return await engine.work(call)

    provider = FakeProvider(tools={"probe": {"work": work}})
    async with (
        served_by_fake(tmp_path, provider, reconnect=ReconnectPolicy(60)) as served,
        relayed(served) as (relay, url),
    ):
        engine = Engine(relay, url, provider)
        yield engine
        engine.come_back()


async def test_a_call_whose_sandbox_is_out_of_reach_is_sent_again_and_gets_its_only_reply(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        engine(tmp_path, monkeypatch) as away,
        Decathlon(away.url) as d,
        d.episode("find-answer") as e,
        anyio.create_task_group() as tasks,
    ):
        before = len(away.relay.operations)
        tasks.start_soon(away.be_away_for_tries, 3)
        assert (await e.call("probe__work")).text == "run 1"
        operations = away.relay.operations[before:]
        assert len(operations) >= 4
        assert len(set(operations)) == 1
        assert away.runs == ["run"]


@pytest.mark.parametrize("resend_seconds", [0, 1])
async def test_a_sandbox_out_of_reach_for_longer_than_resend_seconds_fails_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, resend_seconds: float
) -> None:
    async with (
        engine(tmp_path, monkeypatch) as away,
        Decathlon(away.url, resend_seconds=resend_seconds) as d,
        d.episode("find-answer") as e,
    ):
        before = len(away.relay.operations)
        away.go()
        with anyio.fail_after(20), pytest.raises(ClientError) as caught:
            await e.call("probe__work")
        tries = len(away.relay.operations) - before
        away.come_back()
        away.finish.set()
        assert caught.value.code == "provider_unavailable"
        assert caught.value.retryable
        assert caught.value.data["absentSeconds"] >= resend_seconds
        assert tries > 1 if resend_seconds else tries == 1
        async with Decathlon(away.url) as patient, patient.attach(e.id) as same:
            assert (await same.call("probe__work")).text.startswith("run ")


@pytest.mark.docker
@pytest.mark.long
async def test_a_call_gets_its_reply_although_its_engine_was_killed_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_engine: OwnEngine
) -> None:
    monkeypatch.setattr(link, "ABSENT_SECONDS", 0.5)
    async with (
        serving(tmp_path / "state", provider="docker", survives=True) as served,
        relayed(served) as (relay, url),
        Decathlon(url) as d,
        d.episode("find-answer") as e,
        anyio.create_task_group() as tasks,
    ):
        before = len(relay.operations)

        async def be_away() -> None:
            await until(lambda: len(relay.operations) > before)
            await own_engine.kill()
            await until(lambda: len(relay.operations) >= before + 3)
            await own_engine.start()

        tasks.start_soon(be_away)
        assert (await e.call("probe__shell", RUN_SLOWLY)).text.strip() == "1"
        assert len(set(relay.operations[before:])) == 1
