"""The locks by which servers share a state folder, and recognise what dead ones left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.storage.lock import (
    MAX_DEAD_SERVERS,
    InstanceLock,
    Server,
    instance_lock,
    running_servers,
    serving,
)

PROCESSES, STARTS = 6, 300
WORKER = """
import pathlib, random, sys, time
from decathlon_mcp.storage.lock import Server, instance_lock

wrong = failed = 0
for _ in range(int(sys.argv[2])):
    try:
        with instance_lock(pathlib.Path(sys.argv[1]), Server.of_this_process()) as lock:
            wrong += len(lock.dead)
            time.sleep(random.random() * 0.004)
    except Exception:
        failed += 1
print(wrong, failed)
"""
HOLDER = """
import pathlib, sys, time
from decathlon_mcp.storage.lock import Server, instance_lock

server = Server.of_this_process(["local"], serves=True, survives=True)
with instance_lock(pathlib.Path(sys.argv[1]), server) as lock:
    print(lock.name, flush=True)
    time.sleep(600)
"""


@contextmanager
def embedded(state: Path, *providers: str) -> Generator[InstanceLock]:
    """The lock of a server that does not serve the folder alone."""
    with instance_lock(state, Server.of_this_process(providers or ("local",))) as lock:
        yield lock


def serve(supervisor: int | None = None) -> Server:
    return Server.of_this_process(["local"], serves=True, survives=True, supervisor=supervisor)


@contextmanager
def serving_at(state: Path, supervisor: int | None = None) -> Generator[InstanceLock]:
    with instance_lock(state, serve(supervisor)) as lock:
        yield lock


def dead_server(state: Path, name: str = "abc", **record: Any) -> Path:
    file = state / "servers" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(record) if record else "")
    return file


@contextmanager
def another_process(state: Path) -> Generator[tuple[subprocess.Popen[str], str]]:
    """A process that serves the folder, and the name of the server."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(state)], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout is not None
            yield holder, holder.stdout.readline().strip()
        finally:
            holder.kill()


def test_concurrent_starts_neither_fail_nor_take_a_live_server_for_dead(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", WORKER, str(tmp_path), str(STARTS // PROCESSES)]
    workers = [subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) for _ in range(PROCESSES)]
    assert [worker.communicate()[0].split() for worker in workers] == [["0", "0"]] * PROCESSES
    assert list((tmp_path / "servers").iterdir()) == []


def test_embedded_servers_share_a_folder_and_leave_nothing(tmp_path: Path) -> None:
    with embedded(tmp_path) as first, serving_at(tmp_path) as second, embedded(tmp_path) as third:
        assert first.dead == second.dead == third.dead == []
        assert running_servers(tmp_path) == dict.fromkeys((first.name, second.name, third.name), os.getpid())
        assert len({first.name, second.name, third.name}) == 3
        for file in (tmp_path / "servers").iterdir():
            assert file.stat().st_mode & 0o777 == 0o600
        dead_server(tmp_path)
        assert "abc" not in running_servers(tmp_path)
        assert third.others() == {first.name, second.name, "abc"}
        (tmp_path / "servers" / "abc").unlink()
    assert list((tmp_path / "servers").iterdir()) == []
    assert running_servers(tmp_path / "nothing") == {}


def test_a_second_serve_is_refused_with_the_process_of_the_first(tmp_path: Path) -> None:
    with another_process(tmp_path) as (holder, name):
        with pytest.raises(SettingsError, match=f"in use by another .* process {holder.pid}"):
            with serving_at(tmp_path):
                pass
        with embedded(tmp_path) as lock:
            assert lock.dead == []
        assert running_servers(tmp_path) == {name: holder.pid}
        holder.kill()
        holder.wait()
        assert serving(tmp_path) is None
        with embedded(tmp_path) as lock:
            assert lock.dead == [], "the next serve continues its episodes"
        with serving_at(tmp_path) as lock, embedded(tmp_path) as other:
            assert (lock.dead, other.dead) == ([name], [])


def test_a_killed_server_is_left_to_its_supervisor(tmp_path: Path) -> None:
    supervisor = subprocess.Popen(["sleep", "600"])
    try:
        with serving_at(tmp_path, supervisor.pid) as lock:
            record = (tmp_path / "servers" / lock.name).read_text()
        dead_server(tmp_path).write_text(record)
        for other in (None, os.getpid()):
            with pytest.raises(SettingsError, match=f"process {supervisor.pid}:"):
                with serving_at(tmp_path, other):
                    pass
        with serving_at(tmp_path, supervisor.pid) as lock:
            assert lock.dead == ["abc"]
        reused = {**json.loads(record), "supervisor": os.getpid()}
        dead_server(tmp_path).write_text(json.dumps(reused))  # another process has its number now
        with serving_at(tmp_path) as lock:
            assert lock.dead == ["abc"]
        dead_server(tmp_path).write_text(record)
    finally:
        supervisor.kill()
        supervisor.wait()
    with serving_at(tmp_path) as lock:
        assert lock.dead == ["abc"]


def test_dead_server_with_a_provider_that_this_server_lacks_is_left_to_another(tmp_path: Path) -> None:
    dead_server(tmp_path, providers=["docker"])
    with embedded(tmp_path) as lock:
        assert lock.dead == []
        with embedded(tmp_path, "docker", "local") as other:
            assert other.dead == ["abc"]


@pytest.mark.parametrize("content", ["[" * 5000, '{"pid": "x", "providers": 7}'])
def test_record_that_cannot_be_read_is_that_of_a_dead_server(tmp_path: Path, content: str) -> None:
    dead_server(tmp_path).write_text(content)
    with serving_at(tmp_path) as lock:
        assert lock.dead == ["abc"]


def test_one_start_takes_over_a_bounded_number_of_dead_servers(tmp_path: Path) -> None:
    for number in range(MAX_DEAD_SERVERS + 1):
        dead_server(tmp_path, f"{number:03}")
    with embedded(tmp_path) as lock:
        assert len(lock.dead) == MAX_DEAD_SERVERS
        for name in lock.dead:
            lock.forget(name)
    with embedded(tmp_path) as lock:
        assert lock.dead == [f"{MAX_DEAD_SERVERS:03}"]
