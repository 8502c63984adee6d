"""The store of episodes and sessions."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.storage.store import ENDED, EpisodeRow, RequestRow, SandboxRow, SessionRow, Store

WRITER = """
import sys
from pathlib import Path
from decathlon_mcp.storage.store import EpisodeRow, Store
with Store.open(Path(sys.argv[1]), "dead") as store:
    for number in range(1_000_000):
        store.insert_episode(EpisodeRow(
            id=f"{number}", agent_id=f"a{number}", server="dead", suite="s", task="t", phase="queued",
            started_at=number, spec={"number": number}, progress={},
        ))
        print(number, flush=True)
"""


def episode(name: str = "one", *, operation: str | None = None, phase: str = "queued") -> EpisodeRow:
    return EpisodeRow(
        id=name,
        agent_id=f"{name}-agent",
        server="me",
        suite="starter",
        task="task",
        phase=phase,
        started_at=1.0,
        spec={"launch_time": "2026-01-01", "text": "\ud800"},
        progress={},
        operation=operation,
    )


def test_each_start_has_a_higher_generation(tmp_path: Path) -> None:
    generations: list[int] = []
    for _ in range(3):
        with Store.open(tmp_path, "me") as store:
            generations.append(store.generation)
    assert generations == [1, 2, 3]


def test_rows_are_read_back_as_written(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me") as store:
        store.insert_episode(episode(operation="s:1"))
        store.update_episode("one", phase="ready", progress={"calls": 1}, tools={"files": []})
        store.set_verdict("one", {"reward": 1.0})
    with Store.open(tmp_path, "me") as store:
        (row,) = store.live_episodes()
        assert (row.phase, row.progress, row.tools) == ("ready", {"calls": 1}, {"files": []})
        assert row.spec == {"launch_time": "2026-01-01", "text": "\ud800"}
        assert row.verdict == {"reward": 1.0}
        assert store.episode_of_operation("s:1") == row
        store.end_episode("one", "closed")
        assert store.live_episodes() == []
        assert [(ended.id, ended.phase, ended.ending) for ended in store.ended_episodes(5)] == [
            ("one", ENDED, "closed")
        ]


def test_end_of_an_episode_forgets_its_sandboxes(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me") as store:
        for name in ("one", "two"):
            store.insert_episode(episode(name))
            store.insert_sandbox(
                SandboxRow(
                    name=f"{name}-agent", owner="me", episode=name, role="agent", provider="local", spec={}
                )
            )
        store.end_episode("one", "closed")
        assert [row.name for row in store.sandboxes()] == ["two-agent"]
        store.delete_sandbox("two-agent")
        assert store.sandboxes("two") == []


def test_server_sees_the_rows_of_dead_servers_after_adopting_them(tmp_path: Path) -> None:
    with Store.open(tmp_path, "dead") as store:
        store.insert_episode(episode())
        store.save_session(SessionRow(id="s", server="dead", address="task", path="/tasks/x/mcp", data={}))
        store.insert_request(RequestRow("s", "1", b"{}"))
    with Store.open(tmp_path, "heir") as store:
        assert store.live_episodes() == []
        assert store.session("s") is None
        store.adopt(["dead"])
        assert [row.server for row in store.live_episodes()] == ["heir"]
        assert store.session("s") is not None
        assert store.requests("s") == [RequestRow("s", "1", b"{}")]
        store.delete_session("s")
        assert store.requests("s") == []


def test_episodes_that_ended_long_ago_are_deleted(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me") as store:
        for name in ("old", "live"):
            store.insert_episode(episode(name))
        store.end_episode("old", "closed")
        assert store.ended_before(0.0, 5) == []
        assert store.ended_before(1e12, 5) == ["old"]
        for handle in ("old", "live"):
            store.delete_ended(handle)
        assert store.ended_before(1e12, 5) == []
        assert [row.id for row in store.live_episodes()] == ["live"]


def test_every_row_that_was_written_survives_kill_9(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 500:
                break
        os.kill(writer.pid, signal.SIGKILL)
        # The last line may be cut.
        written = max(map(int, ["500", *writer.stdout.read().split()[:-1]]))
    with Store.open(tmp_path, "heir") as store:
        store.adopt(["dead"])
        assert len(store.live_episodes()) >= written + 1


def test_database_of_a_newer_release_is_refused(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me"):
        pass
    with sqlite3.connect(tmp_path / "store.db") as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(SettingsError, match="newer release"), Store.open(tmp_path, "me"):
        pass


def test_folder_that_cannot_hold_a_database_is_a_settings_error(tmp_path: Path) -> None:
    (tmp_path / "store.db").mkdir()
    with pytest.raises(SettingsError, match=r"--state: .*store\.db"), Store.open(tmp_path, "me"):
        pass


def test_database_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    with Store.open(tmp_path, "me"):
        assert (tmp_path / "store.db").stat().st_mode & 0o077 == 0
        assert (tmp_path / "store.db-wal").stat().st_mode & 0o077 == 0
