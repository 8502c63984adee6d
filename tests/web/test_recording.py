"""The file of a recording: what it answers, its limits, and its summary."""

from __future__ import annotations

from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from decathlon_mcp.plugins.web.exchanges import (
    Counts,
    Headers,
    RequestKey,
    WebRequest,
    WebResponse,
    request_key,
)
from decathlon_mcp.plugins.web.recording import (
    Recording,
    RecordingError,
    RecordingFullError,
    RecordingId,
    Rollout,
    find_recordings,
    revisions,
)

ID = RecordingId("suite", "abc123", "a/task.")
LAUNCH_TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def recording(tmp_path: Path) -> Generator[Recording]:
    with Recording.create(tmp_path, ID, LAUNCH_TIME) as recording:
        yield recording


def key(path: str, **headers: str) -> RequestKey:
    return request_key(WebRequest("GET", f"http://a.example/{path}", Headers(tuple(headers.items()))))


def response(text: str, status: int = 200) -> WebResponse:
    return WebResponse(status, "OK", Headers((("Content-Type", "text/plain"),)), text.encode())


def body(found: WebResponse | None) -> str | None:
    return None if found is None else found.body.decode()


def rollout(episode: str, mode: str, requests: str, **counts: int) -> Rollout:
    return Rollout(episode, mode, requests, Counts(**counts), f"2026-01-01T00:00:0{episode}")


def test_parts_do_not_answer_each_other(recording: Recording) -> None:
    recording.add("grader", key("x"), 0, response("the answer"))
    assert recording.find("agent", key("x"), 0) is None
    assert body(recording.find("grader", key("x"), 0)) == "the answer"


def test_another_variant_answers_unless_it_is_a_part_of_the_page(recording: Recording) -> None:
    recording.add("agent", key("x", Accept="text/html"), 0, response("page"))
    recording.add("agent", key("x", Accept="text/turtle"), 0, response("data"))
    recording.add("agent", key("y", Range="bytes=0-3"), 0, response("part", 206))
    assert body(recording.find("agent", key("x", Accept="text/turtle"), 0)) == "data"
    assert body(recording.find("agent", key("x"), 0)) == "page"
    assert recording.find("agent", key("y"), 0) is None
    assert body(recording.find("agent", key("y", Range="bytes=0-3"), 0)) == "part"


def test_a_recording_does_not_grow_over_its_limit(tmp_path: Path) -> None:
    with Recording.create(tmp_path, ID, LAUNCH_TIME, max_bytes=10_000) as recording:
        recording.add("agent", key("x"), 0, response("x" * 6_000))
        with pytest.raises(RecordingFullError, match="is full"):
            recording.add("agent", key("y"), 0, response("y" * 6_000))
        recording.add("agent", key("z"), 0, response("small"))
        assert recording.summary().exchanges == 2


def test_the_first_launch_time_stays_and_is_read_again(recording: Recording, tmp_path: Path) -> None:
    with Recording.create(tmp_path, ID, datetime.now(UTC)) as again:
        assert (again.id, again.launch_time) == (ID, LAUNCH_TIME)
    assert list(find_recordings(tmp_path)) == [recording.path]
    assert revisions(tmp_path, ID.suite, ID.task) == [ID.revision]
    assert recording.path.stat().st_mode & 0o777 == 0o600


def test_the_rate_is_that_of_rollouts_which_differ_from_the_recorded_ones(recording: Recording) -> None:
    assert recording.summary().rate is None
    recording.add_rollout(rollout("1", "record", "requests", recorded=10))
    recording.add_rollout(rollout("2", "replay", "requests", replayed=10))
    assert recording.summary().rate is None
    recording.add_rollout(rollout("3", "replay", "others", replayed=8, missed=2))
    assert (recording.summary().rate, recording.summary().runnable) == (0.8, False)
    recording.add_rollout(rollout("4", "replay-or-record", "more", replayed=10))
    assert (recording.summary().rate, recording.summary().runnable) == (0.9, True)
    recording.add_rollout(rollout("5", "replay", "nothing"))
    assert recording.summary().rollouts == 5


def test_requests_without_a_response_are_counted_until_there_is_one(recording: Recording) -> None:
    recording.add_unanswered("agent", key("x?token=secret123"), 2)
    recording.add_unanswered("agent", key("x?token=secret123"), 1, "refused")
    recording.add_unanswered("grader", key("y"), 1)
    (first, second) = recording.unanswered()
    assert (first.url, first.count, first.failure) == ("http://a.example/x?token=REDACTED", 3, "refused")
    assert (second.part, second.count, second.failure) == ("grader", 1, "")
    assert recording.find_failure("agent", key("x?token=other1234")) == "refused"
    assert recording.find_failure("grader", key("y")) is None
    recording.add("agent", key("x?token=secret123"), 0, response("page"))
    assert recording.unanswered() == [second]
    recording.remove(part="grader")
    assert recording.unanswered() == []


def test_of_too_many_requests_without_a_response_the_failures_stay(
    recording: Recording, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decathlon_mcp.plugins.web.recording.MAX_UNANSWERED", 3)
    recording.add_unanswered("agent", key("failed"), 1, "refused")
    for number in range(5):
        recording.add_unanswered("agent", key(f"{number}"), 1)
    assert [each.url[-1] for each in recording.unanswered()] == ["3", "4", "d"]


def test_exchanges_are_removed_with_their_bodies(recording: Recording) -> None:
    for part in ("agent", "grader"):
        recording.add(part, key("x"), 0, response("same"))
    recording.add("agent", key("y"), 0, response("other"))
    assert recording.remove(part="agent", url_glob="http://a.example/x*") == 1
    assert [(each.part, each.url[-1]) for each in recording.exchanges()] == [("agent", "y"), ("grader", "x")]
    assert recording.remove() == 2
    assert recording.summary().body_bytes == 0


def test_a_file_that_is_no_recording_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "broken.sqlite"
    path.write_bytes(b"no database" * 1000)
    with pytest.raises(RecordingError, match=r"broken\.sqlite"):
        Recording(path)
    with pytest.raises(RecordingError, match=r"missing\.sqlite"):
        Recording(tmp_path / "missing.sqlite")
    empty = tmp_path / "empty.sqlite"
    empty.touch()
    with pytest.raises(RecordingError, match="not a recording"):
        Recording(empty)
