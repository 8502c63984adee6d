"""The trajectory of an episode: lines that are appended, found and read again."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.grading.attempt import RecordedCalls
from decathlon_mcp.storage.trajectory import (
    MAX_SKIPPED_CALLS,
    LoggedKey,
    Trajectory,
)
from decathlon_mcp.types import JsonObject
from tests.storage.trajectories import events

CALL: dict[str, Any] = {
    "server": "files",
    "tool": "read",
    "name": "files__read",
    "arguments": {"path": "a"},
    "started_at": 1.0,
}
REPLY: dict[str, Any] = {"failed": False, "seconds": 0.5, "result": {"content": []}}


def new(folder: Path, **options: Any) -> Trajectory:
    return Trajectory(folder / "one", **options).create()


def numbers(trajectory: Trajectory) -> list[int]:
    return [lines.seq for lines in trajectory.sent_calls()]


def fill(trajectory: Trajectory) -> list[JsonObject]:
    """Calls in the order 1, 2, 3 (never sent), 4, of which 2 has no reply and 4 failed."""
    trajectory.add("start", labels={"arguments": "x"})
    trajectory.add("call", seq=1, operation="a", digest="00", request=1, **CALL)
    trajectory.add("call", seq=2, request=2, **{**CALL, "tool": "write", "arguments": {"text": "\ud800"}})
    trajectory.add("accepted", seq=3, operation="c", digest="03", name="files__read", arguments=None)
    trajectory.add("reply", seq=1, **REPLY)
    trajectory.add("reply", seq=3, failed=True, seconds=9.0, failure={"code": "x", "message": "over"})
    trajectory.add("note", calls=2, role="assistant", text="hm")
    trajectory.add("accepted", seq=4, operation="d", digest="04", **CALL)
    trajectory.add("call", seq=4, request=3, operation="d", digest="04", **CALL)
    trajectory.add("joined", seq=2, operation="b", digest="01")
    trajectory.add("reply", seq=4, failed=True, seconds=2.0, error={"message": "no"})
    trajectory.add("claim", answer="x")
    return events(trajectory)


def known(trajectory: Trajectory) -> tuple[object, ...]:
    index = trajectory.index
    counts = index.sent, index.answered, index.failed, index.last, index.tools, len(index.notes)
    return (*counts, index.notes_bytes, index.placed, [index.places(seq) for seq in range(6)])


def test_who_appends_and_all_who_read_know_the_same(tmp_path: Path) -> None:
    with closing(new(tmp_path)) as writer:
        fill(writer)
        reader = Trajectory(writer.folder).update()
        with closing(Trajectory(writer.folder).reopen()) as again:
            logged = again.read_calls()
        assert known(writer) == known(reader) == known(again)
        assert known(writer)[:6] == (3, 2, 1, 4, {("files", "read"), ("files", "write")}, 1)
        assert [lines.seq for lines in writer.sent_calls()] == [1, 2, 4]
        assert list(writer.sent_calls()) == list(reader.sent_calls()) == list(again.sent_calls())
    assert list(logged.keys) == [
        LoggedKey("a", "00", 1),
        LoggedKey("c", "03", 3),
        LoggedKey("d", "04", 4),
        LoggedKey("b", "01", 2),
    ]
    assert [(line["seq"], line["arguments"]) for line in logged.unanswered] == [(2, {"text": "\ud800"})]


def test_lines_of_calls_that_are_made_again_are_removed_and_no_others(tmp_path: Path) -> None:
    with closing(new(tmp_path)) as trajectory:
        trajectory.add("ready", tools="0")
        for seq in (3, 1, 2):
            trajectory.add("call", seq=seq, arguments={"text": "x" * 10_000}, digest="00", operation=f"{seq}")
        trajectory.add("reply", seq=2, **REPLY)
        trajectory.add("difference", seq=2)
        trajectory.add("note", calls=1, text="hm")
        trajectory.remove_calls(2)
        logged = trajectory.read_calls()
        assert [line["event"] for line in events(trajectory)] == ["ready", "call", "note"]
        assert [key.seq for key in logged.keys] == [3]
        assert numbers(trajectory) == [3]


def test_lines_that_cannot_be_read_hide_no_others(tmp_path: Path) -> None:
    with closing(new(tmp_path)) as trajectory:
        trajectory.add("call", seq=1, **CALL)
    with trajectory.file.open("ab") as file:
        file.write(b'no JSON\n[1]\n{"event":"call","seq":"x"}\n{"event":"call","seq":-1}\n\xff\n')
        file.write(b'{"event":"call","seq":%d}\n' % (MAX_SKIPPED_CALLS + 9))
        file.write(b'{"event":"call","seq":3,"arguments":%b}\n' % (b"[" * 100_000))
        file.write(b'{"event":"call","seq":2,"too')
    for seqs, read in (
        # Whoever shows it has the beginning of the third one, and who continues it must have all of it.
        ([1, 3], lambda: Trajectory(trajectory.folder).update()),
        ([1], lambda: continued(trajectory.folder)),
    ):
        found = read()
        assert numbers(found) == seqs
        assert [call.seq for call in RecordedCalls(found.sent_calls())] == [1]
        assert len(found.index.calls) <= 3


def continued(folder: Path) -> Trajectory:
    with closing(Trajectory(folder).reopen()) as trajectory:
        assert [line["seq"] for line in trajectory.read_calls().unanswered] == [1]
        return trajectory


@pytest.mark.parametrize("torn", [b'{"event":"call","seq":9', b"x" * 2_000_000])
def test_a_torn_last_line_is_removed_when_it_is_continued(tmp_path: Path, torn: bytes) -> None:
    with closing(new(tmp_path)) as trajectory:
        trajectory.add("call", seq=1)
    with trajectory.file.open("ab") as file:
        file.write(torn)
    with closing(Trajectory(trajectory.folder).reopen()) as again:
        again.read_calls()
        again.add("call", seq=2)
        assert [event["seq"] for event in events(again, "call")] == numbers(again) == [1, 2]
    trajectory.file.write_bytes(torn)
    Trajectory(trajectory.folder).reopen().close()
    assert trajectory.file.read_bytes() == b""


FILL = """
import resource, sys
from pathlib import Path
from decathlon_mcp.storage.trajectory import Trajectory
trajectory = Trajectory(Path(sys.argv[1])).create()
assert trajectory.add("call", seq=1)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
assert not trajectory.add("call", seq=2, result="x" * 400_000)
assert trajectory.add("call", seq=3)
print([lines.seq for lines in trajectory.sent_calls()])
"""


def test_line_that_is_written_in_part_is_removed_and_later_lines_are_kept(tmp_path: Path) -> None:
    """A limit on the size of files makes write(2) stop in the middle of the line, as a full disk does."""
    folder = tmp_path / "one"
    program = [sys.executable, "-c", FILL, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[1, 3]\n"
    assert "a line of a trajectory is lost" in done.stderr
    assert [event["seq"] for event in events(folder, "call")] == [1, 3]
