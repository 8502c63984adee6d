"""`RequestLog`: what is kept, what a later server finds after any end, and the size of the file."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import pytest

from decathlon_mcp.storage import request_log as request_log_module
from decathlon_mcp.storage.request_log import FOLDER, RequestLog, RequestRow


def test_requests_are_kept_until_they_are_forgotten(tmp_path: Path) -> None:
    with closing(RequestLog(tmp_path, "me")) as log:
        rows = [RequestRow("s", str(number), b'{\n"id": %d}' % number) for number in range(4)]
        for row in [*rows, RequestRow("other", '"a"', b"{}")]:
            log.insert(row)
        log.mark_answered([("s", "1"), ("s", "9"), ("nobody", "1")])
        log.forget([("s", "0"), ("s", "9")])
        log.insert(RequestRow("s", "3", b"again"))
        assert log.rows("s") == [
            RequestRow("s", "1", rows[1].message, answered=True),
            rows[2],
            RequestRow("s", "3", b"again"),
        ]
        log.forget_session("s")
        assert log.rows("s") == []
        assert log.rows("other") == [RequestRow("other", '"a"', b"{}")]
        log.forget_session("other")
    assert list((tmp_path / FOLDER).iterdir()) == []


@pytest.mark.parametrize(
    "damage", [b'["+","s","2",0,"4"]\nbody\n', b'["+","s","2",0,-9]\n', b'["-",7]\n', b"\0\n"]
)
def test_what_is_before_the_damage_of_a_file_is_found(tmp_path: Path, damage: bytes) -> None:
    dead = RequestLog(tmp_path, "dead")
    dead.insert(RequestRow("s", "1", b"first"))
    with (tmp_path / FOLDER / "dead.log").open("ab") as file:
        file.write(damage)
    with closing(dead), closing(RequestLog(tmp_path, "me")) as log:
        log.adopt(["dead"])
        assert log.rows("s") == [RequestRow("s", "1", b"first")]


def test_a_later_server_finds_what_a_killed_one_has_written_completely(tmp_path: Path) -> None:
    """The file is cut at every byte, as though the server had been killed there."""
    dead = RequestLog(tmp_path, "dead")
    dead.insert(RequestRow("s", "1", b"first\n"))
    sizes = [dead_size := (tmp_path / FOLDER / "dead.log").stat().st_size]
    dead.insert(RequestRow("s", "2", b"second"))
    sizes.append((tmp_path / FOLDER / "dead.log").stat().st_size)
    dead.mark_answered([("s", "1")])
    sizes.append((tmp_path / FOLDER / "dead.log").stat().st_size)
    dead.forget([("s", "1")])
    data = (tmp_path / FOLDER / "dead.log").read_bytes()
    first, second = RequestRow("s", "1", b"first\n"), RequestRow("s", "2", b"second")
    answered = RequestRow("s", "1", b"first\n", answered=True)
    states = [[], [first], [first, second], [answered, second], [second]]
    for size in range(len(data) + 1):
        (tmp_path / FOLDER / "dead.log").write_bytes(data[:size])
        with closing(RequestLog(tmp_path, f"heir-{size}")) as heir:
            heir.adopt(["dead", "unknown"])
            whole = sum(size >= end for end in sizes) + (size == len(data))
            # The line feed after a body is not needed to read it.
            assert heir.rows("s") in (states[whole], states[min(whole + 1, 4)]), size
            assert not (tmp_path / FOLDER / "dead.log").exists()
    assert dead_size > 0
    os.close(dead._descriptor)  # pyright: ignore[reportPrivateUsage]


def test_a_server_that_starts_again_under_its_name_has_its_requests(tmp_path: Path) -> None:
    row = RequestRow("s", "1", b"{}")
    with closing(RequestLog(tmp_path, "me")) as log:
        log.insert(row)
    with closing(RequestLog(tmp_path, "me")) as log:
        assert log.rows("s") == [row]


def test_the_file_does_not_grow_with_requests_that_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_log_module, "MIN_REWRITE_BYTES", 10_000)
    kept = RequestRow("s", "kept", b"k" * 1000)
    with closing(RequestLog(tmp_path, "me")) as log:
        log.insert(kept)
        log.mark_answered([("s", "kept")])
        for number in range(200):
            log.insert(RequestRow("s", str(number), b"x" * 1000))
            log.forget([("s", str(number))])
            assert (tmp_path / FOLDER / "me.log").stat().st_size < 20_000
        assert log.rows("s") == [RequestRow("s", "kept", kept.message, answered=True)]
    with closing(RequestLog(tmp_path, "heir")) as heir:
        heir.adopt(["me"])
        assert heir.rows("s") == [RequestRow("s", "kept", kept.message, answered=True)]


def test_a_request_that_the_disk_refuses_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(RequestLog(tmp_path, "me")) as log:
        log.insert(RequestRow("s", "1", b"{}"))
        with monkeypatch.context() as patch:
            write = os.write

            def refuse(descriptor: int, data: bytes) -> int:
                if len(data) > 10:
                    return write(descriptor, bytes(data[:10]))
                raise OSError(28, "No space left on device")

            patch.setattr(request_log_module.os, "write", refuse)
            log.insert(RequestRow("s", "2", b"y" * 15))
        log.insert(RequestRow("s", "3", b"{}"))
    with closing(RequestLog(tmp_path, "heir")) as heir:
        heir.adopt(["me"])
        assert [row.request for row in heir.rows("s")] == ["1", "3"]
