"""Episodes as clients see them, at every kind of address and with every provider."""

from __future__ import annotations

from typing import Any

import anyio
import pytest
from mcp.shared.exceptions import MCPError

from tests.probe.clients import AddressKind, playing
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


async def test_the_agent_finds_no_answers_in_its_sandbox(served: Served) -> None:
    async with playing(served, "made-answer", "task") as player:
        output = await player.text(
            "probe__shell",
            command="find .. -name 'ground*' -o -name evaluation -o -name preprocess -o -name answer.txt",
        )
    assert output == ""


@pytest.mark.filterwarnings("ignore:The logging capability")
async def test_prompt_progress_and_log_messages_reach_the_client(
    served: Served, address: AddressKind
) -> None:
    notifications: list[tuple[float, float | None, str | None]] = []
    levels: list[str] = []
    all_received = anyio.Event()

    async def on_progress(progress: float, total: float | None, message: str | None) -> None:
        notifications.append((progress, total, message))

    async def on_log(params: Any) -> None:
        levels.append(params.level)
        if len(levels) == 3:
            all_received.set()

    async with playing(served, "find-answer", address, logging_callback=on_log, log_level="info") as player:
        instructions = player.client.instructions
        prompt: Any = await player.client.get_prompt("task")
        if address != "episode-sessionless":
            await player.client.set_logging_level("info")  # pyright: ignore[reportDeprecated]
        await player.client.list_tools()  # a call that waits for the sandbox reports that as progress too
        result = await player.client.call_tool("probe__count", {"to": 3}, progress_callback=on_progress)
        await player.call("probe__talk")
        await all_received.wait()
    assert instructions is not None
    assert "Write the answer, 42" in instructions
    assert "`claim_done`" in instructions
    assert prompt.messages[0].content.text == instructions
    assert not result.is_error
    assert notifications == [(1, 3, "at 1"), (2, 3, "at 2"), (3, 3, "at 3")]
    assert levels == ["info", "warning", "error"]


async def test_a_cancelled_call_is_cancelled_in_the_tool_and_the_episode_continues(
    served: Served, address: AddressKind
) -> None:
    async with playing(served, "find-answer", address) as player:
        await player.call("probe__echo", text="here")  # its server has started
        with anyio.move_on_after(1):
            await player.call("probe__sleep", seconds=30, note="first")
        command = "until grep first cancelled.txt; do sleep 0.05; done"
        assert "first" in await player.text("probe__shell", command=command)
        assert await player.text("probe__echo", text="still here") == "still here"


async def test_failures_of_tools_are_results_and_an_unknown_tool_is_an_error(served: Served) -> None:
    async with playing(served, "find-answer", "task") as player:
        failed = await player.call("probe__fail")
        # What a tool's arguments must be is left to its server.
        misused = await player.call("probe__echo", txt=3)
        with pytest.raises(MCPError, match="probe__echo") as unknown:
            await player.call("probe_echo")
    assert (failed.is_error, failed.content[0].text) == (True, "it did not work")
    assert misused.is_error
    assert "KeyError" in misused.content[0].text
    assert unknown.value.code == -32602


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
