"""`recordings`: what is stored of the web, without a server."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.plugins.web.exchanges import Counts, WebRequest, WebResponse, request_key
from decathlon_mcp.plugins.web.recording import FOLDER, Recording, RecordingId, Rollout

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

LAUNCH_TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    state = tmp_path / "state"
    for revision in ("abc", "def"):
        record(state, RecordingId("suite", revision, "two"))
    record(state, RecordingId("suite", "abc", "find-paper"))
    return state


def record(state: Path, belongs_to: RecordingId) -> None:
    with Recording.create(state / FOLDER, belongs_to, LAUNCH_TIME) as recording:
        for part, path in (("agent", "a"), ("agent", "b"), ("grader", "a")):
            key = request_key(WebRequest("GET", f"http://127.0.0.1:1/{path}"))
            recording.add(part, key, 0, WebResponse(200, "OK", body=b"page"))  # type: ignore[arg-type]
        missed = request_key(WebRequest("GET", "http://127.0.0.1:1/missed?token=secret12"))
        recording.add_unanswered("agent", missed, 2)
        for episode, mode, counts in (
            ("1", "record", Counts(recorded=3)),
            ("2", "replay", Counts(replayed=3)),
        ):
            recording.add_rollout(Rollout(episode, mode, mode, counts, f"2026-01-0{episode}T00:00:00"))


def test_recordings_are_listed_with_their_rates(shell: Shell, state: Path) -> None:
    lines = shell.run("recordings", "list", "--state", str(state)).stdout.splitlines()
    assert [line.split("\t")[:2] for line in lines] == [
        ["suite:find-paper", "abc"],
        ["suite:two", "abc"],
        ["suite:two", "def"],
    ]
    assert lines[0].endswith("3 exchanges\t0.0 MiB\t100.0% of other rollouts' requests (runnable)")
    listed = json.loads(shell.run("recordings", "list", "--json", "--state", str(state)).stdout)["recordings"]
    assert (listed[0]["hit_rate"], listed[0]["launch_time"]) == (1.0, LAUNCH_TIME.isoformat())


def test_requests_without_an_answer_are_shown(shell: Shell, state: Path) -> None:
    done = shell.run("recordings", "show", "find-paper", "--state", str(state))
    assert "agent\tGET\t2 times\tmissed\thttp://127.0.0.1:1/missed?token=REDACTED\n" in done.stdout
    done = shell.run("recordings", "show", "find-paper", "--json", "--state", str(state))
    (request,) = json.loads(done.stdout)["unanswered"]
    assert (request["count"], request["failure"]) == (2, "")


def test_a_recording_is_shown_pruned_and_deleted(shell: Shell, state: Path) -> None:
    def show() -> list[tuple[str, str]]:
        done = shell.run("recordings", "show", "find-paper", "--json", "--state", str(state))
        return [(each["part"], each["url"][-1]) for each in json.loads(done.stdout)["exchanges"]]

    assert show() == [("agent", "a"), ("agent", "b"), ("grader", "a")]
    text = shell.run("recordings", "show", "suite:find-paper", "--state", str(state)).stdout
    assert "agent\tGET\t200\t4\thttp://127.0.0.1:1/a" in text
    assert "3 replayed" in text
    prune = ("recordings", "prune", "find-paper", "--state", str(state))
    assert shell.run(*prune, "--url", "*/a", "--part", "agent").stdout == "deleted 1 exchanges\n"
    assert show() == [("agent", "b"), ("grader", "a")]
    shell.environment["DECATHLON_URL"] = "http://127.0.0.1:8765"  # of a server, not of what was recorded
    assert shell.run(*prune).stdout.startswith("deleted /")
    assert "there is no recording of 'find-paper'" in shell.error(*prune, status=1)
    assert "preprocess, agent or grader" in shell.error(*prune, "--part", "x", status=1)


def test_a_task_with_recordings_of_several_revisions_needs_one_of_them(shell: Shell, state: Path) -> None:
    assert "--revision" in shell.error("recordings", "show", "two", "--state", str(state), status=1)
    done = shell.run("recordings", "show", "two", "--revision", "d", "--state", str(state))
    assert "suite:two\tdef" in done.stdout


def test_sites_that_are_gone_differ_from_the_recording(shell: Shell, state: Path) -> None:
    error = shell.run("recordings", "compare", "find-paper", "--state", str(state))
    assert error.returncode == 1
    assert "2 unreachable" in error.stdout
