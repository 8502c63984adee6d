"""`recordings`: what is stored of the web, without a server, and as a HAR file."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.plugins.web.exchanges import Counts, Headers, WebRequest, WebResponse, request_key
from decathlon_mcp.plugins.web.proxy import find_program
from decathlon_mcp.plugins.web.recording import FOLDER, Recording, RecordingId, Rollout
from tests.cli.conftest import Shell
from tests.web.running import needs_mitmdump

pytestmark = pytest.mark.slow


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


URL = "https://a.example:8443/search?q=a+b&q=&token=REDACTED"


BODY = bytes(range(256))


READ = """
import json, sys
from mitmproxy import ctx

class Reader:
    def load(self, loader):
        self.flows = []
    def response(self, flow):
        response = flow.response
        self.flows.append({
            "method": flow.request.method, "url": flow.request.url, "status": response.status_code,
            "headers": list(response.headers.items(multi=True)), "body": response.raw_content.hex()})
    def done(self):
        print("FLOWS " + json.dumps(self.flows), flush=True)

addons = [Reader()]
"""


def record_in_a_file(state: Path) -> None:
    headers = Headers((("Content-Type", "image/png"), ("Link", "a"), ("Link", "b"), ("X", "\udcff")))
    with Recording.create(
        state / FOLDER, RecordingId("suite", "abc", "task"), datetime.now(UTC)
    ) as recording:
        for number in range(2):
            key = request_key(WebRequest("POST", URL, body=b"secret body"))
            recording.add("agent", key, number, WebResponse(200, "OK", headers, BODY + b"%d" % number))
        moved = Headers((("Location", "/new"),))
        key = request_key(WebRequest("GET", "http://a.example/old"))
        recording.add("grader", key, 0, WebResponse(301, "Moved", moved))


@pytest.fixture
def exported(shell: Shell, tmp_path: Path) -> Path:
    record_in_a_file(tmp_path / "state")
    file = tmp_path / "recording.har"
    done = shell.run("recordings", "export", "task", str(file), "--state", str(tmp_path / "state"))
    assert done.stdout == f"wrote 3 exchanges to {file}\n", done.stderr
    return file


@needs_mitmdump
def test_mitmproxy_reads_what_was_recorded(exported: Path, tmp_path: Path) -> None:
    script = tmp_path / "reader.py"
    script.write_text(READ)
    command = [
        find_program(None),
        "--quiet",
        "--no-server",
        "--rfile",
        str(exported),
        "--scripts",
        str(script),
    ]
    settings = ["--set", f"confdir={tmp_path}", "--set", "rfile_loop=false"]
    done = subprocess.run([*command, *settings], capture_output=True, text=True, timeout=60, check=True)
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("FLOWS "))
    first, second, moved = json.loads(line.removeprefix("FLOWS "))
    assert (first["method"], first["url"], first["status"]) == ("POST", URL, 200)
    assert [pair for pair in first["headers"] if pair[0] == "Link"] == [["Link", "a"], ["Link", "b"]]
    assert [bytes.fromhex(flow["body"]) for flow in (first, second)] == [BODY + b"0", BODY + b"1"]
    assert (moved["url"], moved["status"], moved["body"]) == ("http://a.example/old", 301, "")


def test_the_file_has_the_members_of_the_format(exported: Path) -> None:
    assert exported.stat().st_mode & 0o777 == 0o600
    text = exported.read_text()
    log: dict[str, Any] = json.loads(text)["log"]
    assert (log["version"], log["creator"]["name"]) == ("1.2", "decathlon-mcp")
    first, _, moved = log["entries"]
    assert first["request"]["queryString"] == [
        {"name": "q", "value": "a b"},
        {"name": "q", "value": ""},
        {"name": "token", "value": "REDACTED"},
    ]
    assert first["response"]["content"]["size"] == len(BODY) + 1
    assert moved["response"]["redirectURL"] == "/new"
    assert [(entry["_part"], entry["_number"]) for entry in log["entries"]] == [
        ("agent", 0),
        ("agent", 1),
        ("grader", 0),
    ]
    assert {"cache", "timings", "time", "startedDateTime"} <= set(first)
    assert "secret body" not in text
