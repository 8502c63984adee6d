"""Playing episodes with the client, over HTTP and with an embedded server."""

from __future__ import annotations

import asyncio
import contextvars
from datetime import datetime
from pathlib import Path
from typing import Literal

import anyio
import pytest
from decathlon_client import (
    CallTimeoutError,
    Decathlon,
    Episode,
    EpisodeEndedError,
    NoVerdictError,
    RequestError,
    SetUpError,
    UnknownEpisodeError,
    UnknownTaskError,
    UnknownToolError,
)
from decathlon_client.values import SERVER_METRICS, Task, check_weights

from decathlon_mcp.driver.link import READ_IN_THREAD_BYTES
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.grading import attempt
from tests.probe.serving import SUITE, serving

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


async def test_the_right_answer_has_reward_one(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        assert (await e.call("probe__read", {"path": "question.txt"})).text == "six times seven\n"
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        assert not (await e.claim_done("it is 42")).is_error
        verdict = await e.evaluate()
    assert (verdict.reward, verdict.success, verdict.status) == (1.0, True, "scored")
    assert verdict.metrics["calls"] == 2
    assert verdict.raw["claimed"] is True


async def test_metrics_come_from_the_evaluator_and_the_server(d: Decathlon) -> None:
    async with d.episode("dense") as e:
        verdict = await e.evaluate()
    assert "calls" in verdict.metrics
    assert set(verdict.metrics) > set(verdict.raw["weights"])


async def test_listed_prompts_are_those_of_the_episodes(d: Decathlon) -> None:
    tasks = {task.id: task for task in await d.tasks()}
    task = tasks["find-answer"]
    assert (task.suite, task.servers, task.network, task.runnable) == ("probe", ("probe",), False, True)
    async with d.episode("find-answer") as e:
        assert task.prompt is not None
        assert e.prompt.splitlines()[-1] == task.prompt.splitlines()[-1]


async def test_tasks_can_be_searched_and_listed_without_prompts(d: Decathlon) -> None:
    assert [(task.id, task.prompt) for task in await d.tasks(search="find-", prompts=False)] == [
        ("find-answer", None)
    ]
    with pytest.raises(RequestError, match="there is no split 'nowhere'; the splits are"):
        await d.tasks(split="nowhere")


async def test_weights_are_checked_against_the_metrics_of_the_tasks(d: Decathlon) -> None:
    tasks = {task.id: task for task in await d.tasks(prompts=False)}
    assert tasks["find-answer"].metrics == SERVER_METRICS
    check_weights({"first": 1, "success": 1}, tasks.values())
    with pytest.raises(ValueError, match=r"no task has the metric 'firts'; metrics: .*, first, second"):
        check_weights({"success": 1, "firts": 0.5}, tasks.values())
    with pytest.raises(ValueError, match="no task has the metric 'first'"):
        check_weights({"first": 1}, [tasks["find-answer"]])


def test_metrics_that_an_evaluation_alone_shows_may_have_any_weight() -> None:
    unknown = Task.read({"id": "a", "metrics": None})
    by_name = Task.read({"id": "b", "metrics": ["found", "tool_calls(TOOL)"]})
    assert unknown.metrics is None
    check_weights({"anything": 1}, [by_name, unknown])
    check_weights({"tool_calls(shop__order)": 1}, [by_name])
    with pytest.raises(ValueError, match="no task has the metric 'failed_calls"):
        check_weights({"failed_calls(shop__order)": 1}, [by_name])


def test_client_and_server_count_the_same_metrics() -> None:
    assert SERVER_METRICS == attempt.SERVER_METRICS


async def test_tools_are_the_tasks_own_and_claim_done_without_evaluate(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        names = [tool.name for tool in e.tools]
        assert names[-1] == "claim_done"
        assert "evaluate" not in names
        echo = next(tool for tool in e.tools if tool.name == "probe__echo")
    assert echo.description == "Return the text."
    assert echo.input_schema == {"type": "object", "properties": {"text": {"type": "string"}}}


async def test_an_unknown_task_error_names_similar_tasks(d: Decathlon) -> None:
    with pytest.raises(UnknownTaskError, match="did you mean find-answer") as caught:
        async with d.episode("find-anser"):
            pass
    assert "find-answer" in caught.value.near


async def test_an_unknown_tool_error_names_similar_tools(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        with pytest.raises(UnknownToolError) as caught:
            await e.call("probe__eccho")
    assert "probe__echo" in caught.value.near


async def test_a_failing_tool_is_a_reply_and_a_refusal_an_error(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        reply = await e.call("probe__fail")
        assert (reply.is_error, reply.text) == (True, "it did not work")
        with pytest.raises(RequestError, match="not today") as caught:
            await e.call("probe__refuse")
    relayed = {"source": "task", "error": {"code": -31999, "data": {"again": "tomorrow"}}}
    assert (caught.value.number, caught.value.data) == (-32603, relayed)


async def test_structured_content_is_unchanged(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        reply = await e.call("probe__shell", {"command": "exit 3"})
    assert reply.structured == {"exit_code": 3}
    assert reply.content == ({"type": "text", "text": ""},)


async def test_progress_is_reported(d: Decathlon) -> None:
    reports: list[tuple[float, float | None, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        reports.append((progress, total, message))

    async with d.episode("find-answer") as e:
        reply = await e.call("probe__count", {"to": 3, "pause": 0.01}, on_progress=on_progress)
    assert reply.text == "counted to 3"
    assert reports == [(1, 3, "at 1"), (2, 3, "at 2"), (3, 3, "at 3")]


CANCELLED = {"command": "until [ -s cancelled.txt ]; do sleep 0.02; done; cat cancelled.txt"}
"""Waits until the cancelled tool has written its note."""


async def test_a_call_past_its_timeout_is_cancelled_and_the_episode_continues(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        with pytest.raises(CallTimeoutError, match=r"no answer within 0\.3 s"):
            await e.call("probe__sleep", {"seconds": 100, "note": "late"}, timeout=0.3)
        assert (await e.call("probe__shell", CANCELLED)).text == "late\n"


async def test_cancelling_the_caller_cancels_the_call(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        with anyio.move_on_after(0.3):
            await e.call("probe__sleep", {"seconds": 100, "note": "gone"})
        assert (await e.call("probe__shell", CANCELLED)).text == "gone\n"


async def test_calls_run_in_parallel(d: Decathlon) -> None:
    async with d.episode("find-answer") as e, anyio.create_task_group() as tasks:
        tasks.start_soon(e.call, "probe__sleep", {"seconds": 100})
        assert (await e.call("probe__echo", {"text": "quick"})).text == "quick"
        tasks.cancel_scope.cancel()


async def test_a_call_after_the_claim_is_an_error_reply(d: Decathlon) -> None:
    async with d.episode("find-answer") as e:
        await e.claim_done()
        reply = await e.call("probe__echo", {"text": "too late"})
    assert reply.is_error
    assert "claimed" in reply.text


async def test_an_attempt_that_cannot_be_graded_has_no_reward(d: Decathlon) -> None:
    async with d.episode("lost-verdict") as e:
        with pytest.raises(NoVerdictError) as caught:
            await e.evaluate()
        with pytest.raises(NoVerdictError):
            await e.evaluate()
    assert caught.value.status == "sandbox_lost"
    assert "reward" not in caught.value.verdict


async def test_a_forfeited_attempt_has_a_reward_of_zero(d: Decathlon) -> None:
    async with d.episode("crashing-verdict") as e:
        verdict = await e.evaluate()
    assert (verdict.status, verdict.reward, verdict.success) == ("forfeited", 0.0, False)


async def test_a_set_up_error_names_its_cause(d: Decathlon) -> None:
    with pytest.raises(SetUpError, match="preprocess"):
        async with d.episode("failing-preprocess"):
            pass


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


@pytest.mark.parametrize("policy", [None, "controller"])
async def test_the_agents_address_can_play_but_not_evaluate(
    d: Decathlon, policy: Literal["controller"] | None
) -> None:
    async with d.episode("find-answer", policy=policy) as e:
        assert e.agent_address is not None
        assert e.id not in e.agent_address
        async with d.attach(e.agent_address) as agent:
            assert agent.tools == e.tools
            await agent.call("probe__write", {"path": "answer.txt", "text": "42"})
            with pytest.raises(UnknownToolError):
                await agent.evaluate()
            with pytest.raises(UnknownEpisodeError):
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


async def test_attaching_with_a_wrong_handle_fails(d: Decathlon) -> None:
    with pytest.raises(UnknownEpisodeError):
        async with d.attach("0" * 48):
            pass


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


async def test_loss_that_the_server_confirms_is_a_loss(tmp_path: Path) -> None:
    async with serving(tmp_path, provider="host") as server:
        async with Decathlon(server.url) as client, client.episode("find-answer") as episode:
            server.find(episode.id).close()
            await server.find(episode.id).state.reach(Phase.ENDED)
            with pytest.raises(EpisodeEndedError):
                await episode.call("probe__echo", {"text": "a"})


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
