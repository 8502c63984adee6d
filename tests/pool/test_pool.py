"""The pool of sandboxes that are opened ahead, over a fake provider."""

from __future__ import annotations

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from decathlon_mcp.episodes.admission import Admission
from decathlon_mcp.episodes.records import SandboxRecords
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory, open_ahead
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import (
    ImageError,
    ProviderUnavailableError,
)
from decathlon_mcp.events import Events
from decathlon_mcp.plugins import pool as warm_pool
from decathlon_mcp.plugins.metrics import Metrics
from decathlon_mcp.plugins.pool import SandboxPool
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.machine_limits import MemoryFloor
from decathlon_mcp.storage.lock import create_state_folder
from decathlon_mcp.storage.store import SandboxRow, Store
from decathlon_mcp.types import Network
from tests.driver.peer import until
from tests.episodes.environment import (
    TOOLS,
    ended,
    exits_with,
    running_registry,
    sandbox_factory,
)
from tests.fakes.driver import Faults
from tests.fakes.provider import FakeProvider, FakeSandbox

pytestmark = pytest.mark.anyio

NUMBERS = itertools.count()
PLAYER = Principal()


def is_pooled(name: str) -> bool:
    return name.startswith("pooled-")


@dataclass(frozen=True)
class Pooled:
    """A pool, what it is for, and the factory that takes of it."""

    pool: SandboxPool
    admission: Admission
    factory: SandboxFactory
    provider: FakeProvider
    metrics: Metrics

    @asynccontextmanager
    async def opened(
        self, network: Network = "none", *, image: str | None = None, records: SandboxRecords | None = None
    ) -> AsyncGenerator[str]:
        """Open a sandbox for an admitted episode; yields its name."""
        admission = self.admission
        async with admission.admit(admission.reserve("task")):
            records = records or SandboxRecords(None, "e")
            async with self.factory.open(
                f"own-{next(NUMBERS)}", network, image=image, records=records, opening=admission.opening
            ) as (sandbox, driver):
                await driver.ping()
                yield sandbox.spec.name

    async def until_idle(self, count: int) -> None:
        await until(lambda: (self.pool.idle, self.pool.opening) == (count, 0))

    @property
    def names(self) -> Sequence[str]:
        return [*self.provider.machine.sandboxes]

    def taken(self, opening: str) -> float | None:
        return self.metrics.registry.get_sample_value(
            "decathlon_sandbox_openings_total", {"opening": opening}
        )


@asynccontextmanager
async def pooled(
    tmp_path: Path,
    size: int,
    *,
    provider: FakeProvider | None = None,
    max_sandboxes: int = 8,
    max_opening: int = 4,
    memory: MemoryFloor | None = None,
) -> AsyncGenerator[Pooled]:
    """A pool over a fake provider; checks at its end that nothing is left."""
    provider = provider or FakeProvider()
    admission = Admission(max_sandboxes=max_sandboxes, max_opening=max_opening, max_queue=8, memory=memory)
    metrics = Metrics()
    pool = SandboxPool(size, admission)
    factory = replace(sandbox_factory(tmp_path, provider), source=pool, events=Events([metrics]))
    async with provider, pool.running():
        yield Pooled(pool, admission, factory, provider, metrics)
    assert provider.machine.sandboxes == {}
    assert admission.opening.borrowed_tokens == 0


async def test_episodes_agents_and_graders_take_what_was_opened_ahead(tmp_path: Path) -> None:
    provider = FakeProvider(tools=TOOLS, run=exits_with(0))
    async with running_registry(tmp_path, provider, pool=1) as registry:
        first = registry.start("find-answer", PLAYER)
        await first.state.reach(Phase.READY)
        assert first.records.progress.agent == f"{first.spec.public_id}-agent"
        await until(lambda: registry.source.idle == 1)
        await first.claim_done(None)
        assert (await first.evaluate()).reward == 1.0
        # The agent's, and that of the pool that the grader took.
        assert [is_pooled(box.spec.name) for box in provider.opened[:2]] == [False, True]
        assert all(is_pooled(box.spec.name) for box in provider.opened[1:])
        await until(lambda: registry.source.idle == 1)
        second = registry.start("find-answer", PLAYER)
        await second.state.reach(Phase.READY)
        agent = second.records.progress.agent
        assert agent is not None
        assert is_pooled(agent)
        second.close()
        await ended(second)
        # One that has served an episode does not come back.
        assert agent not in provider.machine.sandboxes


async def test_a_draining_server_has_no_pool(tmp_path: Path) -> None:
    provider = FakeProvider()
    async with running_registry(tmp_path, provider, pool=2) as registry:
        await open_ahead(registry.factories)
        await until(lambda: registry.source.idle == 2)
        await registry.shutdown.drain()
        await until(lambda: not provider.machine.sandboxes)


async def test_a_server_that_hands_over_leaves_only_what_episodes_have(tmp_path: Path) -> None:
    async with pooled(tmp_path, 2) as pool:
        async with pool.opened():
            await pool.until_idle(2)
            async with pool.opened() as name:
                await pool.pool.empty()
                assert [own for own in pool.names if is_pooled(own)] == [name]


async def test_the_episode_is_in_the_store_before_it_has_the_sandbox(tmp_path: Path) -> None:
    create_state_folder(tmp_path / "state")
    with Store.open(tmp_path / "state", "server") as store:
        async with pooled(tmp_path, 1) as pool:
            async with pool.opened(records=(records := SandboxRecords(store, "e"))):
                await pool.until_idle(1)
            async with pool.opened(records=records) as name:
                assert is_pooled(name)
                (row,) = store.find(SandboxRow, episode="e")
                assert (row.name, row.role, row.spec["image"]) == (name, "agent", "sha256:fake")
            assert store.find(SandboxRow) == []


async def test_pool_and_episodes_together_keep_the_limit(tmp_path: Path) -> None:
    async with pooled(tmp_path, 8, max_sandboxes=3) as pool:
        async with pool.opened():
            await pool.until_idle(2)
            async with pool.opened("outbound") as name:
                assert not is_pooled(name)
                await until(lambda: len(pool.names) == 3)
                assert pool.pool.idle == 1
                async with pool.opened("outbound"):
                    await until(lambda: len(pool.names) == 3)
                    assert (pool.pool.idle, pool.pool.opening) == (0, 0)


async def test_an_episode_does_not_wait_for_one_that_is_being_opened(tmp_path: Path) -> None:
    """Neither for it, nor for a place among the openings, also when the pool opens as much as it may."""
    opening = anyio.Event()

    class Gated(FakeProvider):
        @asynccontextmanager
        async def open(self, spec: SandboxSpec, **options: Any) -> AsyncGenerator[FakeSandbox]:
            if is_pooled(spec.name):
                await opening.wait()
            async with super().open(spec, **options) as sandbox:
                yield sandbox

    async with pooled(tmp_path, 2, provider=Gated(), max_opening=1) as pool:
        async with pool.opened():
            await until(lambda: pool.pool.opening == 2)
            with anyio.fail_after(10):
                async with pool.opened() as name:
                    assert not is_pooled(name)
            opening.set()
            await pool.until_idle(2)


async def test_the_pool_gives_way_where_episodes_wait_for_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_pool, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(warm_pool, "RETRY_SECONDS", 0.01)
    available = 2
    async with pooled(tmp_path, 2, memory=MemoryFloor(1, lambda: available)) as pool:
        async with pool.opened():
            await pool.until_idle(2)
            available = 0
            await until(lambda: len(pool.names) == 1)
            available = 2
            await pool.until_idle(2)


async def test_kinds_are_not_mixed_and_a_digest_is_the_same_as_its_name(tmp_path: Path) -> None:
    async with pooled(tmp_path, 1) as pool:
        async with pool.opened("none"):
            await pool.until_idle(1)
        async with pool.opened("outbound") as name:
            assert not is_pooled(name)
        async with pool.opened("none", image="other") as name:
            assert not is_pooled(name)
        async with pool.opened("none", image="sha256:fake") as name:
            assert is_pooled(name)
        assert (pool.taken("warm"), pool.taken("cold")) == (1, 3)


async def test_a_name_that_has_another_image_now_gets_no_sandbox_of_the_old_one(tmp_path: Path) -> None:
    digest = "sha256:1"

    class Renamed(FakeProvider):
        async def environment(self, image: str | None) -> str | None:
            return digest if image == "fake" else image

    async with pooled(tmp_path, 1, provider=Renamed()) as pool:
        async with pool.opened():
            await pool.until_idle(1)
        digest = "sha256:2"
        async with pool.opened() as name:
            assert not is_pooled(name)
            machine = pool.provider.machine
            await until(
                lambda: (
                    [box.spec.image for name, box in machine.sandboxes.items() if is_pooled(name)] == [digest]
                )
            )
        async with pool.opened(image="sha256:1") as name:
            assert not is_pooled(name)
        await pool.until_idle(1)
        async with pool.opened() as name:
            assert is_pooled(name)
            assert pool.provider.machine.sandboxes[name].spec.image == "sha256:2"


async def test_one_that_dies_is_replaced(tmp_path: Path) -> None:
    async with pooled(tmp_path, 1) as pool:
        async with pool.opened():
            await pool.until_idle(1)
        (dead,) = pool.names
        await pool.provider.machine.sandboxes[dead].lose()
        await until(lambda: dead not in pool.names)
        await pool.until_idle(1)


async def test_one_that_does_not_answer_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warm_pool, "CHECK_SECONDS", 0.05)
    async with pooled(tmp_path, 1) as pool:
        async with pool.opened():
            await pool.until_idle(1)
        (silent,) = pool.names
        await pool.provider.machine.sandboxes[silent].pause()
        monkeypatch.setattr(warm_pool, "CHECK_SECONDS", 5.0 if pool.pool.idle == 0 else 0.05)
        async with pool.opened() as name:
            assert name != silent
        await until(lambda: silent not in pool.names)


async def test_a_pool_that_cannot_open_anything_does_not_disturb_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_pool, "RETRY_SECONDS", 0.01)
    failures = 3

    def fail(spec: SandboxSpec) -> Faults:
        nonlocal failures
        if is_pooled(spec.name) and failures:
            failures -= 1
            return Faults(open_error=ImageError("no such image"))
        return Faults()

    async with pooled(tmp_path, 1, provider=FakeProvider(faults=fail)) as pool:
        async with pool.opened() as name:
            assert not is_pooled(name)
        await pool.until_idle(1)
        pool.provider.unavailable = True
        with pytest.raises(ProviderUnavailableError):
            async with pool.opened():
                pass


@pytest.mark.parametrize("warm", [False, True])
async def test_cancelled_openings_leave_nothing(tmp_path: Path, *, warm: bool) -> None:
    """At each step of an opening in turn, from the pool or not."""
    async with pooled(tmp_path, 1 if warm else 0) as pool:
        for steps in range(0, 25, 2):
            if warm and pool.pool.idle == 0:
                async with pool.opened():
                    pass
                await pool.until_idle(1)
            async with anyio.create_task_group() as tasks:

                async def open_and_hold() -> None:
                    async with pool.opened():
                        await anyio.sleep_forever()

                tasks.start_soon(open_and_hold)
                for _ in range(steps):
                    await anyio.lowlevel.checkpoint()
                tasks.cancel_scope.cancel()
            assert pool.admission.active == 0
            await until(lambda: len(pool.names) <= int(warm) and not pool.pool.opening)
