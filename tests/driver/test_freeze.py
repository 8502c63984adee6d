"""`freeze`: kills every process except the driver, permanently."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from tests.driver.peer import BOUND_SECONDS, DriverPeer, WireError, command, driver, until

pytestmark = pytest.mark.anyio


def shell(script: str) -> dict[str, Any]:
    return command("sh", "-c", script)


async def test_freeze_kills_everything_and_refuses_calls_for_good(peer: DriverPeer, tmp_path: Path) -> None:
    await peer.start(peer.scripted_server("daemonic"), peer.scripted_server("plain", "plain"))
    run = await peer.begin(wire.RUN, **shell(f"sleep 1000; : {peer.token}"))
    call = await peer.begin_tool("scripted", "hang")
    start = await peer.begin_start(peer.scripted_server("silent", "silent"), deadline_seconds=1000)
    await peer.until_living(5)
    await peer.request(wire.FREEZE)
    assert peer.living() == []
    again = await peer.begin(wire.START, names=["scripted"], deadline_seconds=30)
    for number in (call, start, again, await peer.begin_tool("scripted", "text")):
        with pytest.raises(WireError) as error:
            await peer.result(number)
        assert error.value.reason == "frozen"
    assert (await peer.result(run))["signal"] == 9
    assert peer.notifications == []
    assert (await peer.request(wire.RUN, **shell("echo still")))["stdout"] == "still\n"
    assert await peer.request(wire.ARRANGE, steps=[{"make": f"{tmp_path}/folder"}]) == {}
    assert list(await peer.request(wire.FREEZE)) == ["stderr"]


async def test_freeze_lets_a_server_clean_up_when_its_stdin_closes(peer: DriverPeer, tmp_path: Path) -> None:
    """A server can finish writing a file or close a database before it is killed."""
    server = peer.scripted_server("plain")
    script = '"$0" "$@"; sleep 0.2; echo cleaned up > note; echo "cleaned up" >&2'
    server["args"] = ["-c", script, server["command"], *server["args"]]
    await peer.start({**server, "command": "sh", "cwd": str(tmp_path)})
    assert (await peer.request(wire.FREEZE))["stderr"]["scripted"].endswith("cleaned up\n")
    assert (tmp_path / "note").read_text() == "cleaned up\n"


@pytest.mark.parametrize(("count", "log"), [(2, "\x1b" * 9000), (9, "INFO a line of a log\n" * 900)])
async def test_freeze_cuts_what_talkative_servers_wrote_to_stderr(
    peer: DriverPeer, tmp_path: Path, count: int, log: str
) -> None:
    """Its response is a short one, and an attempt whose driver does not freeze is forfeited."""
    (tmp_path / "log").write_text(log)
    servers = [peer.scripted_server("plain", str(number)) for number in range(count)]
    for server in servers:
        server["args"] = ["-c", f'cat {tmp_path}/log >&2; exec "$0" "$@"', server["command"], *server["args"]]
    await peer.start(*[{**server, "command": "sh"} for server in servers])
    logs = (await peer.request(wire.FREEZE))["stderr"]
    assert len(logs) == count
    assert all(len(kept) > 2_000 and log.endswith(kept) for kept in logs.values())


def sleeps(*names: str) -> str:
    """A script that starts a sleeping process of each name, all in one process group."""
    return "".join(f"(exec -a '{name}' sleep 1000) & " for name in names) + "wait"


async def test_freeze_kills_everything_but_exempt_processes(python: str) -> None:
    async with driver(python, wrap=first_process()) as peer:
        tokens = [f"{name} {peer.token}" for name in ("forward --to 80", "forwarder", "worker")]
        script = sleeps(*tokens)
        run = await peer.begin(wire.RUN, **command("bash", "-c", script))
        await peer.until_living(4)
        await until(lambda: {"forward", "forwarder", "worker"} <= first_words(peer))
        await peer.start(peer.scripted_server("daemonic"))
        await peer.request(wire.FREEZE, spare=["forward --*", "nothing of this name"])
        assert (await peer.result(run))["signal"] == 9
        assert [line.split()[0] for line in commands(peer)] == ["forward"]
        assert await peer.request(wire.FREEZE) == {"stderr": {}}


async def test_exempt_process_survives_later_runs_but_not_the_driver(python: str) -> None:
    async with driver(python) as peer:
        script = sleeps(f"forward {peer.token}")
        await peer.begin(wire.RUN, **command("bash", "-c", script))
        await until(lambda: "forward" in first_words(peer))  # until exec it has the command line of its shell
        await peer.request(wire.FREEZE, spare=["forward *"])
        for _ in range(2):
            await peer.request(wire.RUN, **shell(f"sh -c 'sleep 1000; : {peer.token}' & :"))
        assert [line.split()[0] for line in commands(peer)] == ["forward"]
        await peer.close()
        assert peer.living() == []


async def test_process_that_matches_only_after_the_freeze_began_is_killed(
    peer: DriverPeer, tmp_path: Path
) -> None:
    rename = tmp_path / "rename"
    os.mkfifo(rename)
    script = f"read -r < {rename}; exec -a 'forward {peer.token}' sleep 1000"
    await peer.start(
        peer.scripted_server("stubborn", "stubborn")
    )  # because of it the freeze takes two seconds
    await peer.begin(wire.RUN, **command("bash", "-c", script))
    freeze = await peer.begin(wire.FREEZE, spare=["forward *"])
    await peer.request(wire.PING)  # answered once the freeze has begun and its exempt processes are chosen
    # The FIFO is open for both directions, so that neither opening nor writing waits for the process.
    with rename.open("r+b", buffering=0) as writer:
        writer.write(b"\n")
        await peer.result(freeze)
    assert peer.living() == []


def commands(peer: DriverPeer) -> list[str]:
    """The command lines of the peer's living processes."""
    lines = (Path(f"/proc/{pid}/cmdline").read_bytes() for pid in peer.living())
    return [line.replace(b"\0", b" ").decode() for line in lines]


def first_words(peer: DriverPeer) -> set[str]:
    """The names of the programs that the peer's living processes execute."""
    return {line.split()[0] for line in commands(peer) if line.strip()}


def first_process(*dropping: str) -> list[str]:
    """A command prefix that runs a command as first process of a new PID namespace; skips if not possible."""
    wrap = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *dropping]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode
    ):
        pytest.skip("no namespaces here")
    return wrap


async def test_first_process_kills_processes_that_are_not_its_descendants(python: str) -> None:
    async with driver(python, wrap=first_process()) as peer:
        await peer.start(peer.scripted_server("daemonic"), peer.scripted_server("plain", "other"))
        # `read` is a builtin: the number of processes does not depend on when the shell forks.
        with enter(peer, "sh", "-c", "read -r line", peer.token) as entered:
            try:
                await peer.until_living(5)  # one of them, nsenter itself, is outside of the namespace
                await peer.request(wire.FREEZE)
                assert entered.wait(timeout=BOUND_SECONDS) != 0
                assert peer.living() == []
            finally:
                entered.kill()
        result = await peer.request(wire.RUN, **shell("echo /proc/[0-9]*"))
        assert len(result["stdout"].split()) == 2  # the driver and sh


def enter(peer: DriverPeer, *command: str) -> subprocess.Popen[bytes]:
    """Start a process in the driver's namespaces, as `docker exec` does."""
    children = Path(f"/proc/{peer.process.pid}/task/{peer.process.pid}/children").read_text().split()
    enter_namespaces = ["nsenter", "--pid", "--mount", "-t", children[0]]
    return subprocess.Popen([*enter_namespaces, *command], stdin=subprocess.PIPE)


async def test_first_process_reaps_orphans(python: str) -> None:
    async with driver(python, wrap=first_process()) as peer:
        await peer.start(peer.scripted_server("plain"))
        await peer.request(wire.RUN, **shell("for i in 1 2 3 4 5; do (setsid sh -c : &) ; done; sleep 0.2"))
        with anyio.fail_after(BOUND_SECONDS):
            count_zombies = shell("cat /proc/*/stat | grep -c ') Z '")
            while (await peer.request(wire.RUN, **count_zombies))["stdout"] != "0\n":
                pass
