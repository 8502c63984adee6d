"""Playing episodes with the client, over HTTP and with an embedded server."""

from __future__ import annotations

import asyncio
import contextvars
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import anyio
import pytest
from decathlon_client import (
    AccessDeniedError,
    CallTimeoutError,
    Decathlon,
    Episode,
    ManagedEpisode,
    NoVerdictError,
    RequestError,
    SetUpError,
    UnknownEpisodeError,
    UnknownTaskError,
    UnknownToolError,
)
from decathlon_client.client_values import SERVER_METRICS, check_weights, playable

from decathlon_mcp.driver.link import READ_IN_THREAD_BYTES
from decathlon_mcp.episodes.state import Phase
from tests.probe.serving import SUITE, Served

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_an_episode_is_played_to_its_verdict(d: Decathlon) -> None:
    reports: list[tuple[float, float | None, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, total, message))

    (task,) = await d.tasks(search="find-")
    assert (task.suite, task.servers, task.network, task.runnable) == ("probe", ("probe",), False, True)
    async with d.episode(task) as e:
        assert e.prompt.splitlines()[-1] == str(task.prompt).splitlines()[-1]
        assert {"probe__read", "claim_done"} <= {tool.name for tool in e.tools}
        assert not {"evaluate", "call_tool", "start_episode"} & {tool.name for tool in e.tools}
        assert (await e.call("probe__read", {"path": "question.txt"})).text == "six times seven\n"
        counted = await e.call("probe__count", {"to": 3, "pause": 0.01}, on_progress=on_progress)
        assert counted.text == "counted to 3"
        assert reports == [(1, 3, "at 1"), (2, 3, "at 2"), (3, 3, "at 3")]
        exited = await e.call("probe__shell", {"command": "exit 3"})
        assert (exited.structured, exited.content) == ({"exit_code": 3}, ({"type": "text", "text": ""},))
        failed = await e.call("probe__fail")
        assert (failed.is_error, failed.text) == (True, "it did not work")
        with pytest.raises(RequestError, match="not today") as refusal:
            await e.call("probe__refuse")
        relayed = {"source": "task", "error": {"code": -31999, "data": {"again": "tomorrow"}}}
        assert (refusal.value.number, refusal.value.data) == (-32603, relayed)
        with pytest.raises(UnknownToolError) as unknown:
            await e.call("probe__eccho")
        assert "probe__echo" in unknown.value.near
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        assert not (await e.claim_done("it is 42")).is_error
        late = await e.call("probe__echo", {"text": "too late"})
        assert (late.is_error, "claimed" in late.text) == (True, True)
        verdict = await e.evaluate()
    assert (verdict.reward, verdict.success, verdict.status) == (1.0, True, "scored")
    assert verdict.raw["claimed"] is True


async def test_errors_of_openings_and_lists_are_of_their_kinds(d: Decathlon) -> None:
    with pytest.raises(RequestError, match="there is no split 'nowhere'; the splits are"):
        await d.tasks(split="nowhere")
    with pytest.raises(UnknownTaskError, match="did you mean find-answer") as caught:
        async with d.episode("find-anser"):
            pass
    assert "find-answer" in caught.value.near
    with pytest.raises(SetUpError, match="preprocess"):
        async with d.episode("failing-preprocess"):
            pass
    with pytest.raises(UnknownEpisodeError):
        async with d.attach("0" * 48):
            pass


async def test_weights_are_checked_against_the_metrics_of_the_tasks(d: Decathlon) -> None:
    tasks = {task.id: task for task in await d.tasks(prompts=False)}
    assert tasks["find-answer"].metrics == SERVER_METRICS
    check_weights({"first": 1, "success": 1}, tasks.values())
    with pytest.raises(ValueError, match=r"no task has the metric 'firts'; metrics: .*, first, second"):
        check_weights({"success": 1, "firts": 0.5}, tasks.values())
    with pytest.raises(ValueError, match="no task has the metric 'first'"):
        check_weights({"first": 1}, [tasks["find-answer"]])


async def test_tasks_that_are_named_and_cannot_be_played_are_an_error(d: Decathlon) -> None:
    tasks = await d.tasks(prompts=False)
    assert [task.id for task in playable(tasks, ["find-answer"])] == ["find-answer"]
    assert all(task.runnable for task in playable(tasks))
    with pytest.raises(ValueError, match=r"there is no task 'find-answr' here; did you mean find-answer\?"):
        playable(tasks, ["find-answer", "find-answr"])
    broken = replace(tasks[0], runnable=False, missing=("a token",))
    with pytest.raises(ValueError, match=f"{broken.id} cannot run: a token"):
        playable([broken], [broken.id])


CANCELLED = {
    "command": "until [ -s cancelled.txt ]; do sleep 0.02; done; cat cancelled.txt; rm cancelled.txt"
}
"""Waits until the cancelled tool has written its note."""


async def test_a_call_past_its_timeout_or_whose_caller_is_cancelled_is_cancelled(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        # A tool that has not begun when its call is cancelled notes nothing: its server starts before.
        await e.call("probe__echo", {"text": "here"})
        with pytest.raises(CallTimeoutError, match=r"no answer within 1\.5 s"):
            await e.call("probe__sleep", {"seconds": 100, "note": "late"}, timeout=1.5)
        assert (await e.call("probe__shell", CANCELLED)).text == "late\n"
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(e.call, "probe__sleep", {"seconds": 100, "note": "gone"})
            await anyio.sleep(0.5)
            assert (await e.call("probe__echo", {"text": "quick"})).text == "quick"
            tasks.cancel_scope.cancel()
        assert (await e.call("probe__shell", CANCELLED)).text == "gone\n"


async def test_an_attempt_that_cannot_be_graded_has_no_reward_and_a_forfeited_one_zero(d: Decathlon) -> None:
    async with d.episode("lost-verdict") as e:
        with pytest.raises(NoVerdictError) as caught:
            await e.evaluate()
        with pytest.raises(NoVerdictError):
            await e.evaluate()
    assert caught.value.status == "sandbox_lost"
    assert "reward" not in caught.value.verdict
    async with d.episode("crashing-verdict") as e:
        verdict = await e.evaluate()
    assert (verdict.status, verdict.reward, verdict.success) == ("forfeited", 0.0, False)


async def test_the_caller_chooses_the_launch_time(d: Decathlon) -> None:
    async with d.episode("made-answer", launch_time=datetime(2031, 2, 3, 4, 5, 6)) as e:
        assert "2031-02-03 04:05:06" in (await e.call("probe__read", {"path": "launched.txt"})).text


async def test_max_calls_closes_the_attempt(d: Decathlon) -> None:
    async with d.episode("find-answer", max_calls=1) as e:
        await e.call("probe__echo", {"text": ""})
        assert "limit of 1" in (await e.call("probe__echo", {"text": ""})).text
        assert (await e.evaluate()).raw["truncated"] is True


async def test_truncate_closes_and_grades_the_attempt(d: Decathlon) -> None:
    async with d.episode("find-answer", policy="controller") as e:
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        assert not (await e.truncate("no more time", turns=3)).is_error
        assert (await e.call("probe__echo", {"text": ""})).is_error
        verdict = await e.evaluate()
    assert (verdict.raw["truncated"], verdict.raw["claimed"]) == (True, False)
    assert (verdict.reward, verdict.metrics["turns"]) == (1.0, 3)


async def test_the_agents_address_can_play_but_not_evaluate(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        assert e.agent_address is not None
        assert e.id not in e.agent_address
        async with d.attach(e.agent_address) as agent:
            assert agent.tools == e.tools
            await agent.call("probe__write", {"path": "answer.txt", "text": "42"})
            with pytest.raises(AccessDeniedError, match="may neither evaluate nor truncate"):
                await agent.evaluate()
            with pytest.raises(AccessDeniedError, match="agent's address"):
                await agent.truncate()
            await agent.claim_done()
        assert (await e.evaluate()).reward == 1.0


async def test_an_attached_episode_stays_open(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        for handle in (e.id, e.address):
            async with d.attach(handle) as again:
                assert (again.id, again.task, again.prompt) == (e.id, "find-answer", e.prompt)
                assert again.tools == e.tools
                await again.call("probe__write", {"path": "answer.txt", "text": "42"})
        assert (await e.evaluate()).reward == 1.0


async def test_an_episode_may_be_left_in_another_task(d: Decathlon) -> None:
    opening = d.episode("find-answer")
    entered: list[Episode] = []

    async def enter() -> None:
        entered.append(await opening.__aenter__())

    async def leave() -> None:
        await opening.__aexit__(None, None, None)

    for step in (enter, leave):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(step)
        if step is enter:
            assert (await entered[0].call("probe__echo", {"text": "here"})).text == "here"


async def test_an_error_of_the_body_is_raised_unwrapped(d: Decathlon) -> None:
    with pytest.raises(LookupError, match="mine"):
        async with d.episode("find-answer"):
            raise LookupError("mine")


def test_an_embedded_server_gives_long_replies_in_a_program_that_asyncio_runs(tmp_path: Path) -> None:
    # Then anyio does not know the event loop in callbacks if sniffio is installed.
    pytest.importorskip("sniffio")
    text = "x" * READ_IN_THREAD_BYTES

    async def play() -> str:
        async with (
            Decathlon.embedded(SUITE, "host", state=tmp_path / "state", isolation="none") as d,
            d.episode("find-answer") as e,
        ):
            await e.call("probe__write", {"path": "long.txt", "text": text})
            return (await e.call("probe__read", {"path": "long.txt"})).text

    assert contextvars.Context().run(asyncio.run, play()) == text


async def test_a_managed_episode_is_opened_and_closed_in_different_tasks(served: Served) -> None:
    managed = await asyncio.create_task(ManagedEpisode.open("find-answer", url=served.url))
    episode = next(each for each in served.episodes.live if each.id == managed.episode.id)
    await managed.episode.act("probe__write", '{"path": "answer.txt", "text": "42"}')
    assert (await managed.episode.evaluate()).reward == 1.0
    await asyncio.create_task(managed.close())
    await managed.close()
    await episode.state.reach(Phase.ENDED)
