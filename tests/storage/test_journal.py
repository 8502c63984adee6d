"""The journal of an episode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from decathlon_mcp.storage.disk import DiskSpace
from decathlon_mcp.storage.journal import VERDICT_BYTES, Journal
from decathlon_mcp.storage.logged_calls import NOT_KEPT, UNANSWERED, CallPositions, LoggedKey, Positions
from tests.storage.journals import kill


def test_events_are_read_back_as_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "episodes" / "one")
    journal.add("call", seq=1, result={"text": "ü\n\ud800"})
    journal.add("claim", answer=None)
    journal.add("call", seq=2, result=None)
    assert [event["seq"] for event in journal.events("call")] == [1, 2]
    assert next(journal.events("call"))["result"]["text"] == "ü\n\ud800"
    journal.close()


def test_event_added_after_close_is_dropped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    journal.add("call", seq=1)
    journal.close()
    journal.add("call", seq=2)
    assert [event["seq"] for event in journal.events("call")] == [1]


def test_folder_is_private_to_its_owner(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    assert journal.folder.stat().st_mode & 0o077 == 0
    journal.close()


def test_truncated_line_is_skipped(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    with (journal.folder / "trajectory.jsonl").open("ab") as trajectory:
        trajectory.write(b'{"event": "call", "seq": 1\n[1]\n')
    journal.add("call", seq=2)
    assert [event["seq"] for event in journal.events("call")] == [2]
    journal.close()


FILL = """
import json, resource, sys
from pathlib import Path
from decathlon_mcp.storage.journal import Journal
from decathlon_mcp.storage.logged_calls import NOT_KEPT, Positions
journal = Journal(Path(sys.argv[1]))
first = journal.add_call(seq=1, result="first")
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
assert journal.add_call(seq=2, result="x" * 400_000) == NOT_KEPT
third = journal.add_call(seq=3, result="third")
kept = [Positions(first, first), Positions(NOT_KEPT, NOT_KEPT), Positions(third, third)]
print(json.dumps([event["seq"] for event in journal.calls_at(kept)]))
journal.write_verdict({"reward": 1.0})
"""


def test_line_that_is_written_in_part_is_removed_and_later_lines_are_kept(tmp_path: Path) -> None:
    """A limit on the size of files makes write(2) stop in the middle of the line, as a full disk does."""
    folder = tmp_path / "one"
    program = [sys.executable, "-c", FILL, str(folder)]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout) == [1, 3]
    assert "a line of a trajectory is lost" in done.stderr
    lines = (folder / "trajectory.jsonl").read_text().splitlines()
    assert [json.loads(line)["seq"] for line in lines] == [1, 3]
    assert json.loads((folder / "verdict.json").read_text()) == {"reward": 1.0}


def test_calls_over_the_limit_are_not_kept_and_other_events_are(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one", max_calls_bytes=1000)
    positions = [journal.add_call(seq=seq, result="x" * 300) for seq in range(1, 5)]
    assert positions[2:] == [NOT_KEPT, NOT_KEPT]
    journal.add("claim", answer="y" * 2000)
    kept = [Positions(position, NOT_KEPT) for position in positions]
    assert [event["seq"] for event in journal.calls_at(kept)] == [1, 2]
    assert len(next(journal.events("claim"))["answer"]) == 2000
    journal.close()


def test_large_logs_do_not_grow_while_the_disk_is_nearly_full(tmp_path: Path) -> None:
    disk = DiskSpace(tmp_path, floor_bytes=1 << 60)
    journal = Journal(tmp_path / "one", disk=disk)
    assert journal.add_call(seq=1, result="x" * 500_000) != NOT_KEPT
    assert journal.add_call(seq=2, result="x" * 600_000) == NOT_KEPT
    assert journal.add_call(seq=3, result="x") != NOT_KEPT
    journal.close()


def test_calls_are_read_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    journal, positions = Journal(tmp_path / "one"), CallPositions()
    for seq in (3, 1, 5):
        positions.set_call(seq, journal.add_call(seq=seq))
    assert [event["seq"] for event in journal.calls_at(positions.snapshot())] == [1, 3, 5]
    journal.close()


def test_room_for_the_verdict_is_reserved_and_given_back(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    (reserved,) = journal.folder.glob(".verdict*")
    assert reserved.stat().st_blocks * 512 >= VERDICT_BYTES
    journal.close()
    assert [file.name for file in journal.folder.iterdir()] == ["trajectory.jsonl"]


def test_verdict_is_replaced_atomically(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one")
    journal.write_verdict({"reward": 1.0})
    journal.write_verdict({"reward": 0.0})
    assert json.loads((tmp_path / "one" / "verdict.json").read_text()) == {"reward": 0.0}
    assert sorted(file.name for file in journal.folder.iterdir()) == ["trajectory.jsonl", "verdict.json"]
    journal.close()


def test_a_call_and_its_reply_are_read_as_one(tmp_path: Path) -> None:
    journal, positions = Journal(tmp_path / "one"), CallPositions()
    for seq in (1, 2, 3):
        positions.set_call(seq, journal.add_call(seq=seq, name=f"tool{seq}", arguments={"text": "\ud800"}))
    positions.set_reply(2, journal.add_reply(seq=2, failed=False, seconds=0.5, result={"content": []}))
    error = {"code": -32602, "message": "no"}
    positions.set_reply(1, journal.add_reply(seq=1, failed=True, seconds=0.5, error=error))
    first, second, third = journal.calls_at(positions)
    assert (first["name"], first["result"], first["failed"]) == ("tool1", {"error": error}, True)
    assert (second["name"], second["result"], second["failed"]) == ("tool2", {"content": []}, False)
    assert (third["name"], third["result"], third["failed"]) == ("tool3", {"error": UNANSWERED}, True)
    journal.close()


def test_a_reopened_journal_continues_the_lines_and_the_room_for_the_verdict(tmp_path: Path) -> None:
    first = Journal(tmp_path / "one", max_calls_bytes=1000)
    first.add_call(seq=1, result="x" * 500)
    with closing(first), closing(Journal.reopen(tmp_path / "one", max_calls_bytes=1000)) as again:
        assert again.add_call(seq=2, result="x" * 500) == NOT_KEPT
        reply = again.line_at(again.add_reply(seq=1, failed=False)) or {}
        assert (reply["event"], reply["seq"]) == ("reply", 1)
        (reserved,) = again.folder.glob(".verdict*")
        assert reserved.stat().st_blocks * 512 >= VERDICT_BYTES
        again.write_verdict({"reward": 1.0})
    with closing(Journal.reopen(tmp_path / "one")) as final:
        assert sorted(file.name for file in final.folder.iterdir()) == ["trajectory.jsonl", "verdict.json"]


@pytest.mark.parametrize("torn", [b"{", b'{"event": "call", "seq": 9', b"x" * 200_000, b""])
def test_a_torn_last_line_is_removed_when_the_journal_is_reopened(tmp_path: Path, torn: bytes) -> None:
    folder, trajectory = tmp_path / "one", tmp_path / "one" / "trajectory.jsonl"
    with closing(Journal(folder)) as journal:
        journal.add("call", seq=1)
    with trajectory.open("ab") as file:
        file.write(torn)
    (folder / "traj_log.partial").write_bytes(b"half")
    with closing(Journal.reopen(folder)) as again:
        again.add("call", seq=2)
        assert [event["seq"] for event in again.events("call")] == [1, 2]
        assert not list(folder.glob("*.partial"))
    trajectory.write_bytes(torn)
    Journal.reopen(folder).close()
    assert trajectory.read_bytes() == b""


def without_line(number: int) -> Callable[[bytes], bytes]:
    def remove(data: bytes) -> bytes:
        lines = data.splitlines(keepends=True)
        del lines[number]
        return b"".join(lines)

    return remove


CHANGES: list[tuple[Callable[[bytes], bytes], str | None]] = [
    (lambda data: data, None),
    (lambda data: data + b'{"event": "call", "torn', None),
    (lambda data: data + b'{"event": "call", "seq": 9}\n', None),
    (lambda data: data[:200], "bytes of 5"),
    (lambda data: b"", "bytes of 5"),
    (without_line(0), "bytes of 5"),
    (without_line(1), "bytes of 5"),
    (without_line(-1), "bytes of 5"),
    (lambda data: data.replace(b"xxx", b"xyx", 1), "other bytes than were written"),
    (lambda data: data.replace(b"xxx", b"\0\0\0", 1), "other bytes than were written"),
    (lambda data: data.replace(b"xxx", b"x\nx", 1), "other bytes than were written"),
    (lambda data: data[:300] + bytes(4096) + data[300:], "other bytes than were written"),
]


@pytest.mark.parametrize(("change", "damage"), CHANGES)
def test_lines_that_are_missing_or_were_changed_before_a_journal_is_reopened_are_noticed(
    tmp_path: Path, change: Callable[[bytes], bytes], damage: str | None
) -> None:
    trajectory = tmp_path / "one" / "trajectory.jsonl"
    journal = Journal(tmp_path / "one")
    for seq in range(1, 5):
        journal.add_call(seq=seq, text="x" * 1250)
    kill(journal)
    trajectory.write_bytes(change(trajectory.read_bytes()))
    # Also by the server after the next one.
    for _ in range(2):
        again = Journal.reopen(tmp_path / "one")
        found = again.read_calls().damage
        assert (found is None) == (damage is None)
        assert (damage or "") in (found or "")
        again.add_call(seq=10, text="x")
        kill(again)


def test_journal_that_was_changed_while_it_is_open_is_damaged(tmp_path: Path) -> None:
    with closing(Journal(tmp_path / "one")) as journal:
        journal.add_call(seq=1)
        assert journal.damage() is None
        trajectory = tmp_path / "one" / "trajectory.jsonl"
        os.truncate(trajectory, 10)
        assert journal.damage() == f"it has 10 bytes of {journal.add_call(seq=2)} that were written"
        trajectory.unlink()
        assert journal.damage() == "it cannot be read: No such file or directory"


def test_calls_are_read_back_with_their_operations_and_those_without_a_reply(tmp_path: Path) -> None:
    call = {"server": "files", "name": "files__read", "started_at": 1.0}
    with closing(Journal(tmp_path / "one")) as journal:
        first = journal.add_call(seq=1, tool="read", operation="a", digest="00", request=1, **call)
        second = journal.add_call(seq=2, tool="write", request=2, arguments={"text": "\ud800"}, **call)
        reply = journal.add_reply(seq=1, failed=True, failure={"code": "call_timeout"})
        journal.add_joined(seq=2, operation="b", digest="01")
        journal.add("claim", answer="x")
    with (journal.folder / "trajectory.jsonl").open("ab") as file:
        file.write(b'no JSON\n[1]\n{"event": "call", "seq": "x"}\n')
    with closing(Journal.reopen(journal.folder)) as again:
        logged = again.read_calls()
    assert (logged.last, logged.calls, logged.failed) == (2, 2, 1)
    assert logged.tools == {("files", "read"), ("files", "write")}
    assert list(logged.positions) == [
        Positions(first, reply),
        Positions(second, NOT_KEPT),
    ]
    assert list(logged.keys) == [LoggedKey("a", "00", 1), LoggedKey("b", "01", 2)]
    assert [(line["seq"], line["arguments"]) for line in logged.unanswered] == [(2, {"text": "\ud800"})]
