"""Text that a model writes: what no server can read is a reply for the model, and the attempt goes on."""

from __future__ import annotations

from typing import Any, cast

import anyio
import pytest
from decathlon_client import Decathlon, RequestError
from decathlon_client.lockstep import Call

from tests.probe.serving import Served

pytestmark = pytest.mark.anyio

ECHO = "probe__echo"
HALF = "\ud83d"


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["text"] = value
    return value


TOO_DEEP, SURROGATE, DIGITS, FINITE = "128 levels", "surrogate", "4,300 digits", "must be finite"
UNREADABLE: dict[str, tuple[Any, str]] = {
    "half-an-emoji": ({"text": f"smile {HALF}"}, SURROGATE),
    "half-an-emoji-in-json": ('{"text": "\\ud83d"}', SURROGATE),
    "half-an-emoji-as-nested-key": ({"text": [{"a": {HALF: 1}}]}, SURROGATE),
    **{f"{depth}-levels": ({"text": nested(depth)}, TOO_DEEP) for depth in (126, 900, 100_000)},
    "100000-levels-in-json": ('{"text": ' + "[" * 100_000 + "]" * 100_000 + "}", TOO_DEEP),
    "300-brackets": ("[" * 300, "not JSON"),
    "3000-brackets": ("[" * 3_000, TOO_DEEP),
    "a-cycle": (cyclic(), TOO_DEEP),
    "many-digits": ({"text": [-(10**5_000)]}, DIGITS),
    "many-digits-in-json": ('{"text": ' + "9" * 5_000 + "}", DIGITS),
    "nan": ({"text": float("nan")}, FINITE),
    "1e400-in-json": ('{"text": 1e400}', FINITE),
    "a-number-as-key": ({1: "x"}, "a key of an object must be a text"),
    "a-tuple-as-nested-key": ({"text": {(1, 2): "x"}}, "a key of an object must be a text"),
    "a-set": ({"text": {1}}, "set is not JSON"),
    "many-values": ({"text": [0] * 100_001}, "100,000 values"),
    "an-array": ([1], "must be a JSON object"),
}


async def test_what_no_server_can_read_is_a_reply_and_other_calls_go_on(d: Decathlon) -> None:
    async with d.episode("find-answer") as e, anyio.create_task_group() as tasks:
        progress_made = anyio.Event()

        async def play_slowly() -> None:
            async def report(progress: float, total: float | None, message: str | None) -> None:
                progress_made.set()

            await e.call("probe__count", {"to": 100_000, "pause": 0.1}, on_progress=report)

        tasks.start_soon(play_slowly)
        await progress_made.wait()
        for name, (arguments, expected) in UNREADABLE.items():
            reply = await e.act(ECHO, arguments)
            assert reply.is_error, name
            assert expected in reply.text, (name, reply.text[:200])
            assert len(reply.text.encode()) < 300, name  # itself readable, and short
        for tool in (f"probe__{HALF}", "x" * 5_000_000, cast("str", 5), cast("str", None), "a\nb", ""):
            assert (await e.act(tool, {})).is_error
        assert (await e.act(ECHO, {"text": "x" * 5_000_000})).is_error
        # The other call of the session still runs.
        progress_made = anyio.Event()
        with anyio.fail_after(60):
            await progress_made.wait()
        tasks.cancel_scope.cancel()


async def test_slots_and_lobby_survive_what_a_model_writes(d: Decathlon) -> None:
    calls: list[Call] = [(ECHO, arguments) for arguments, _ in UNREADABLE.values()]
    calls.append((f"probe__{HALF}", {}))
    async with d.lockstep(["find-answer"] * 2) as eps:
        bad, good = eps
        replies = await eps.call(
            {bad: [*calls, (ECHO, {"text": "later"})], good: [(ECHO, {"text": "other"})]}
        )
        assert [reply.is_error for reply in replies[bad]] == [True] * len(calls) + [False]
        assert replies[good][0].text == "other"
        assert len(eps.live) == 2
        for arguments, expected in UNREADABLE.values():
            if isinstance(arguments, dict):
                with pytest.raises(RequestError, match=expected):
                    await d.call_lobby("list_tasks", {"search": arguments})
        assert await d.tasks(prompts=False)


async def test_neither_an_answer_nor_a_note_keeps_an_attempt_from_its_verdict(served: Served) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        await e.note(f"{HALF} a note")
        await e.act("probe__write", {"path": "answer.txt", "text": "42"})
        assert (await e.claim_done(f"42 {HALF}")).is_error
        assert not e.claimed
        await e.truncate("x" * 5_000_000)
        assert e.claimed
        verdict = await e.evaluate()
        assert (verdict.reward, verdict.raw["truncated"]) == (1.0, True)


async def test_a_label_that_no_server_can_read_is_refused_and_the_client_works(d: Decathlon) -> None:
    with pytest.raises(RequestError, match=SURROGATE):
        async with d.episode("find-answer", labels={"step": HALF}):
            pass
    async with d.episode("find-answer", labels={"step": "5"}) as e:
        with pytest.raises(RequestError, match=SURROGATE):
            await e.note("a note", usage={HALF: 1})
        assert (await e.act(ECHO, {"text": "after"})).text == "after"
