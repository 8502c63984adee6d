"""The wire protocol: boot, framing, ids, lease, and every way in which the driver ends."""

from __future__ import annotations

import base64
import marshal
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
from decathlon_sandbox import wire

from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.driver.client import MARSHAL_VERSION, boot_message
from tests.driver.peer import BOUND_SECONDS, FIRST_ID, DriverPeer, WireError, command, driver

pytestmark = pytest.mark.anyio

SLOW_MODULES = {
    *("asyncio", "concurrent.futures", "ctypes", "dataclasses", "http.client", "inspect", "logging", "queue"),
    *("shutil", "socket", "ssl", "tempfile", "traceback", "typing", "urllib.parse"),
}


def slow_run(seconds: float = 1000.0, **params: Any) -> dict[str, Any]:
    return command("sleep", str(seconds), **{"timeout_seconds": 1000, **params})


async def test_driver_runs_from_its_source_where_python_has_another_bytecode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    modules: dict[str, bytes] = marshal.loads(boot_message().partition(b"\n")[2])
    # The names of code objects end with the version of their bytecode.
    body = marshal.dumps({name.replace(" ", " 00"): text for name, text in modules.items()}, MARSHAL_VERSION)
    monkeypatch.setattr("tests.driver.peer.boot_message", lambda: b"%d\n%b" % (len(body), body))
    async with driver(sys.executable) as peer:
        assert await peer.request(wire.PING) == {}


async def test_no_module_is_imported_from_the_file_system_after_the_first_child(
    python: str, tmp_path: Path
) -> None:
    """An agent may change those files. The driver's own modules come from memory.

    Archives are unpacked before anything of an agent runs, and import `tarfile` with what that needs.
    """
    async with driver(python, options=["-X", "importtime"]) as peer:
        archive = base64.b64encode(pack_files({"file": b"1"})).decode()
        await peer.request(wire.ARRANGE, steps=[{"unpack": f"{tmp_path}/a", "tar": archive}])
        await peer.start(peer.scripted_server("plain"))
        await peer.request(wire.RUN, **slow_run(0))
        steps: list[dict[str, Any]] = [
            {"make": f"{tmp_path}/a"},
            {"copy": f"{tmp_path}/a", "to": f"{tmp_path}/b"},
            {"remove": f"{tmp_path}/b"},
        ]
        await peer.request(wire.ARRANGE, steps=[*steps, {"absent": ["x"], "under": str(tmp_path)}])
        for tool in ("half_utf8", "die"):
            with pytest.raises(WireError):
                await peer.tool("scripted", tool, unit="a")
        await peer.request(wire.FREEZE)
        await peer.close()
        imported = [
            line.rpartition("|")[2].strip() for line in peer.log.splitlines() if "import time:" in line
        ]
    foreign = [name for name in imported if not name.startswith("decathlon_sandbox")]
    first_child = imported.index("decathlon_sandbox.child_processes")
    assert not SLOW_MODULES & set(imported) - {"ctypes", "shutil"}
    assert set(imported[first_child + 1 :]) & set(foreign) <= {
        "ctypes",
        "_ctypes",
        "_struct",
        "struct",
        "ctypes._endian",
    }


def test_driver_exits_if_its_source_does_not_arrive_in_time() -> None:
    """The first process of a container cannot rely on the end of its stdin."""
    quick = wire.LOADER.replace(f"alarm({wire.LOADER_SECONDS})", "alarm(1)")
    assert quick != wire.LOADER
    with subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", quick], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        process.stdin.write(boot_message()[:5000])
        process.stdin.flush()
        assert process.wait(BOUND_SECONDS) == 0


async def test_message_that_cannot_be_read_fails_its_request_and_no_other(peer: DriverPeer) -> None:
    """Such as a tool's argument that is a number of 5,000 digits."""
    for number, payload in enumerate((b"9" * 5000, b"[" * 100_000 + b"]" * 100_000), FIRST_ID + 1000):
        await peer.send_payload(b'{"jsonrpc":"2.0","id":%d,"method":"call","params":%b}' % (number, payload))
        with pytest.raises(WireError) as error:
            await peer.result(number)
        assert error.value.reason == "parse_error"
    assert await peer.request(wire.PING) == {}


async def test_repeated_id_is_not_run_or_answered_twice(peer: DriverPeer) -> None:
    slow = await peer.begin(wire.RUN, **slow_run(0.2))
    await peer.send({"id": slow, "method": wire.PING, "params": {}})
    assert (await peer.result(slow))["exit_code"] == 0
    assert await peer.request(wire.PING) == {}


async def test_repeated_id_whose_answer_was_acknowledged_is_an_error(peer: DriverPeer) -> None:
    """A server that asks again has lost the answer, and must not wait for it."""
    request_id = await peer.begin(wire.PING)
    assert await peer.result(request_id) == {}
    del peer.responses[request_id]
    await peer.send({"id": request_id, "method": wire.PING, "params": {}})
    with pytest.raises(WireError, match="was answered before") as error:
        await peer.result(request_id)
    assert error.value.reason == "invalid_request"


async def test_end_of_stdin_ends_the_driver_and_all_its_processes(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("daemonic", "one"), peer.scripted_server("stubborn", "two"))
    background = f"env -i PATH=$PATH setsid sh -c 'sleep 1000; : {peer.token}' &"
    await peer.request(wire.RUN, **command("sh", "-c", background, leave=True))
    await peer.begin(wire.RUN, **slow_run(argv=["sh", "-c", "sleep 1000", peer.token]))
    await peer.until_living(5)
    assert await peer.close() == 0
    assert peer.living() == []


async def test_signal_ends_the_driver_and_all_its_processes(peer: DriverPeer) -> None:
    await peer.start(peer.scripted_server("daemonic"))
    peer.process.send_signal(signal.SIGTERM)
    with anyio.fail_after(BOUND_SECONDS):
        assert await peer.process.wait() == 0
    assert peer.living() == []


async def test_lease_of_a_sandbox_that_is_about_to_be_saved_begins_again_once(python: str) -> None:
    async with driver(python, survive_seconds=2) as peer:
        assert await peer.request(wire.PING, saving=True) == {}
        began_at = time.monotonic()
        with anyio.fail_after(BOUND_SECONDS):
            assert await peer.process.wait() == 0
        assert time.monotonic() - began_at > 3.5


async def test_driver_ends_with_all_its_processes_when_no_server_comes(python: str) -> None:
    async with driver(python, survive_seconds=3) as peer:
        await peer.start(peer.scripted_server("daemonic"), peer.scripted_server("stubborn", "stubborn"))
        assert await peer.request(wire.PING) == {}
        ended_at = time.monotonic()
        assert await peer.close() == 0
        assert time.monotonic() - ended_at > 2.5  # the lease began before
        assert peer.living() == []


async def test_driver_ends_with_all_its_processes_when_no_whole_line_comes_in_time(python: str) -> None:
    """Bytes alone do not renew its lease."""
    async with driver(python, survive_seconds=2) as peer:
        await peer.start(peer.scripted_server("daemonic"))
        for _ in range(4):
            await anyio.sleep(0.6)
            assert await peer.request(wire.PING) == {}
        began_at = time.monotonic()
        for byte in b"12345678":
            with suppress(anyio.BrokenResourceError):
                await peer.send_bytes(bytes([byte]))
            await anyio.sleep(0.4)
        with anyio.fail_after(BOUND_SECONDS):
            assert await peer.process.wait() == 0
        assert time.monotonic() - began_at > 1.9
        assert peer.living() == []
        assert "nothing received for 2 s" in peer.log


async def test_backpressure_bounds_memory_and_loses_no_reply(python: str) -> None:
    """The servers send ten times what fits into pipes and buffers."""
    process = await anyio.open_process([python, *wire.BOOT_COMMAND[1:]], stderr=None)
    async with process:
        unread = DriverPeer(process)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unread.receive)
            await unread.boot()
            await unread.until(lambda: unread.is_attached)
            await unread.start(unread.scripted_server("plain"))
            tasks.cancel_scope.cancel()
        for _ in range(10):
            await unread.begin_tool("scripted", "text", unit="x" * 1000, times=1000)
        await unread.begin_tool("scripted", "flood_messages", times=20_000)
        await anyio.sleep(1.0)  # the driver must not read more; there is no event for that
        assert _resident_mib(process.pid) < 60
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(unread.receive)
            for number in range(FIRST_ID + 2, FIRST_ID + 12):
                assert len((await unread.result(number))["result"]["content"][0]["text"]) == 1_000_000
            await unread.result(FIRST_ID + 12)
            await unread.close()
        messages = sum(method == wire.MESSAGE for method, _ in unread.notifications)
        assert wire.NOTIFICATIONS_BURST <= messages < 20_000


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / (1 << 20)


# Room for responses


async def begin_large(peer: DriverPeer, tool: str = "hang") -> int:
    """Begin a call whose reply may have 60 MiB. There is room for three of them."""
    return await peer.begin_tool("scripted", tool, max_bytes=60 << 20, unit="x", times=3)


async def test_request_without_room_for_its_response_waits(python: str) -> None:
    async with driver(python) as peer:
        await peer.start(peer.scripted_server("plain"))
        running = [await begin_large(peer) for _ in range(3)]
        waiting, cancelled = await begin_large(peer, "text"), await begin_large(peer, "die")
        assert await peer.request(wire.PING) == {}
        await peer.cancel(cancelled)
        with pytest.raises(WireError) as error:
            await peer.result(cancelled)
        assert error.value.reason == "cancelled"
        assert waiting not in peer.responses
        await peer.cancel(running[0])
        reply = await peer.result(waiting)
        assert reply["result"]["content"][0]["text"] == "xxx"
        assert await peer.text("scripted", "text", unit="y", times=2) == "yy"
