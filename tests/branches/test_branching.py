"""Branches over the fake provider: what is made again, what is compared, and what is refused."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.replies import CallParams
from decathlon_mcp.episodes.call import Waiter
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.errors import AccessDeniedError, BadRequestError, SetUpError, UnknownEpisodeError
from decathlon_mcp.plugins.branches.branches import branches_of
from decathlon_mcp.protocol.lobby_tools import start_tool
from decathlon_mcp.storage.trajectory import RequestKeys
from tests.branches.starting import is_exact, start_with
from tests.episodes.environment import ended, exits_with, hang, make_call, running_registry, suite_with
from tests.fakes.driver import FakeCall, ToolError
from tests.fakes.provider import FakeProvider, SavingFakeProvider
from tests.storage.trajectories import events

pytestmark = pytest.mark.anyio

PLAYER = Principal()


class Counters:
    """Tools with a state: `count` counts in its sandbox, `total` in all of them."""

    def __init__(self) -> None:
        self.total = 0
        self.in_sandbox: dict[int, int] = {}
        self.release = anyio.Event()

    async def count(self, call: FakeCall) -> str:
        self.in_sandbox[id(call.tree)] = self.in_sandbox.get(id(call.tree), 0) + 1
        return f"count {self.in_sandbox[id(call.tree)]} {call.arguments}"

    async def count_all(self, call: FakeCall) -> str:
        self.total += 1
        return f"total {self.total}"

    async def slow(self, call: FakeCall) -> str:
        await self.release.wait()
        return "slow"

    async def fail(self, call: FakeCall) -> str:
        raise ToolError("no such thing")

    @property
    def tools(self) -> dict[str, dict[str, Any]]:
        return {
            "probe": {
                "count": self.count,
                "all": self.count_all,
                "slow": self.slow,
                "fail": self.fail,
                "hang": hang,
            }
        }


@asynccontextmanager
async def playing(
    folder: Path, tools: Any = None, **settings: Any
) -> AsyncGenerator[tuple[EpisodeRegistry, Episode]]:
    """A registry with one ready episode."""
    provider = FakeProvider(tools=tools or Counters().tools, run=exits_with(0))
    async with running_registry(folder, provider, **settings) as registry:
        episode = registry.start("find-answer", PLAYER, labels={"run": "a"}, max_calls=50)
        await episode.ready()
        yield registry, episode


async def call(episode: Episode, tool: str, **arguments: Any) -> str:
    reply = (await make_call(episode, f"probe__{tool}", CallParams.of(arguments))).decoded()
    return reply["result"]["content"][0]["text"] if "result" in reply else reply["error"]["message"]


async def branch(
    registry: EpisodeRegistry, source: str, at: int, principal: Principal = PLAYER, **options: Any
) -> Episode:
    arguments = {"branch_of": source, "at": at, **options}
    return await start_with(registry, principal, **arguments)


def lines(registry: EpisodeRegistry, episode: Episode) -> list[dict[str, Any]]:
    return events(registry.folder(episode.id))


async def test_a_branch_stands_where_its_source_stood(tmp_path: Path) -> None:
    async with playing(tmp_path) as (registry, source):
        for text in ("one", "two", "three"):
            await call(source, "count", text=text)
        await call(source, "fail")
        made = await branch(registry, source.id, 2, labels={"why": "test"})
        await made.ready()
        assert await call(made, "count") == "count 3 {}"
        assert await call(source, "count") == "count 4 {}"
        spec, first = made.spec, source.spec
        assert (spec.launch_time, spec.limits, spec.policy) == (first.launch_time, first.limits, first.policy)
        assert spec.labels == {"run": "a", "why": "test"}
        calls = [line for line in lines(registry, made) if line["event"] == "call"]
        assert [(line["seq"], line.get("replayed", False)) for line in calls] == [
            (1, True),
            (2, True),
            (3, False),
        ]
        assert lines(registry, made)[0]["branch"] == {"episode": source.public_id, "at": 2, "differences": 0}
        failed = await branch(registry, source.id, 4)
        await failed.ready()
        assert failed.trajectory.index.failed == 1
        again = await branch(registry, made.id, 3)
        await again.ready()
        assert await call(again, "count") == "count 4 {}"


async def test_the_verdict_of_a_branch_is_as_if_it_had_been_played_whole(tmp_path: Path) -> None:
    async with playing(tmp_path) as (registry, source):
        await call(source, "count")
        await call(source, "fail")
        made = await branch(registry, source.id, 2)
        await made.ready()
        verdicts: list[dict[str, Any]] = []
        for episode in (source, made):
            await call(episode, "count")
            await episode.claim_done("42")
            verdicts.append((await episode.evaluate()).to_json())
        whole, branched = verdicts
        assert branched.pop("branch") == {"episode": source.public_id, "at": 2, "differences": 0}
        changing = ("episode", "started_at", "claimed_at", "scored_at", "seconds", "signature", "metrics")
        counted = [{**verdict["metrics"], "seconds": 0} for verdict in verdicts]
        assert counted[0] == counted[1]
        for name in changing:
            del whole[name], branched[name]
        assert whole == branched


async def test_a_reply_that_differs_is_refused_or_counted(tmp_path: Path) -> None:
    async with playing(tmp_path) as (registry, source):
        await call(source, "count")
        await call(source, "all")
        refused = await branch(registry, source.id, 2)
        await ended(refused)
        assert refused.state.ending is Ending.SET_UP_FAILED
        assert refused.verdict is not None
        assert refused.verdict.status == "set_up_failed"
        with pytest.raises(SetUpError) as caught:
            await refused.ready()
        assert caught.value.message.startswith(
            f"call 2 (probe__all) of {source.public_id} has another reply now: other: '1' before, '2' now"
        )
        assert caught.value.data["difference"] == {"class": "other", "old": "1", "new": "2"}
        counted = await branch(registry, source.id, 2, on_difference="report")
        await counted.ready()
        (line,) = [line for line in lines(registry, counted) if line["event"] == "difference"]
        assert {**line, "time": 0} == {
            "event": "difference",
            "time": 0,
            "seq": 2,
            "class": "other",
            "old": "1",
            "new": "3",
        }
        verdict = await counted.evaluate()
        assert verdict.to_json()["branch"]["differences"] == 1


async def test_calls_without_a_settled_state_after_them_are_refused(tmp_path: Path) -> None:
    counters = Counters()
    async with playing(tmp_path, counters.tools) as (registry, source):
        await call(source, "count")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call, source, "slow")
            while len(source.calls.unanswered) < 1 or source.calls.sent < 2:
                await anyio.lowlevel.checkpoint()
            await call(source, "count")
            with pytest.raises(BadRequestError, match="call 2 has no reply that could be compared"):
                await branch(registry, source.id, 2)
            counters.release.set()
        with pytest.raises(BadRequestError, match="call 2 still ran when a later one was sent"):
            await branch(registry, source.id, 2)
        overlapping = await branch(registry, source.id, 3)
        await overlapping.ready()
        with pytest.raises(BadRequestError, match="there is no call 4 to branch after"):
            await branch(registry, source.id, 4)
        cancelled = Waiter(RequestKeys("stop"))
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_swallow, source, cancelled)
            while source.calls.sent < 4:
                await anyio.lowlevel.checkpoint()
            tasks.cancel_scope.cancel()
        with pytest.raises(BadRequestError, match="call 4 was cancelled"):
            await branch(registry, source.id, 4)
        beginning = await branch(registry, source.id, 0)
        await beginning.ready()
        assert beginning.calls.sent == 0


async def _swallow(episode: Episode, caller: Waiter) -> None:
    await make_call(episode, "probe__hang", CallParams.of({}), waiter=caller)


async def test_a_branch_needs_the_handle_and_the_right_to_evaluate(tmp_path: Path) -> None:
    async with playing(tmp_path, reward="controller") as (registry, _):
        controller = Principal("alice", "controller", alone=False)
        source = registry.start("find-answer", controller)
        await source.ready()
        for name in (source.spec.agent_id, source.public_id, "0" * 48):
            with pytest.raises(UnknownEpisodeError):
                await branch(registry, name, 0, controller)
        with pytest.raises(UnknownEpisodeError):
            await branch(registry, source.id, 0, Principal("bob", "controller", alone=False))
        with pytest.raises(AccessDeniedError, match="only a controller's token may branch it"):
            await branch(registry, source.id, 0, Principal("alice", "player", alone=False))
        assert (await branch(registry, source.id, 0, controller)).spec.owner == controller


async def test_a_task_that_reaches_what_episodes_share_is_refused_unless_that_is_wanted(
    tmp_path: Path,
) -> None:
    suite = suite_with(tmp_path / "probe", conflicts=[["find-answer"]])
    async with playing(tmp_path, suite=suite) as (registry, source):
        with pytest.raises(BadRequestError, match=r"the conflict group of find-answer.*`outside`"):
            await branch(registry, source.id, 0)
        with pytest.raises(BadRequestError, match="the conflict group of find-answer"):
            registry.start("find-answer", PLAYER, labels={"replay_of": source.public_id})
        waiting = await branch(registry, source.id, 0, outside=True)
        source.close()
        await waiting.ready()


async def test_a_branch_whose_source_is_gone_fails_with_that_reason(tmp_path: Path) -> None:
    async with playing(tmp_path) as (registry, source):
        await call(source, "count")
        made = await branch(registry, source.id, 1)
        (registry.folder(source.id) / "trajectory.jsonl").unlink()
        with pytest.raises(SetUpError, match=f"the record of episode {source.public_id}"):
            await made.ready()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"branch_of": "x"}, "`branch_of` and `at` belong together"),
        ({"branch_of": "x", "at": 1, "max_calls": 3, "split": "s"}, "`split`, `max_calls`"),
        ({"branch_of": "x", "at": -1}, "must be at least 0"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(arguments: Any, message: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        start_tool().from_arguments(arguments)
    assert message in caught.value.message


@asynccontextmanager
async def saving(folder: Path, **options: Any) -> AsyncGenerator[tuple[EpisodeRegistry, Episode, Counters]]:
    """A registry on sandboxes that can be saved, with one ready episode. `options`: of `start_episode`."""
    counters = Counters()
    tools = {
        "probe": {
            **counters.tools["probe"],
            "write": write_note,
            "read": read_note,
            "all": counters.count_all,
        }
    }
    provider = SavingFakeProvider(tools=tools, run=exits_with(0))
    async with running_registry(folder, provider, snapshots_kept=2) as registry:
        episode = await start_with(registry, task="made-answer", **options)
        await episode.ready()
        yield registry, episode, counters


async def write_note(call: FakeCall) -> str:
    call.tree.write("/note", call.arguments["text"])
    return "written"


async def read_note(call: FakeCall) -> str:
    return call.tree.text("/note")


async def test_a_branch_at_a_saved_state_is_a_copy_of_it(tmp_path: Path) -> None:
    async with saving(tmp_path) as (registry, source, counters):
        assert await call(source, "all") == "total 1"
        await call(source, "write", text="first")
        assert (await branches_of(registry).snapshots(source).take()).at == 2
        await call(source, "write", text="second")
        copies = [await branch(registry, source.id, 2) for _ in range(2)]
        for number, made in enumerate(copies):
            await made.ready()
            assert await call(made, "read") == "first"
            await call(made, "write", text=f"copy {number}")
        assert [await call(made, "read") for made in (*copies, source)] == ["copy 0", "copy 1", "second"]
        assert counters.total == 1  # no call was made again
        calls = [line for line in lines(registry, copies[0]) if line["event"] == "call"]
        assert [line.get("replayed", False) for line in calls] == [True, True, False, False, False]
        verdict = await copies[0].evaluate()
        assert verdict.to_json()["branch"] == {
            "episode": source.public_id,
            "at": 2,
            "differences": 0,
            "exact": True,
        }
        # Beyond the state, calls are made again.
        later = await branch(registry, source.id, 3)
        await later.ready()
        assert await call(later, "read") == "second"
        verdict = await later.evaluate()
        assert "exact" not in verdict.to_json()["branch"]


async def test_states_are_saved_after_every_so_many_calls(tmp_path: Path) -> None:
    async with saving(tmp_path, snapshots=2) as (registry, source, _):
        for number in range(7):
            await call(source, "write", text=str(number))
        await branches_of(registry).snapshots(source).settled()
        folder = registry.folder(source.id) / "snapshots"
        # The newest two are kept.
        assert sorted(path.name for path in folder.glob("*.json")) == ["4.json", "6.json"]
        made = await branch(registry, source.id, 6)
        await made.ready()
        assert await call(made, "read") == "5"
        assert is_exact(made)


async def test_a_state_that_cannot_be_copied_costs_time_only(tmp_path: Path) -> None:
    async with saving(tmp_path) as (registry, source, _):
        await call(source, "write", text="first")
        state = await branches_of(registry).snapshots(source).take()
        (state.folder / "saved").write_text("damaged")
        made = await branch(registry, source.id, 1)
        await made.ready()
        assert await call(made, "read") == "first"
        assert not is_exact(made)
        assert not state.folder.exists()
        await source.claim_done(None)
        with pytest.raises(BadRequestError, match="not open"):
            await branches_of(registry).snapshots(source).take()


async def test_a_call_that_the_claim_ended_is_refused_and_one_before_it_is_not(tmp_path: Path) -> None:
    async with playing(tmp_path) as (registry, source):
        await call(source, "count")
        async with anyio.create_task_group() as tasks:

            async def call_hanging() -> None:
                with pytest.raises(Exception, match="closed while the call ran"):
                    await call(source, "hang")

            tasks.start_soon(call_hanging)
            while source.calls.sent < 2:
                await anyio.lowlevel.checkpoint()
            await source.claim_done(None)
        await source.evaluate()
        with pytest.raises(BadRequestError, match="call 2 ended after the claim"):
            await branch(registry, source.id, 2)
        source.close()
        await ended(source)
        made = await branch(registry, source.id, 1)
        await made.ready()
        assert await call(made, "count") == "count 2 {}"
