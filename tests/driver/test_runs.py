"""`run`: processes that end, or are made to."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from tests.driver.peer import BOUND_SECONDS, SERVERS, DriverPeer, WireError

pytestmark = pytest.mark.anyio


def process(*argv: str, **more: Any) -> dict[str, Any]:
    return {
        "argv": argv,
        "cwd": "/",
        "env": {},
        "inherit": "minimal",
        "timeout_seconds": 30,
        "output_bytes": 1000,
        "channel": False,
        **more,
    }


async def test_says_how_the_process_ended_and_what_it_wrote(peer: DriverPeer, tmp_path: Path) -> None:
    said = await peer.request(
        wire.RUN,
        **process("sh", "-c", "pwd; echo $A; cat; echo oops >&2; exit 3", cwd=str(tmp_path), env={"A": "é"}),
    )
    assert said.pop("seconds") > 0
    assert said == {
        "exit_code": 3,
        "signal": None,
        "timed_out": False,
        "stdout": f"{tmp_path}\né\n",
        "stderr": "oops\n",
        "truncated": False,
        "channel": None,
    }


async def test_a_process_ended_by_a_signal_has_no_exit_code(peer: DriverPeer) -> None:
    said = await peer.request(wire.RUN, **process("sh", "-c", "kill -11 $$"))
    assert (said["exit_code"], said["signal"], said["timed_out"]) == (None, 11, False)


async def test_only_the_last_of_the_output_is_kept(peer: DriverPeer) -> None:
    script = "import sys; sys.stdout.write('x' * 3_000_000 + 'é' * 5); sys.stderr.buffer.write(b'a\\xff')"
    said = await peer.request(
        wire.RUN, **process(sys.executable, "-c", script, output_bytes=7, env={"PYTHONUTF8": "1"})
    )
    assert said["stdout"] == "ééé"  # the half of a fourth is left out
    assert said["stderr"] == "a\ufffd"
    assert said["truncated"]


async def test_nothing_may_be_kept_at_all(peer: DriverPeer) -> None:
    said = await peer.request(wire.RUN, **process("echo", "hello", output_bytes=0))
    assert (said["stdout"], said["truncated"]) == ("", True)


async def test_what_is_written_to_the_channel_comes_back(peer: DriverPeer) -> None:
    script = f"import os; os.write(int(os.environ['{wire.CHANNEL_VARIABLE}']), 'verdict é'.encode())"
    said = await peer.request(wire.RUN, **process(sys.executable, "-c", script, channel=True))
    assert (said["channel"], said["truncated"]) == ("verdict é", False)


async def test_the_channel_is_cut_after_a_mebibyte(peer: DriverPeer) -> None:
    script = f"import os; open(int(os.environ['{wire.CHANNEL_VARIABLE}']), 'wb').write(b'y' * 3_000_000)"
    said = await peer.request(wire.RUN, **process(sys.executable, "-c", script, channel=True))
    assert (len(said["channel"]), said["truncated"]) == (1 << 20, True)


async def test_the_process_gets_neither_the_line_nor_other_processes_pipes(peer: DriverPeer) -> None:
    await peer.start(peer.zoo("plain"))
    said = await peer.request(wire.RUN, **process("sh", "-c", "cd /proc/self/fd && echo * && readlink 0"))
    assert said["stdout"] == "0 1 2 3\n/dev/null\n"  # 3 is the folder being read


async def test_the_environment_is_what_was_asked_for(peer: DriverPeer) -> None:
    said = await peer.request(wire.RUN, **process("env", env={"TERM": "none", "X": "1"}, output_bytes=10**6))
    minimal = said["stdout"]
    names = {line.partition("=")[0] for line in minimal.splitlines()}
    assert names <= {"HOME", "LOGNAME", "PATH", "SHELL", "TERM", "USER", "X", "DECATHLON_MARK"}
    assert {"TERM=none", "X=1", f"PATH={os.environ['PATH']}"} <= set(minimal.splitlines())
    everything = (await peer.request(wire.RUN, **process("env", inherit="all", output_bytes=10**6)))["stdout"]
    assert {f"{name}=" in everything for name in os.environ} == {True}


async def test_the_program_is_looked_up_in_the_path_that_the_process_gets(
    peer: DriverPeer, tmp_path: Path
) -> None:
    program = tmp_path / "only-here"
    program.write_text("#!/bin/sh\necho found\n")
    program.chmod(0o755)
    said = await peer.request(wire.RUN, **process("only-here", env={"PATH": f"{tmp_path}:/bin:/usr/bin"}))
    assert said["stdout"] == "found\n"


@pytest.mark.parametrize(
    ("argv", "cwd"),
    [(["no-such-program"], "/"), (["true"], "/no/such/folder"), (["/etc/passwd"], "/"), (["\udcff"], "/")],
)
async def test_a_program_that_cannot_be_run_is_an_error(peer: DriverPeer, argv: list[str], cwd: str) -> None:
    with pytest.raises(WireError, match="cannot be run") as refused:
        await peer.request(wire.RUN, **process(*argv, cwd=cwd))
    assert refused.value.reason == "spawn"


async def test_when_its_time_is_over_the_whole_tree_is_killed(peer: DriverPeer) -> None:
    script = "trap '' TERM; echo begun; sleep 1000 & sleep 1000"
    said = await peer.request(wire.RUN, **process("sh", "-c", script, peer.token, timeout_seconds=0.3))
    assert (said["timed_out"], said["stdout"]) == (True, "begun\n")
    # The shell may be told of its child's end, and end itself, before its own turn comes.
    assert (said["exit_code"], said["signal"]) in ((None, 9), (137, None))
    assert peer.left() == []


async def test_what_forks_faster_than_it_can_be_listed_is_killed_too(peer: DriverPeer) -> None:
    script = "import os, time\nwhile True:\n    if os.fork(): os._exit(0)\n    time.sleep(0.0001)"
    said = await peer.request(
        wire.RUN,
        **process(
            "sh",
            "-c",
            '"$@" & sleep 1000',
            "sh",
            sys.executable,
            "-S",
            "-c",
            script,
            peer.token,
            timeout_seconds=0.5,
        ),
    )
    assert said["timed_out"]
    assert said["seconds"] < 5
    assert peer.left() == []


async def test_when_it_ends_its_daemons_end_too(peer: DriverPeer) -> None:
    """They hold its pipes, left its session, and have been re-parented: the answer does not wait for them."""
    script = (
        f"import runpy, sys; sys.argv[1:] = ['daemonic', '{peer.token}']; runpy.run_path('{SERVERS}/zoo.py')"
    )
    with anyio.fail_after(BOUND_SECONDS):
        said = await peer.request(wire.RUN, **process(sys.executable, "-S", "-c", script))
    assert said["exit_code"] == 0
    assert peer.left() == []


async def test_daemons_are_told_apart_from_servers_and_other_runs(peer: DriverPeer) -> None:
    await peer.start(peer.zoo("daemonic"))
    other = await peer.begin(wire.RUN, **process("sh", "-c", "sleep 1000; :", peer.token, timeout_seconds=60))
    await peer.until_left(3)
    script = f"setsid sh -c 'trap \"\" TERM HUP; sleep 1000; :' {peer.token} & echo done"
    said = await peer.request(wire.RUN, **process("sh", "-c", script))
    assert said["stdout"] == "done\n"
    assert len(peer.left()) == 3
    assert await peer.text("zoo", "text", unit="still here", times=1) == "still here"
    await peer.cancel(other)
    with pytest.raises(WireError):
        await peer.answer(other)
    assert len(peer.left()) == 2


def leaving(token: str) -> list[str]:
    """A process that ends and leaves one that goes on writing to its pipes, in an environment of its own."""
    left = f"env -i PATH=$PATH setsid sh -c 'while :; do echo tick; sleep 0.02; done; : {token}'"
    return ["sh", "-c", f"{left} & echo started"]


async def test_what_a_run_may_leave_lives_on_until_the_freeze(peer: DriverPeer) -> None:
    said = await peer.request(wire.RUN, **process(*leaving(peer.token), leave=True))
    assert (said["exit_code"], said["stdout"].splitlines()[0]) == (0, "started")
    left = min(peer.left())
    for _ in range(3):
        await peer.request(wire.RUN, **process("sh", "-c", "sleep 0.1"))
    await peer.start(peer.zoo("daemonic"))
    await peer.request(wire.RUN, **process("true"))
    assert left in peer.left()
    await peer.request(wire.FREEZE)
    assert peer.left() == []


async def test_what_a_run_may_leave_ends_with_the_driver(peer: DriverPeer) -> None:
    await peer.request(wire.RUN, **process(*leaving(peer.token), leave=True))
    assert peer.left()
    await peer.close()
    assert peer.left() == []


async def test_a_run_whose_time_is_over_leaves_nothing(peer: DriverPeer) -> None:
    script = f"{leaving(peer.token)[2]}; sleep 1000"
    said = await peer.request(wire.RUN, **process("sh", "-c", script, leave=True, timeout_seconds=0.5))
    assert said["timed_out"]
    assert peer.left() == []


async def test_a_run_that_is_given_up_is_killed_before_it_is_answered(peer: DriverPeer) -> None:
    number = await peer.begin(wire.RUN, **process("sh", "-c", "sleep 1000; :", peer.token))
    await peer.until_left(1)
    await peer.cancel(number)
    with pytest.raises(WireError) as given_up:
        await peer.answer(number)
    assert given_up.value.reason == "cancelled"
    assert peer.left() == []


async def test_a_process_that_floods_holds_nobody_up(peer: DriverPeer) -> None:
    flood = await peer.begin(
        wire.RUN, **process("sh", "-c", "cat /dev/zero | tr '\\0' x", timeout_seconds=0.7)
    )
    for _ in range(20):
        assert await peer.request(wire.PING) == {}
    said = await peer.answer(flood)
    assert said["timed_out"]
    assert said["stdout"] == "x" * 1000


async def test_many_processes_end_each_for_itself(peer: DriverPeer) -> None:
    numbers = [
        await peer.begin(wire.RUN, **process("sh", "-c", f"echo {count}; exit {count}"))
        for count in range(20)
    ]
    said = [await peer.answer(number) for number in numbers]
    assert [one["exit_code"] for one in said] == list(range(20))
    assert [one["stdout"] for one in said] == [f"{count}\n" for count in range(20)]
