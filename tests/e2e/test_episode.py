"""Episodes as clients see them, at every kind of address and with every provider."""

from __future__ import annotations

import json
from typing import Any

import anyio
import pytest
from mcp.shared.exceptions import MCPError

from tests.probe.clients import AddressKind, playing, refused
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio


async def test_the_right_answer_is_rewarded_with_one(served: Served, address: AddressKind) -> None:
    async with playing(served, "find-answer", address) as player:
        assert await player.text("probe__read", path="question.txt") == "six times seven\n"
        await player.call("probe__write", path="answer.txt", text="42")
        claimed = await player.call("claim_done", answer="it is 42")
        assert not claimed.is_error
        verdict = (await player.call("evaluate")).structured_content
    assert verdict["reward"] == 1.0
    assert verdict["success"] is True
    assert verdict["status"] == "scored"
    assert verdict["claimed"] is True


async def test_grading_uses_the_files_that_preprocess_made(served: Served) -> None:
    async with playing(served, "made-answer", "task") as player:
        assert await player.text("probe__read", path="launched.txt")
        await player.call("probe__write", path="answer.txt", text="made-by-preprocess")
        verdict = (await player.call("evaluate")).structured_content
    assert verdict["reward"] == 1.0


@pytest.mark.toolathlon
async def test_the_answer_reaches_the_evaluator(served: Served) -> None:
    async with playing(served, "say-answer", "task") as player:
        await player.call("claim_done", answer="forty-two")
        verdict = (await player.call("evaluate")).structured_content
    assert verdict["reward"] == 1.0


async def test_the_agent_finds_no_answers_in_its_sandbox(served: Served) -> None:
    async with playing(served, "made-answer", "task") as player:
        output = await player.text(
            "probe__shell",
            command="find .. -name 'ground*' -o -name evaluation -o -name preprocess -o -name answer.txt",
        )
    assert output == ""


async def test_tools_are_listed_in_a_stable_order_with_our_own_last(
    served: Served, address: AddressKind
) -> None:
    async with playing(served, "find-answer", address) as player:
        first = [tool.name for tool in (await player.client.list_tools()).tools]
        second = [tool.name for tool in (await player.client.list_tools()).tools]
    assert first == second
    assert first[:-2] == sorted(first[:-2])
    assert first[-2:] == ["claim_done", "evaluate"]
    assert "probe__bare" in first


async def test_the_prompt_is_served_as_instructions_and_as_an_mcp_prompt(
    served: Served, address: AddressKind
) -> None:
    async with playing(served, "find-answer", address) as player:
        instructions = player.client.instructions
        prompt: Any = await player.client.get_prompt("task")
    assert instructions is not None
    assert "Write the answer, 42" in instructions
    assert "`claim_done`" in instructions
    assert prompt.messages[0].content.text == instructions


async def test_progress_is_relayed_with_the_callers_token(served: Served, address: AddressKind) -> None:
    notifications: list[tuple[float, float | None, str | None]] = []

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        notifications.append((progress, total, message))

    async with playing(served, "find-answer", address) as player:
        await player.client.list_tools()  # a call that waits for the sandbox reports that as progress too
        result = await player.client.call_tool("probe__count", {"to": 3}, progress_callback=on_progress)
    assert not result.is_error
    assert notifications == [(1, 3, "at 1"), (2, 3, "at 2"), (3, 3, "at 3")]


@pytest.mark.filterwarnings("ignore:The logging capability")
async def test_log_messages_are_relayed(served: Served, address: AddressKind) -> None:
    levels: list[str] = []

    async def on_log(params: Any) -> None:
        levels.append(params.level)
        if len(levels) == 3:
            all_received.set()

    all_received = anyio.Event()
    async with playing(served, "find-answer", address, logging_callback=on_log, log_level="info") as player:
        if address != "episode-sessionless":
            await player.client.set_logging_level("info")  # pyright: ignore[reportDeprecated]
        await player.call("probe__talk")
        await all_received.wait()
    assert levels == ["info", "warning", "error"]


async def test_a_cancelled_call_is_cancelled_in_the_tool_and_the_episode_continues(
    served: Served, address: AddressKind
) -> None:
    async with playing(served, "find-answer", address) as player:
        with anyio.move_on_after(1):
            await player.call("probe__sleep", seconds=30, note="first")
        await player.call("probe__shell", command="until grep first cancelled.txt; do sleep 0.05; done")
        assert await player.text("probe__echo", text="still here") == "still here"


async def test_a_tools_failure_is_a_result_with_is_error(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        result = await player.call("probe__fail")
    assert result.is_error
    assert result.content[0].text == "it did not work"


async def test_an_unknown_tool_is_reported_with_similar_names(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        with pytest.raises(MCPError, match="probe__echo") as unknown:
            await player.call("probe_echo")
    assert unknown.value.code == -32602


async def test_invalid_arguments_are_left_to_the_tasks_server(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        result = await player.call("probe__echo", txt=3)
    assert result.is_error
    assert "KeyError" in result.content[0].text


INVALID: list[tuple[str, dict[str, Any], str]] = [
    ("claim_done", {"answer": 42}, "`answer` must be a string"),
    ("claim_done", {"anwser": "x"}, "unknown argument `anwser`"),
    ("evaluate", {"now": True}, "takes no arguments"),
]


async def test_our_own_tools_explain_invalid_arguments(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        for tool, arguments, message in INVALID:
            assert message in await refused(player.client, tool, **arguments)
        assert await player.text("probe__echo", text="open") == "open"


async def test_a_server_that_dies_fails_its_call_with_its_stderr(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        result = await player.call("probe__die")
        assert result.is_error
        assert "killed by its tool die" in result.content[0].text
        again = await player.call("probe__echo", text="?")
        assert again.is_error
        assert (await player.call("evaluate")).structured_content["reward"] == 0.0


async def test_no_tool_works_after_the_claim(served: Served, address: AddressKind) -> None:
    async with playing(served, "find-answer", address) as player:
        claimed = await player.call("claim_done")
        late = await player.call("probe__write", path="answer.txt", text="42")
        assert late.is_error
        assert "no tool works any more" in late.content[0].text
        # Programs that play with a model hide `evaluate` from it.
        assert "evaluate" not in str([claimed.content, late.content])
        assert (await player.call("evaluate")).structured_content["reward"] == 0.0


async def test_a_hundred_concurrent_evaluations_return_the_same_verdict(served: Served) -> None:
    verdicts: list[str] = []

    async def evaluate() -> None:
        verdicts.append(json.dumps((await player.call("evaluate")).structured_content))

    async with playing(served, "find-answer", "task") as player, anyio.create_task_group() as tasks:
        for _ in range(100):
            tasks.start_soon(evaluate)
    assert len(set(verdicts)) == 1


async def test_cancelling_evaluate_does_not_stop_the_grading(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        await player.call("probe__write", path="answer.txt", text="42")
        with anyio.move_on_after(0.05):
            await player.call("evaluate")
        assert (await player.call("evaluate")).structured_content["reward"] == 1.0


@pytest.mark.parametrize(
    ("task_id", "reason"),
    [("crashing-verdict", "was killed: signal 9"), ("slow-verdict", "did not end in time")],
)
async def test_an_attempt_whose_evaluator_breaks_is_forfeited(
    served: Served, task_id: str, reason: str
) -> None:
    async with playing(served, task_id, "task") as player:
        first = await player.call("evaluate")
        second = await player.call("evaluate")
    assert not first.is_error
    assert (first.structured_content["status"], first.structured_content["reward"]) == ("forfeited", 0.0)
    assert reason in first.structured_content["detail"]
    assert first.structured_content == second.structured_content
