"""The lock by which a server recognises what dead servers left behind."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.storage.instance import (
    ALIVE_SECONDS,
    MAX_DEAD_SERVERS,
    InstanceLock,
    Successor,
    count_running_servers,
    instance_lock,
)

PROCESSES, STARTS = 20, 1_000
WORKER = """
import pathlib, random, sys, time
from decathlon_mcp.storage.instance import instance_lock

wrong = failed = 0
for _ in range(int(sys.argv[2])):
    try:
        with instance_lock(pathlib.Path(sys.argv[1])) as lock:
            wrong += len(lock.dead)
            time.sleep(random.random() * 0.004)
    except Exception:
        failed += 1
print(wrong, failed)
"""
HOLDER = """
import pathlib, sys, time
from decathlon_mcp.storage.instance import instance_lock

with instance_lock(pathlib.Path(sys.argv[1]), ["host"]) as lock:
    print(lock.name, flush=True)
    time.sleep(600)
"""


def dead_server(state: Path, name: str = "abc", **record: Any) -> Path:
    file = state / "servers" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(record) if record else "")
    return file


def test_concurrent_starts_neither_fail_nor_take_a_live_server_for_dead(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", WORKER, str(tmp_path), str(STARTS // PROCESSES)]
    workers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    assert [worker.communicate()[0].split() for worker in workers] == [["0", "0"]] * PROCESSES
    assert list((tmp_path / "servers").iterdir()) == []


def test_running_server_is_not_listed_as_dead(tmp_path: Path) -> None:
    with instance_lock(tmp_path) as first, instance_lock(tmp_path) as second:
        assert second.dead == []
        assert first.name != second.name
        for file in (tmp_path / "servers").iterdir():
            assert file.stat().st_mode & 0o777 == 0o600


def test_killed_server_is_dead_and_only_one_server_takes_it_over(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    name = holder.stdout.readline().strip()
    with instance_lock(tmp_path, ["host"]) as lock:
        assert lock.dead == []
    holder.kill()
    holder.communicate()
    with instance_lock(tmp_path, ["host"]) as first, instance_lock(tmp_path, ["host"]) as second:
        assert (first.dead, second.dead) == ([name], [])


def test_server_that_ended_by_itself_leaves_no_file(tmp_path: Path) -> None:
    with instance_lock(tmp_path):
        pass
    assert list((tmp_path / "servers").iterdir()) == []


def test_dead_server_is_listed_until_it_is_forgotten(tmp_path: Path) -> None:
    dead_server(tmp_path)
    with instance_lock(tmp_path) as lock:
        assert lock.dead == ["abc"]
    with instance_lock(tmp_path) as lock:
        assert lock.dead == ["abc"]
        lock.forget("abc")
    with instance_lock(tmp_path) as lock:
        assert lock.dead == []


def test_dead_server_with_a_provider_that_this_server_lacks_is_left_to_another(tmp_path: Path) -> None:
    dead_server(tmp_path, providers=["docker"])
    with instance_lock(tmp_path, ["host"]) as lock:
        assert lock.dead == []
        with instance_lock(tmp_path, ["docker", "host"]) as other:
            assert other.dead == ["abc"]


def test_server_of_another_machine_is_not_taken_for_dead(tmp_path: Path) -> None:
    """On a network file system, locks can be local to each machine."""
    with instance_lock(tmp_path) as lock:
        own = json.loads((tmp_path / "servers" / lock.name).read_text())
    dead_server(tmp_path, "elsewhere", **{**own, "host": "other", "boot": "other"})
    dead_server(tmp_path, "rebooted", **{**own, "boot": "earlier"})
    dead_server(tmp_path, "renamed", **{**own, "host": "container-of-this-machine"})
    with instance_lock(tmp_path) as lock:
        assert lock.dead == ["rebooted", "renamed"]


@pytest.mark.parametrize("content", ["", "[" * 5000, "null", "[]", '{"host": 7, "providers": 7}', "\0"])
def test_record_that_cannot_be_read_is_that_of_a_dead_server(tmp_path: Path, content: str) -> None:
    dead_server(tmp_path).write_text(content)
    with instance_lock(tmp_path) as lock:
        assert lock.dead == ["abc"]


def test_file_under_a_temporary_name_is_no_server_and_is_removed_when_old(tmp_path: Path) -> None:
    new, old = dead_server(tmp_path, ".new"), dead_server(tmp_path, ".old")
    os.utime(old, (1, 1))
    with instance_lock(tmp_path) as lock:
        assert lock.dead == []
    assert (new.exists(), old.exists()) == (True, False)


def test_entries_that_are_no_lock_files_are_ignored(tmp_path: Path) -> None:
    servers = tmp_path / "servers"
    (servers / "folder").mkdir(parents=True)
    (servers / "link").symlink_to(dead_server(tmp_path))
    os.mkfifo(servers / "fifo")
    with instance_lock(tmp_path) as lock:
        assert lock.dead == ["abc"]


def test_one_start_takes_over_a_bounded_number_of_dead_servers(tmp_path: Path) -> None:
    for number in range(MAX_DEAD_SERVERS + 1):
        dead_server(tmp_path, f"{number:03}")
    with instance_lock(tmp_path) as lock:
        assert len(lock.dead) == MAX_DEAD_SERVERS
        for name in lock.dead:
            lock.forget(name)
    with instance_lock(tmp_path) as lock:
        assert lock.dead == [f"{MAX_DEAD_SERVERS:03}"]


def test_file_system_without_locks_is_named_in_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(SettingsError, match=r"has no file locks \(No locks available\).*local disk"):
        with instance_lock(tmp_path):
            pass
    assert list((tmp_path / "servers").iterdir()) == []


def test_folder_that_cannot_be_written_is_named_in_the_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for state in (Path("/proc/decathlon"), tmp_path / "file"):
        with pytest.raises(SettingsError, match=f"--state: {state}/servers cannot be used"):
            with instance_lock(state):
                pass


def test_only_servers_that_run_are_counted(tmp_path: Path) -> None:
    assert count_running_servers(tmp_path) == 0
    with instance_lock(tmp_path), instance_lock(tmp_path):
        dead_server(tmp_path)
        assert count_running_servers(tmp_path) == 2
    assert count_running_servers(tmp_path) == 0


def at(address: str | None, supervisor: int | None = None, wait_seconds: float = 300.0) -> Successor:
    return Successor.of_this_process(supervisor, address, wait_seconds)


@contextmanager
def server_at(state: Path, successor: Successor) -> Generator[InstanceLock]:
    with instance_lock(state, ["host"], survives=True, successor=successor) as lock:
        yield lock


def killed_server_at(state: Path, successor: Successor, silent_seconds: float = 0.0) -> Path:
    """The file of a server that was killed; it last said that it was alive that long ago."""
    with server_at(state, successor) as lock:
        content = (state / "servers" / lock.name).read_bytes()
    file = state / "servers" / "abc"
    file.write_bytes(content)
    modified = time.time() - silent_seconds
    os.utime(file, (modified, modified))
    return file


@pytest.mark.parametrize(
    ("dead", "own", "silent_seconds", "is_taken"),
    [
        ("http://one", "http://one", 0, True),
        ("http://one", "http://two", 0, False),
        ("http://one", None, 0, False),
        (None, "http://two", 0, True),
        (None, None, 0, True),
        # Its sandboxes have ended by then.
        ("http://one", "http://two", 300 + ALIVE_SECONDS, True),
        # The clock was set back.
        ("http://one", "http://two", -600, True),
    ],
)
def test_episodes_of_a_server_with_a_fixed_address_wait_for_a_start_at_that_address(
    tmp_path: Path, dead: str | None, own: str | None, silent_seconds: float, is_taken: bool
) -> None:
    killed_server_at(tmp_path, at(dead), silent_seconds)
    with server_at(tmp_path, at(own)) as lock:
        assert (lock.dead, list(lock.awaited)) == ((["abc"], []) if is_taken else ([], ["abc"]))


def test_episodes_wait_as_long_as_the_supervisor_of_their_server_runs(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(["sleep", "600"])
    try:
        successor = at(None, supervisor.pid)
        killed_server_at(tmp_path, successor, silent_seconds=1e6)
        for other in (at(None), at("http://two"), at(None, os.getpid())):
            with server_at(tmp_path, other) as lock:
                assert lock.dead == []
                assert lock.awaited == {"abc": successor}
        # `gc`, which is no server.
        with instance_lock(tmp_path, ["host"], survives=True) as lock:
            assert lock.dead == []
        with server_at(tmp_path, at(None, supervisor.pid)) as lock:
            assert lock.dead == ["abc"]
    finally:
        supervisor.kill()
        supervisor.wait()
    with server_at(tmp_path, at(None)) as lock:
        assert lock.dead == ["abc"]


def test_another_process_with_the_number_of_the_supervisor_is_not_waited_for(tmp_path: Path) -> None:
    killed_server_at(tmp_path, replace(at(None, os.getpid()), supervisor_ticks=1))
    with server_at(tmp_path, at(None)) as lock:
        assert lock.dead == ["abc"]


def test_what_a_server_has_taken_over_waits_for_that_servers_successor(tmp_path: Path) -> None:
    file = killed_server_at(tmp_path, at("http://one-with-a-long-name"), silent_seconds=1e6)
    with server_at(tmp_path, at("http://two")) as lock:
        assert lock.dead == ["abc"]
        lock.mark_alive()
        content, modified = file.read_bytes(), file.stat().st_mtime
    file.write_bytes(content)
    os.utime(file, (modified, modified))
    for address, dead in (("http://one-with-a-long-name", []), ("http://two", ["abc"])):
        with server_at(tmp_path, at(address)) as lock:
            assert lock.dead == dead
            if dead:
                assert json.loads(file.read_bytes())["providers"] == ["host"]


def test_running_server_says_that_it_is_alive(tmp_path: Path) -> None:
    with server_at(tmp_path, at("http://one")) as lock:
        file = tmp_path / "servers" / lock.name
        os.utime(file, (0, 0))
        lock.mark_alive()
        assert abs(file.stat().st_mtime - time.time()) < 60


@pytest.mark.parametrize("successor", [[], {"supervisor": "x", "address": 7, "wait_seconds": []}, None])
def test_successor_that_cannot_be_read_is_not_waited_for(tmp_path: Path, successor: Any) -> None:
    dead_server(tmp_path, providers=["host"], survives=True, successor=successor)
    with server_at(tmp_path, at("http://one")) as lock:
        assert lock.dead == ["abc"]
