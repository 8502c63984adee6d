"""`run`: commands that end, or are ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from tests.driver.peer import BOUND_SECONDS, DriverPeer, WireError, command, until

pytestmark = pytest.mark.anyio


async def test_run_returns_exit_code_and_output(peer: DriverPeer, tmp_path: Path) -> None:
    result = await peer.request(
        wire.RUN,
        # A program that no shell starts has its folder as PWD too: not the server's, nor none.
        **command(
            sys.executable,
            "-c",
            "import os, sys; print(os.getcwd(), os.environ['PWD'], os.environ['A'], sys.stdin.read());"
            "sys.stderr.write('oops'); sys.exit(3)",
            cwd=str(tmp_path),
            env={"A": "é", "PYTHONUTF8": "1"},
        ),
    )
    assert result == {
        "exit_code": 3,
        "signal": None,
        "timed_out": False,
        "stdout": f"{tmp_path} {tmp_path} é \n",
        "stderr": "oops",
        "channel": None,
        "background": 0,
    }
    result = await peer.request(wire.RUN, **command("sh", "-c", "kill -11 $$"))
    assert (result["exit_code"], result["signal"], result["timed_out"]) == (None, 11, False)


async def test_channel_returns_the_first_mebibyte_that_was_written_to_it(shared: DriverPeer) -> None:
    fd = f"int(os.environ['{wire.CHANNEL_VARIABLE}'])"
    script = f"import os; open({fd}, 'w', encoding='utf-8').write('verdict é' * 300_000)"
    result = await shared.request(wire.RUN, **command(sys.executable, "-c", script, channel=True))
    assert result["channel"] == "verdict é" * 104_857 + "verdic"


async def test_process_inherits_no_descriptors_of_the_driver(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("plain"))
    result = await peer.request(wire.RUN, **command("sh", "-c", "cd /proc/self/fd && echo * && readlink 0"))
    assert result["stdout"] == "0 1 2 3\n/dev/null\n"  # 3 is the folder that the shell reads


async def test_program_that_cannot_be_run_is_an_error(shared: DriverPeer) -> None:
    cases = (
        (["no-such-program"], "/"),
        (["true"], "/no/such/folder"),
        (["/etc/passwd"], "/"),
        (["\udcff"], "/"),
    )
    for argv, cwd in cases:
        with pytest.raises(WireError, match="cannot be run") as error:
            await shared.request(wire.RUN, **command(*argv, cwd=cwd))
        assert error.value.reason == "spawn"


async def test_timeout_kills_the_whole_process_tree(shared: DriverPeer) -> None:
    """Also what the run would leave, in a session of its own and without the run's environment."""
    argv = with_background_process(shared.token, "trap '' TERM; sleep 1000 & sleep 1000")
    result = await shared.request(wire.RUN, **command(*argv, leave=True, timeout_seconds=0.3))
    assert (result["timed_out"], result["stdout"].split()[0]) == (True, "started")
    # The shell may notice that its child was killed and exit before it is killed itself.
    assert (result["exit_code"], result["signal"]) in ((None, 9), (137, None))
    assert shared.living() == []


async def test_process_that_forks_faster_than_it_can_be_listed_is_killed(shared: DriverPeer) -> None:
    script = "import os, time\nwhile True:\n    if os.fork(): os._exit(0)\n    time.sleep(0.0001)"
    argv = ("sh", "-c", '"$@" & sleep 1000', "sh", sys.executable, "-S", "-c", script, shared.token)
    result = await shared.request(wire.RUN, **command(*argv, timeout_seconds=0.3))
    assert result["timed_out"]
    assert shared.living() == []


async def test_end_of_a_run_kills_no_process_of_servers_and_other_runs(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("daemonic"))
    other = await peer.begin(wire.RUN, **command("sh", "-c", "sleep 1000; :", peer.token, timeout_seconds=60))
    await peer.until_living(3)
    script = f"setsid sh -c 'trap \"\" TERM HUP; sleep 1000; :' {peer.token} & echo done"
    result = await peer.request(wire.RUN, **command("sh", "-c", script))
    assert result["stdout"] == "done\n"
    assert len(peer.living()) == 3
    assert await peer.text("scripted", "text", unit="still here", times=1) == "still here"
    await peer.cancel(other)
    with pytest.raises(WireError) as error:
        await peer.result(other)
    assert error.value.reason == "cancelled"
    assert len(peer.living()) == 2, "it is killed before it is answered"


def with_background_process(token: str, then: str = ":") -> list[str]:
    """A command that leaves a process with a cleared environment that still writes to its pipes."""
    background = f"env -i PATH=$PATH setsid sh -c 'while :; do echo tick; sleep 0.02; done; : {token}'"
    return ["sh", "-c", f"{background} & echo started; {then}"]


async def test_background_process_of_a_run_is_kept_until_the_freeze(peer: DriverPeer) -> None:
    result = await peer.request(wire.RUN, **command(*with_background_process(peer.token), leave=True))
    assert (result["exit_code"], result["stdout"].splitlines()[0]) == (0, "started")
    background = min(peer.living())
    for _ in range(3):
        await peer.request(wire.RUN, **command("sh", "-c", "sleep 0.1"))
    await peer.start(peer.scripted_server("daemonic"))
    await peer.request(wire.RUN, **command("true"))
    assert background in peer.living()
    await peer.request(wire.FREEZE)
    assert peer.living() == []


async def test_process_whose_main_thread_has_exited_is_killed(peer: DriverPeer) -> None:
    """/proc shows it as a zombie, but its other threads run. Beside a server, only its mark identifies it."""
    await peer.start(peer.scripted_server("plain"))
    script = (
        "import ctypes, os, threading, time\n"
        "ready, done = os.pipe()\n"
        "if os.fork():\n"
        "    print(os.read(ready, 20).decode())\n"
        "else:\n"
        "    os.setsid()\n"
        "    def work():\n"
        "        while ') Z ' not in open('/proc/self/stat').read():\n"
        "            time.sleep(0.01)\n"
        "        os.write(done, b'%d' % os.getpid())\n"
        "        time.sleep(1000)\n"
        "    threading.Thread(target=work).start()\n"
        "    ctypes.CDLL(None).pthread_exit(None)\n"
    )
    result = await peer.request(wire.RUN, **command(sys.executable, "-c", script))
    stat = Path(f"/proc/{int(result['stdout'])}/stat")
    await until(lambda: not stat.exists())


async def test_claimed_environment_takes_no_memory_of_the_driver(peer: DriverPeer, tmp_path: Path) -> None:
    """Beside a server, the driver reads the environments of processes that have left their run."""
    await peer.start(peer.scripted_server("plain"))
    program = Path(__file__).parent.parent / "sandboxes" / "claimed_environment.py"
    answer = tmp_path / "answer"
    script = f"""
(setsid {sys.executable} {program} 256 > {answer} &)
until grep -q . {answer}; do sleep 0.05; done; cat {answer}
"""
    result = await peer.request(wire.RUN, **command("sh", "-c", script))
    if result["stdout"] != "claimed\n":
        pytest.skip(f"this kernel lets nobody claim an environment: {result['stdout']}")
    status = (await anyio.Path(f"/proc/{peer.process.pid}/status").read_text()).splitlines()
    (peak_kib,) = (int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    assert peak_kib < 64 << 10
    await peer.close()
    assert peer.living() == []


def left(script: str, token: str, **params: Any) -> dict[str, Any]:
    """A run that exits and leaves a Python process with this script."""
    start = "import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', *sys.argv[1:]])"
    return command(sys.executable, "-S", "-c", start, f"import time; {script}", token, leave=True, **params)


async def test_processes_are_counted_unless_they_end_within_the_linger_time(peer: DriverPeer) -> None:
    with anyio.fail_after(BOUND_SECONDS / 2):
        ending = left("time.sleep(0.2)", peer.token, linger_seconds=BOUND_SECONDS)
        assert (await peer.request(wire.RUN, **ending))["background"] == 0
    lasting = left("time.sleep(1000)", peer.token, linger_seconds=0.1)
    assert (await peer.request(wire.RUN, **lasting))["background"] == 1
    assert len(peer.living()) == 1
    assert (await peer.request(wire.RUN, **command("true", leave=True)))["background"] == 0


async def test_run_cancelled_while_its_processes_linger_kills_them(shared: DriverPeer) -> None:
    request = await shared.begin(wire.RUN, **left("time.sleep(1000)", shared.token, linger_seconds=1000))
    await shared.until_living(1)
    # The first process ends soon; the cancellation may come before or after that.
    await anyio.sleep(0.2)
    await shared.cancel(request)
    with pytest.raises(WireError) as failed:
        await shared.result(request)
    assert failed.value.reason == "cancelled"
    await shared.until_living(0)
