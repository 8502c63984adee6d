"""`freeze`: nothing runs any more, for good."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from decathlon_sandbox import supervisor, wire

from tests.driver.peer import BOUND_SECONDS, DriverPeer, WireError, driver

pytestmark = pytest.mark.anyio


def shell(script: str, **more: Any) -> dict[str, Any]:
    return {
        "argv": ["sh", "-c", script],
        "cwd": "/",
        "env": {},
        "inherit": "all",
        "timeout_seconds": 60,
        "output_bytes": 1000,
        "channel": False,
        **more,
    }


async def test_everything_is_killed_and_calls_are_refused(peer: DriverPeer, tmp_path: Path) -> None:
    await peer.start(peer.zoo("daemonic"), peer.busy(), peer.zoo("stubborn", "stubborn"))
    run = await peer.begin(wire.RUN, **shell(f"sleep 1000; : {peer.token}"))
    call = await peer.begin_tool("zoo", "hang")
    start = await peer.begin(wire.START, servers=[peer.zoo("silent", "silent")], deadline_seconds=1000)
    await peer.until_left(6)
    frozen = await peer.request(wire.FREEZE)
    assert frozen["killed"] >= 6
    assert peer.left() == []
    for number in (call, start):
        with pytest.raises(WireError) as refused:
            await peer.answer(number)
        assert refused.value.reason == "frozen"
    assert (await peer.answer(run))["signal"] == 9
    assert not [note for note in peer.notes if note[0] == wire.EXITED]


async def test_it_is_for_good_but_runs_and_files_go_on(peer: DriverPeer, tmp_path: Path) -> None:
    assert await peer.request(wire.FREEZE) == {"killed": 0}
    refused_ones: list[tuple[str, dict[str, Any]]] = [
        (wire.START, {"servers": [peer.zoo("plain")], "deadline_seconds": 30}),
        (wire.CALL, {"server": "zoo", "method": "tools/call", "params": {}, "timeout_seconds": 1}),
    ]
    for method, params in refused_ones:
        with pytest.raises(WireError) as refused:
            await peer.request(method, **params)
        assert refused.value.reason == "frozen"
    assert (await peer.request(wire.RUN, **shell("echo still")))["stdout"] == "still\n"
    assert await peer.request(wire.ARRANGE, steps=[{"make": f"{tmp_path}/folder"}]) == {}
    assert await peer.request(wire.FREEZE) == {"killed": 0}


async def test_a_server_that_ends_with_its_stdin_may_tidy_up(peer: DriverPeer, tmp_path: Path) -> None:
    """As the MCP SDK stops servers: a database is closed, a half-written file is written."""
    tidy = peer.zoo("plain")
    tidy["args"] = ["-c", '"$0" "$@"; sleep 0.2; echo tidied > note', tidy["command"], *tidy["args"]]
    await peer.start({**tidy, "command": "sh", "cwd": str(tmp_path)})
    await peer.request(wire.FREEZE)
    assert (tmp_path / "note").read_text() == "tidied\n"


def sleeps(*names: str) -> str:
    """A script that leaves a process of each name behind, all of one process group."""
    return "".join(f"(exec -a '{name}' sleep 1000) & " for name in names) + "wait"


@pytest.mark.parametrize("first", [False, True])
async def test_what_is_spared_runs_on_and_everything_else_is_killed(python: str, first: bool) -> None:
    async with driver(python, wrap=first_process() if first else ()) as peer:
        tokens = [f"{name} {peer.token}" for name in ("forward --to 80", "forwarder", "worker")]
        script = sleeps(*tokens)
        run = await peer.begin(wire.RUN, **{**shell(script), "argv": ["bash", "-c", script]})
        await peer.until_left(4)
        await peer.start(peer.zoo("daemonic"))
        said = await peer.request(wire.FREEZE, spare=["forward --*", "nothing of this name"])
        assert said["killed"] >= 5
        assert (await peer.answer(run))["signal"] == 9
        assert [line.split()[0] for line in commands(peer)] == ["forward"]
        assert await peer.request(wire.FREEZE) == {"killed": 0}


async def test_the_end_of_a_run_spares_it_and_the_drivers_end_does_not(python: str) -> None:
    async with driver(python) as peer:
        script = sleeps(f"forward {peer.token}")
        await peer.begin(wire.RUN, **{**shell(script), "argv": ["bash", "-c", script]})
        await peer.until_left(2)
        await peer.request(wire.FREEZE, spare=["forward *"])
        for _ in range(2):
            await peer.request(wire.RUN, **shell(f"sh -c 'sleep 1000; : {peer.token}' & :"))
        assert [line.split()[0] for line in commands(peer)] == ["forward"]
        await peer.close()
        assert peer.left() == []


async def test_what_begins_to_look_spared_afterwards_is_not(peer: DriverPeer) -> None:
    script = f"trap '' TERM; sleep 0.3; exec -a 'forward {peer.token}' sleep 1000"
    await peer.begin(wire.RUN, **{**shell(script), "argv": ["bash", "-c", script]})
    await peer.until_left(1)
    await peer.start(peer.zoo("stubborn", "stubborn"))  # it takes the freeze two seconds
    await peer.request(wire.FREEZE, spare=["forward *"])
    assert peer.left() == []


@pytest.mark.parametrize(
    ("pattern", "fits"),
    [
        ("/usr/bin/kubectl port-forward svc/a 80", True),
        ("kubectl port-forward*", True),
        ("kubectl *svc* 80", True),
        ("kubectl*80*80", False),
        ("kubectl", False),
        ("*", True),
        ("port-forward*", False),
        ("", False),
    ],
)
def test_a_pattern_is_of_the_whole_command_line(
    monkeypatch: pytest.MonkeyPatch, pattern: str, fits: bool
) -> None:
    def opened(path: str, mode: str) -> io.BytesIO:
        return io.BytesIO(b"/usr/bin/kubectl\0port-forward\0svc/a\0" + b"80\0")

    monkeypatch.setattr("builtins.open", opened)
    assert supervisor.matches_command(1, [pattern]) is fits


def commands(peer: DriverPeer) -> list[str]:
    """The command lines of what is left of its servers and runs."""
    lines = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in peer.left())
    return [line.replace(b"\0", b" ").decode() for line in lines]


def first_process(*dropping: str) -> list[str]:
    """A command that makes what follows the first process of a machine of its own, or a skip."""
    wrap = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *dropping]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no namespaces here")
    return wrap


async def test_as_first_process_it_kills_even_what_is_not_below_it(python: str) -> None:
    async with driver(python, wrap=first_process()) as peer:
        await peer.start(peer.zoo("daemonic"), peer.zoo("plain", "other"))
        with enter(peer, "sh", "-c", "sleep 1000; :", peer.token) as entered:
            try:
                await peer.until_left(5)
                assert (await peer.request(wire.FREEZE))["killed"] == 5
                assert entered.wait(timeout=BOUND_SECONDS) != 0
            finally:
                entered.kill()
        said = await peer.request(wire.RUN, **shell("ls /proc | grep -c '^[0-9]'"))
        assert said["stdout"] == "4\n"  # the driver, sh, ls, grep


def enter(peer: DriverPeer, *command: str) -> subprocess.Popen[bytes]:
    """Start a process beside the driver, as `docker exec` does."""
    children = Path(f"/proc/{peer.process.pid}/task/{peer.process.pid}/children").read_text().split()
    return subprocess.Popen(["nsenter", "--pid", "--mount", "-t", children[0], *command])


async def test_without_the_right_to_trace_its_line_is_out_of_reach(python: str) -> None:
    """As in a container: root, but not every capability. That there are descriptors can be seen, no more."""
    rights = "-sys_ptrace,-sys_admin,-perfmon"
    dropping = ["setpriv", f"--bounding-set={rights}", f"--inh-caps={rights}"]
    async with driver(python, wrap=first_process(*dropping)) as peer:
        await peer.start(peer.zoo("plain"))
        descriptors = json.loads(await peer.text("zoo", "peek", path="/proc/1/fd"))
        assert len(descriptors) > 4
        for path in ("/proc/1/exe", "/proc/1/cwd", *(f"/proc/1/fd/{fd}" for fd in descriptors)):
            assert await peer.text("zoo", "peek", path=path) == "PermissionError"
        said = await peer.request(
            wire.RUN,
            **shell(
                "for fd in /proc/1/fd/*; do (echo forged > $fd) || (cat $fd) && echo reached; done;"
                " cat /proc/1/environ /proc/1/mem && echo read; kill -9 1; echo tried"
            ),
        )
        assert said["stdout"] == "tried\n"
        assert await peer.request(wire.PING) == {}


async def test_orphans_of_the_first_process_are_reaped(python: str) -> None:
    async with driver(python, wrap=first_process()) as peer:
        await peer.start(peer.zoo("plain"))
        await peer.request(wire.RUN, **shell("for i in 1 2 3 4 5; do (setsid sh -c : &) ; done; sleep 0.2"))
        said = await peer.request(wire.RUN, **shell("cat /proc/*/stat | grep -c ') Z '"))
        assert said["stdout"] == "0\n"
