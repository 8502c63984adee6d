"""`gc` and `show`: what servers that died have left, with real processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.plugins.gc import collect
from decathlon_mcp.sandboxes.host import sandbox as sandbox_module
from decathlon_mcp.sandboxes.host import sandbox_folder
from decathlon_mcp.sandboxes.host.processes import ProcessId
from decathlon_mcp.sandboxes.host.sandbox_folder import remove_folder
from decathlon_mcp.storage.lock import Server
from decathlon_mcp.storage.store import ENDED, SandboxRow, SessionRow, Store
from decathlon_mcp.types import public_id
from tests.cli.conftest import Shell
from tests.history.stored_episodes import add_episode
from tests.probe.leftovers import processes_by_sandbox

pytestmark = pytest.mark.slow


SERVER = """
import sys
from pathlib import Path, PurePosixPath

import anyio

from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.host.provider import HostProvider
from decathlon_mcp.storage.lock import Server, create_state_folder, instance_lock
from decathlon_mcp.storage.store import EpisodeRow, SandboxRow, SessionRow, Store

state, phase = Path(sys.argv[1]), sys.argv[2]
serves = phase != "embedded"

async def main():
    create_state_folder(state)
    server = Server.of_this_process(["host"], serves=serves, survives=serves)
    with instance_lock(state, server) as lock, Store.open(state, lock.name) as store:
        (state / "scratch" / f"{lock.name}-xyz").mkdir()
        name, handle = f"box-{lock.name}", f"{lock.name}-handle-of-an-episode"
        if serves:
            store.insert_episode(EpisodeRow(
                id=handle, agent_id=f"agent-{lock.name}-of-an-episode", server=lock.name, suite="starter",
                task="tune-reactor", token="alice", phase=phase, started_at=1.0,
                spec={"policy": "visible", "owner": {"token": "alice", "session": "a-secret-session"}},
                progress={"calls": 3, "note": "\\x1b[31m"},
            ))
            store.save(SandboxRow(
                name=name, owner=lock.name, episode=handle, role="agent", provider="host", isolation="none",
                wire_version=1, spec={},
            ))
            store.save(SessionRow(
                id="s" + lock.name, server=lock.name, address="lobby", path="/mcp", data={},
            ))
        # Unlike a driver, it does not end with its stdin.
        spec = SandboxSpec(name=name, command=("sleep", "600"), root=PurePosixPath("/suite"))
        provider = HostProvider(lock.name, state / "sandboxes", isolation="none")
        async with provider, provider.open(spec):
            print(lock.name, flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A process with the lock and a sandbox of a server; of a `serve` also with an episode and a session."""

    process: subprocess.Popen[str]
    name: str
    state: Path

    @property
    def handle(self) -> str:
        return f"{self.name}-handle-of-an-episode"

    @property
    def is_running_a_sandbox(self) -> bool:
        return bool(self.processes)

    @property
    def processes(self) -> set[int]:
        return processes_by_sandbox(self.state / "sandboxes").get(f"box-{self.name}", set())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def end_sandbox(self) -> None:
        while processes := self.processes:
            for pid in processes:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)

    @property
    def leftovers(self) -> list[Path]:
        """The folders and files of this server."""
        patterns = (f"servers/{self.name}", f"sandboxes/box-{self.name}", f"scratch/{self.name}-*")
        return [path for pattern in patterns for path in self.state.glob(pattern)]


@pytest.fixture
def server(tmp_path: Path) -> Generator[Callable[..., RunningServer]]:
    started: list[RunningServer] = []

    def start(phase: str = "ready") -> RunningServer:
        state = tmp_path / "state" / "decathlon-mcp"
        process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(state), phase],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        assert process.stdout is not None
        started.append(RunningServer(process, process.stdout.readline().strip(), state))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.end_sandbox()


@pytest.mark.anyio
async def test_a_sandbox_that_cannot_be_removed_is_reported_and_removed_by_the_next_gc(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "servers").mkdir()
    for name in ("one", "two"):
        (tmp_path / "sandboxes" / name).mkdir(parents=True)
        (tmp_path / "sandboxes" / name / "owner").write_text("0123456789ab")

    def refuse(name: str, parent: int, **options: Any) -> None:
        if name == "one":
            raise OSError(errno.EBUSY, "busy")
        remove_folder(name, parent, **options)

    with monkeypatch.context() as patch:
        patch.setattr(sandbox_module, "remove_folder", refuse)
        assert await collect(tmp_path, dry_run=False, abandon=False, as_json=False) == 1
    removed, failed = capsys.readouterr().out.splitlines()
    assert removed == "removed 1 sandbox of server 0123456789ab, which died"
    assert failed.startswith("could not remove 1 sandbox of server 0123456789ab")
    assert await collect(tmp_path, dry_run=False, abandon=False, as_json=False) == 0
    assert "removed 1 sandbox" in capsys.readouterr().out
    assert not [*(tmp_path / "sandboxes").iterdir()]


def test_what_a_provider_that_cannot_be_asked_has_left_is_reported_and_kept(
    shell: Shell, tmp_path: Path
) -> None:
    state = tmp_path / "state" / "decathlon-mcp"
    (state / "servers").mkdir(parents=True)
    none = f"unix://{tmp_path}/none.sock"
    assert shell.run("gc", DOCKER_HOST=none).stderr == ""  # no server has used an engine
    (state / "servers" / "0123456789ab").write_text(json.dumps({"providers": ["docker"]}))
    done = shell.run("gc", DOCKER_HOST=none)
    assert done.returncode == 0, done
    assert done.stdout == f"nothing is left of servers that died in {state}\n"
    why = "sandboxes of the provider docker were not looked for: no Docker engine answers at unix://"
    assert done.stderr.startswith(why)
    assert (state / "servers" / "0123456789ab").exists()
    (state / "servers" / "0123456789ab").write_text(json.dumps({"providers": ["uninstalled"]}))
    (state / "servers" / "ba9876543210").write_text("x" * 10_000)
    report = json.loads(shell.run("gc", "--abandon", "--json").stdout)
    assert "--provider uninstalled: there is no such provider" in report["unreachable"]["uninstalled"]
    assert [file.name for file in (state / "servers").iterdir()] == ["0123456789ab"]


def test_episodes_that_can_be_continued_are_kept_unless_abandoned(
    shell: Shell, server: Callable[..., RunningServer]
) -> None:
    dead = server()
    dead.kill()
    running = server("embedded")
    kept = shell.run("gc").stdout
    assert kept.startswith(f"kept 1 episode of server {dead.name}, which died")
    printed = shell.run("gc", "--abandon", "--dry-run").stdout
    parts = "1 sandbox, 1 folder of archives, 1 unfinished episode, 1 session"
    assert f"would remove {parts} of server {dead.name}, which died\n" == printed
    assert dead.is_running_a_sandbox
    assert len(dead.leftovers) == 3
    assert shell.run("gc", "--abandon").stdout == printed.replace("would remove", "removed")
    assert not dead.is_running_a_sandbox
    assert dead.leftovers == []
    assert running.is_running_a_sandbox
    with Store.open_read_only(dead.state) as store:
        assert store is not None
        (row,) = store.find_episodes(public_id(dead.handle), 2)
        assert (row.phase, row.ending) == (ENDED, Ending.NOT_CONTINUED)
        assert store.find(SandboxRow, episode=dead.handle) == []
        assert store.unfinished_episodes() == []
    with Store.open(dead.state, dead.name) as store:
        assert store.find_one(SessionRow, id=f"s{dead.name}") is None
    assert shell.run("gc").stdout.startswith("nothing is left")


def test_what_a_stranger_says_is_neither_removed_nor_killed(
    shell: Shell, server: Callable[..., RunningServer], tmp_path: Path
) -> None:
    dead, named = server(), tmp_path / "named"
    dead.kill()
    named.mkdir()
    with subprocess.Popen(["sleep", "600"]) as victim:
        (named / "owner").write_text(dead.name)
        process_id = ProcessId.of(victim.pid)
        assert process_id is not None
        sandbox_folder.write_process(named / "leader", process_id)
        variables = {"DECATHLON_SANDBOX": f"{dead.name}/{named}"}
        with subprocess.Popen(["/bin/sleep", "600"], env=variables) as forger:
            assert "1 sandbox," in shell.run("gc", "--abandon").stdout
            assert (victim.poll(), forger.poll()) == (None, None)
            forger.kill()
        victim.kill()
    assert len([*named.iterdir()]) == 2


def test_a_sandbox_that_has_ended_is_removed_and_its_episode_left_to_the_next_server(
    shell: Shell, server: Callable[..., RunningServer]
) -> None:
    dead = server()
    dead.kill()
    dead.end_sandbox()
    report = json.loads(shell.run("gc", "--json").stdout)
    assert report["removed"] == [
        {"server": dead.name, "sandboxes": 1, "scratch": 1, "abandoned": 0, "sessions": 0, "failed": 0}
    ]
    assert report["kept"] == {dead.name: 1}
    assert shell.run("gc").stdout.startswith(f"kept 1 episode of server {dead.name}, which died")
    assert [path.name for path in dead.leftovers] == [dead.name]  # by which the next server finds it
    with Store.open_read_only(dead.state) as store:
        assert store is not None
        assert [row.id for row in store.unfinished_episodes()] == [dead.handle]


def test_a_server_that_is_being_started_again_is_not_touched(
    shell: Shell, server: Callable[..., RunningServer]
) -> None:
    dead = server()
    dead.kill()
    file = dead.state / "servers" / dead.name
    own = Server.of_this_process(supervisor=os.getpid())
    supervised = {"supervisor": own.supervisor, "supervisor_ticks": own.supervisor_ticks}
    file.write_text(json.dumps({**json.loads(file.read_bytes()), **supervised}))
    printed = shell.run("gc", "--abandon").stdout
    assert printed == f"left a server that died to its supervisor: process {os.getpid()} starts it again\n"
    assert dead.is_running_a_sandbox
    assert len(dead.leftovers) == 3


def test_episodes_are_listed_and_shown_without_their_secrets(
    shell: Shell, server: Callable[..., RunningServer]
) -> None:
    running = server()
    over = add_episode(
        running.state, "over-since-long-ago", reward=0.5, started_at=time.time() - 7200, calls=7
    )
    folder = running.state / "episodes" / running.handle
    folder.mkdir()
    calls = "".join(
        f'{{"event":"call","seq":{seq},"name":"lab__run"}}\n'
        f'{{"event":"reply","seq":{seq},"failed":false,"seconds":0.1}}\n'
        for seq in range(1, 9)
    )
    (folder / "trajectory.jsonl").write_text(calls)
    lines = [line.split("\t") for line in shell.run("show").stdout.splitlines()]
    by_id = {line[0]: line[1:] for line in lines}
    live = public_id(running.handle)
    assert by_id[live][:4] == ["tune-reactor", "", "ready", "alice"]
    assert by_id[live][5:] == ["", "", str(running.process.pid)]
    assert by_id[over] == ["task", "", "ended", "", "2 h", "7", "reward 0.5", ""]
    assert running.handle not in shell.run("show", "--json").stdout
    listed = json.loads(shell.run("show", "--json", "--handles").stdout)["episodes"]
    assert {one["handle"] for one in listed} == {running.handle, "over-since-long-ago"}
    assert shell.error("show", "", status=2).startswith("more than one episode begins with ''")

    output = shell.run("show", live[:12]).stdout
    assert f"id: {live}\n" in output
    assert "  policy: visible\n" in output
    assert "calls: 8\n" in output
    assert output.count('"name": "lab__run"') == 5
    for secret in (running.handle, f"agent-{running.name}", "a-secret-session", "\x1b"):
        assert secret not in output
    text = shell.run("show", live, "--json").stdout
    assert running.handle not in text
    document = json.loads(text)
    assert document["server"] == {"name": running.name, "pid": running.process.pid}
    assert document["spec"]["owner"]["session"] == "…"
