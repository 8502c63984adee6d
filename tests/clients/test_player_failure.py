"""A player's own exception: what its result, the log, the page and the commands say of it."""

from __future__ import annotations

import json
import logging
import pickle
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from decathlon_client import Decathlon, Episode, PlayerFailedError, RequestError

from decathlon_mcp.cli.command_line import run
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.page.access import load_or_create_page_key
from tests.page.sites import browser, page_over, sign_in
from tests.probe.serving import Served, folder_of

pytestmark = pytest.mark.anyio

FILE = Path(__file__).name


async def missing_key(e: Episode) -> None:
    message: dict[str, Any] = {"content": "no call"}
    await e.act(message["tool_calls"])


async def without_message(e: Episode) -> None:
    raise AssertionError


async def library(e: Episode) -> None:
    await e.act(json.loads("no JSON"))


async def unknown_tool(e: Episode) -> None:
    await e.call("probe__no_such_tool")


def line_of(player: Callable[[Episode], Awaitable[None]], number: int) -> int:
    return player.__code__.co_firstlineno + number


MISSING_KEY = f"KeyError: 'tool_calls' ({FILE}:{line_of(missing_key, 2)})"
PLAYERS = {
    missing_key: MISSING_KEY,
    without_message: f"AssertionError: raise AssertionError ({FILE}:{line_of(without_message, 1)})",
    # The innermost line is one of the standard library.
    library: f"JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({FILE}:{line_of(library, 1)})",
    unknown_tool: "UnknownToolError: ",
}


@pytest.mark.parametrize(("player", "expected"), PLAYERS.items(), ids=[player.__name__ for player in PLAYERS])
async def test_result_and_log_have_type_message_file_and_line(
    served: Served,
    caplog: pytest.LogCaptureFixture,
    player: Callable[[Episode], Awaitable[None]],
    expected: str,
) -> None:
    caplog.set_level(logging.DEBUG, "decathlon.client")
    async with Decathlon(served.url) as d, d.batch(["find-answer"], concurrency=1, progress=False) as batch:
        (result,) = [result async for result in batch.run(player)]
    assert result.fault == "player"
    assert isinstance(result.failure, PlayerFailedError)
    assert str(result.failure).startswith(expected)
    assert f"({FILE}:" in str(result.failure)
    assert f"in {player.__name__}" in result.failure.traceback
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.getMessage().endswith(f"has no reward: {result.failure}")
    debug = "".join(record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG)
    assert f"in {player.__name__}" in debug
    # A process pool's results are pickled.
    assert str(pickle.loads(pickle.dumps(result.failure))) == str(result.failure)


async def test_graded_attempt_whose_player_raises_later_keeps_its_verdict(served: Served) -> None:
    episodes: list[str] = []

    async def play() -> None:
        async with Decathlon(served.url) as d, d.episode("find-answer") as e:
            episodes.append(e.public_id)
            await e.evaluate()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await play()
    ended = served.find(folder_of(served.state, episodes[0]).name)
    assert ended.verdict is not None
    assert (ended.verdict.reward, ended.state.cause) == (0.0, None)


async def test_page_and_commands_say_what_the_player_raised(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    episodes: list[str] = []

    async def play() -> None:
        async with Decathlon(served.url) as d, d.episode("find-answer", labels={"run": "left"}) as e:
            episodes.append(e.public_id)
            await missing_key(e)

    with pytest.raises(KeyError):
        await play()
    await said_everywhere(served, capfd, "left", episodes[0], f"the player failed: {MISSING_KEY}")


async def test_reason_is_bounded_and_has_no_control_characters(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    async with Decathlon(served.url) as d:
        async with d.episode("find-answer", labels={"run": "hostile"}) as e:
            closing = {"episode": e.id, "reason": "<b>\x1b[31m\nred"}
            with pytest.raises(RequestError, match="`reason`: must have at most 500 characters"):
                await d.call_lobby("close_episode", {**closing, "reason": "x" * 501})
            assert not (await d.call_lobby("close_episode", closing)).is_error
    await said_everywhere(served, capfd, "hostile", e.public_id, "<b>\ufffd[31m red")


async def said_everywhere(
    served: Served, capfd: pytest.CaptureFixture[str], run_name: str, episode: str, reason: str
) -> None:
    """Check what the page, `show` and `runs` say of an episode that was lost."""
    await served.find(folder_of(served.state, episode).name).state.reach(Phase.ENDED)
    state = ("--state", str(served.state))
    for command in (["show", episode], ["runs", run_name], ["show", "--run", run_name]):
        assert run([*command, *state]) == 0
        output = capfd.readouterr().out
        assert reason in output
        assert "(not_evaluated)" not in output
    app = page_over(served.state)
    async with browser(app) as client:
        await sign_in(client, load_or_create_page_key(served.state))
        for path in (f"/e/{episode}", f"/runs/{run_name}"):
            text = (await client.get(path)).text
            escaped = reason.replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#39;")
            assert escaped in text, path
            assert "(not_evaluated)" not in text


async def test_a_player_that_is_not_asynchronous_is_told_so(served: Served) -> None:
    def plain(e: Episode) -> Any:
        return e.task

    async with Decathlon(served.url) as d, d.batch(["find-answer"], concurrency=1, progress=False) as batch:
        (result,) = [result async for result in batch.run(plain)]
    assert (result.reward, result.fault) == (None, "player")
    assert "a player must be an `async def` function" in str(result.failure)
    assert "returned str" in str(result.failure)
