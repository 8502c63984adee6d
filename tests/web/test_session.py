"""Sessions: which requests are answered from the recording, and which responses are recorded."""

from __future__ import annotations

from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.plugins.web.exchanges import Counts, Mode, Part, WebRequest, WebResponse
from decathlon_mcp.plugins.web.recording import Recording, RecordingId
from decathlon_mcp.plugins.web.sandbox_session import (
    MISSED_STATUS,
    UNREACHABLE_STATUS,
    PendingExchange,
    Session,
    SharedRecording,
)

pytestmark = pytest.mark.anyio

PAGE = WebRequest("GET", "http://a.example/page")


@pytest.fixture
def recording(tmp_path: Path) -> Generator[Recording]:
    id = RecordingId("suite", "1", "task")  # noqa: A001
    with Recording.create(tmp_path, id, datetime.now(UTC), max_bytes=100_000) as recording:
        yield recording


def session(
    recording: Recording, mode: Mode, *, part: Part = "agent", shared: SharedRecording | None = None
) -> Session:
    shared = shared or SharedRecording(recording.path, max_bytes=100_000)
    return Session("id", mode, part, shared, max_response_bytes=1000)


async def record(session: Session, body: str | None, status: int = 200, request: WebRequest = PAGE) -> None:
    """Make a request that the site has to answer, and answer it."""
    pending = await session.answer(request)
    assert isinstance(pending, PendingExchange)
    await session.store(pending, None if body is None else WebResponse(status, "", body=body.encode()))


async def body(session: Session, request: WebRequest = PAGE) -> str:
    answer = await session.answer(request)
    assert isinstance(answer, WebResponse)
    return answer.body.decode()


async def test_each_sandbox_gets_what_was_recorded_in_the_same_order(recording: Recording) -> None:
    first = session(recording, "record")
    for text in ("one", "two"):
        await record(first, text)
    for _ in range(2):
        replay = session(recording, "replay")
        assert [await body(replay) for _ in range(3)] == ["one", "two", "two"]
        assert replay.counts == Counts(replayed=3)
    assert first.counts == Counts(recorded=2)


async def test_a_request_without_a_recording_gets_an_error_that_explains(recording: Recording) -> None:
    replay = session(recording, "replay")
    answer = await replay.answer(WebRequest("GET", "http://a.example/?key=abcdefgh123"))
    assert isinstance(answer, WebResponse)
    text = answer.body.decode()
    assert answer.status == MISSED_STATUS
    assert "has no response to\nGET http://a.example/?key=REDACTED" in text
    assert answer.headers.get("decathlon-web") == "missed"
    assert replay.counts == Counts(missed=1)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("busy", 429),
        (None, 200),
        ("x" * 1001, 200),
        ("", 101),
    ],
)
async def test_temporary_failures_streams_and_long_responses_are_not_recorded(
    recording: Recording, text: str | None, status: int
) -> None:
    first = session(recording, "record")
    await record(first, text, status)
    assert first.counts == Counts(passed=1)
    assert recording.exchanges() == []


async def test_a_full_recording_is_a_problem_and_not_an_error(recording: Recording) -> None:
    first = session(recording, "record")
    for number in range(100):
        request = WebRequest("GET", f"http://a.example/{number}")
        await record(first, f"{number}" * 400, request=request)
    assert 0 < first.counts.recorded < 100
    assert first.counts.recorded + first.counts.passed == 100
    assert "is full" in first.problem


async def test_sandboxes_that_ask_for_the_same_at_once_ask_the_site_once(recording: Recording) -> None:
    shared = SharedRecording(recording.path, max_bytes=100_000)
    sessions = [session(recording, "replay-or-record", shared=shared) for _ in range(5)]
    pending = await sessions[0].answer(PAGE)
    assert isinstance(pending, PendingExchange)
    texts: list[str] = []

    async def ask(other: Session) -> None:
        texts.append(await body(other))

    async with anyio.create_task_group() as tasks:
        for other in sessions[1:]:
            tasks.start_soon(ask, other)
        await anyio.wait_all_tasks_blocked()
        assert texts == []
        await sessions[0].store(pending, WebResponse(200, body=b"page"))
    assert texts == ["page"] * 4
    assert [each.counts for each in sessions] == [Counts(recorded=1)] + [Counts(replayed=1)] * 4


async def test_a_site_that_could_not_be_reached_fails_again_in_a_replay(recording: Recording) -> None:
    first, second = session(recording, "record"), session(recording, "replay-or-record")
    for each in (first, second):
        pending = await each.answer(PAGE)
        assert isinstance(pending, PendingExchange)
        await each.fail(pending, "a.example cannot be resolved")
    assert (first.counts, second.counts) == (Counts(missed=1), Counts(replayed=1))
    replay = session(recording, "replay")
    answer = await replay.answer(PAGE)
    assert isinstance(answer, WebResponse)
    assert (answer.status, replay.counts) == (UNREACHABLE_STATUS, Counts(replayed=1))
    assert b"while this was recorded: a.example cannot be resolved" in answer.body
    assert "has no response" in await body(session(recording, "replay", part="grader"))
    await record(session(recording, "record"), "page")
    assert await body(session(recording, "replay")) == "page"


async def test_reports_of_use_are_accepted_without_the_site_and_not_counted(recording: Recording) -> None:
    each = session(recording, "replay-or-record")
    for host in ("mobile.events.data.microsoft.com", "www.google-analytics.com.", "clients2.google.com:443"):
        answer = await each.answer(WebRequest("POST", f"https://{host}/collect", body=b"{}"))
        assert isinstance(answer, WebResponse)
        assert answer.status == 204
    assert (each.counts, len(each.keys)) == (Counts(), 0)
    answer = await each.answer(WebRequest("GET", "https://notapi.segment.io.example/"))
    assert isinstance(answer, PendingExchange) or answer.status == MISSED_STATUS
