"""A recording as a HAR file, read by mitmproxy's own reader."""

from __future__ import annotations

import json
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from decathlon_mcp.plugins.web.exchanges import Headers, WebRequest, WebResponse, request_key
from decathlon_mcp.plugins.web.proxy import find_program
from decathlon_mcp.plugins.web.recording import FOLDER, Recording, RecordingId
from tests.web.running import needs_mitmdump

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

pytestmark = pytest.mark.slow

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


def record(state: Path) -> None:
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
    record(tmp_path / "state")
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


def test_a_file_that_exists_is_not_overwritten(shell: Shell, exported: Path, tmp_path: Path) -> None:
    state = ("--state", str(tmp_path / "state"))
    before = exported.read_bytes()
    assert "File exists; name a new file" in shell.error(
        "recordings", "export", "task", str(exported), *state, status=1
    )
    assert exported.read_bytes() == before
    printed = shell.run("recordings", "export", "task", *state).stdout
    assert json.loads(printed) == json.loads(before)
