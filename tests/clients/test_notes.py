"""Notes: messages of the model in the record of its episode, which neither agents nor evaluators see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import anyio.lowlevel
import anyio.to_thread
import pytest
from decathlon_client import ClientError, Decathlon, Episode, EpisodeEndedError, UnknownEpisodeError, sync
from decathlon_client.notes import send_conversation, send_notes, sending_notes

from decathlon_mcp.episodes.state import Phase
from tests.clients.relay import Relay, relayed
from tests.probe.clients import connected, refused
from tests.probe.serving import Served

pytestmark = pytest.mark.anyio

USAGE = {"input_tokens": 1200, "output_tokens": 80, "cost_usd": 0.0048}


def folder(served: Served, e: Episode) -> Path:
    return served.state / "episodes" / e.id


def notes(served: Served, e: Episode) -> list[dict[str, Any]]:
    lines = (folder(served, e) / "trajectory.jsonl").read_bytes().splitlines()
    assert max(map(len, lines)) <= 64 << 10
    return [line for line in map(json.loads, lines) if line["event"] == "note"]


async def test_notes_stand_between_the_calls_and_no_evaluator_reads_them(served: Served) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        await e.note("I look around.", role="reasoning")
        await e.call("probe__write", {"path": "answer.txt", "text": "42"})
        await e.note("Done.", usage=USAGE)
        await e.claim_done()
        verdict = await e.evaluate()
        await e.note("After the verdict.", calls=0)
        first, second, third = notes(served, e)
    assert (first["calls"], first["role"], first["text"]) == (0, "reasoning", "I look around.")
    assert (second["calls"], second["role"], second["usage"]) == (1, "assistant", USAGE)
    assert (third["calls"], "usage" in third) == (0, False)
    assert (verdict.reward, verdict.metrics["calls"]) == (1.0, 1.0)
    graded = (folder(served, e) / "traj_log.json").read_text() + json.dumps(dict(verdict.raw))
    assert not any(note["text"] in graded for note in (first, second, third))


async def test_a_long_text_becomes_several_notes_with_the_counts_once(served: Served) -> None:
    text = "\u0001ж\ud800x\n" * 40_000
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        await e.note(text, usage=USAGE)
        parts = notes(served, e)
    assert "".join(part["text"] for part in parts) == text.replace("\ud800", "?")
    assert [part.get("usage") for part in parts] == [None] * (len(parts) - 1) + [USAGE]


async def test_notes_are_refused_to_agents_and_after_the_end(served: Served) -> None:
    async with Decathlon(served.url) as d:
        async with d.episode("find-answer") as e:
            agent = str(e.agent_address).split("/")[-2]
            with pytest.raises(UnknownEpisodeError):
                await d.call_lobby("add_note", {"episode": agent, "text": "an agent's"})
            async with connected(served.lobby) as lobby:
                assert "`role`" in await refused(lobby, "add_note", episode=e.id, text="x", role="tool")
                assert "`usage" in await refused(lobby, "add_note", episode=e.id, text="x", usage={"a": -1})
                assert "`usage" in await refused(lobby, "add_note", episode=e.id, text="x", usage={"a": 1e99})
            for size, problem in ((64 << 10, "the note is not kept"), (3_900_000, "have at most 393,216")):
                reply = await d.call_lobby("add_note", {"episode": e.id, "text": "x" * size})
                assert reply.is_error
                assert problem in reply.text
        await served.find(e.id).state.reach(Phase.ENDED)
        with pytest.raises(ClientError) as raised:
            await e.note("too late")
        assert isinstance(raised.value, EpisodeEndedError)
        assert notes(served, e) == []


async def test_notes_in_the_background_keep_their_order_and_their_place(served: Served) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        async with sending_notes(e) as sender:
            for number in range(5):
                sender.add(f"turn {number}")
                await e.act("probe__read", {"path": "notes.txt"})
                await e.act("there-is-none")
        kept = notes(served, e)
    assert [(note["text"], note["calls"]) for note in kept] == [(f"turn {n}", n) for n in range(5)]


async def test_a_note_that_is_being_sent_when_its_player_is_cancelled_is_kept_once(served: Served) -> None:
    async with Decathlon(served.url) as d, d.episode("find-answer") as e:
        with anyio.CancelScope() as scope:
            async with sending_notes(e) as sender:
                sender.add("the last words")
                while sender._waiting:  # pyright: ignore[reportPrivateUsage]
                    await anyio.lowlevel.checkpoint()
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert [note["text"] for note in notes(served, e)] == ["the last words"]


async def test_a_server_that_is_away_delays_grading_by_seconds_only(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("decathlon_client.notes.FLUSH_SECONDS", 0.2)
    messages = [{"role": "assistant", "content": f"turn {number}"} for number in range(3)]

    def play(relay: Relay) -> None:
        with sync.Decathlon(relay.url) as d, d.episode("find-answer") as e:
            anyio.from_thread.run(relay.refuse)
            send_notes(e, messages)
            assert f"Notes of episode {e.public_id} are lost" in caplog.text
            anyio.from_thread.run(relay.listen)
            assert e.evaluate().reward == 0.0

    async with relayed(served) as (relay, _):
        with anyio.fail_after(60):
            await anyio.to_thread.run_sync(play, relay)


async def test_a_finished_conversation_is_sent_with_its_places_and_never_raises(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "the prompt"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [{}]},
        {"role": "tool", "content": "a reply"},
        {"role": "assistant", "content": [{"type": "text", "text": "done"}]},
    ]
    async with Decathlon(served.url) as d:
        async with d.episode("find-answer") as e:
            await e.call("probe__write", {"path": "answer.txt", "text": "42"})
            await send_conversation(e, messages)
            kept = notes(served, e)
        await served.find(e.id).state.reach(Phase.ENDED)
        await send_conversation(e, messages)
    assert [(note["text"], note["calls"]) for note in kept] == [("hm", 0), ("done", 1)]
    assert f"Notes of episode {e.public_id} are lost" in caplog.text
