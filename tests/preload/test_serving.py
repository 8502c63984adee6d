"""`--preload` on a whole server: what is learnt, and what is left when the server dies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anyio
import pytest

from benchmarks.wire_client import wire_client
from decathlon_mcp.sandboxes.host.processes import ProcessId, is_alive, read_children
from tests.survival.servers import supervised_server

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SUITE = str(Path(__file__).parents[2] / "benchmarks/suite")


async def play(url: str) -> None:
    async with wire_client(f"{url}/tasks/note/mcp") as client:
        await client.request("tools/call", {"name": "notes__note", "arguments": {"text": "right"}})
        await client.end()


def preloaders(pid: int) -> list[ProcessId]:
    """The children of a server that run its task's program outside of sandboxes."""
    own = Path("/proc/self/ns/pid").readlink()
    found: list[ProcessId] = []
    for child in read_children(pid):
        command = Path(f"/proc/{child}/cmdline").read_bytes()
        if b"notes_server" in command and Path(f"/proc/{child}/ns/pid").readlink() == own:
            process = ProcessId.of(child)
            assert process is not None
            found.append(process)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root sees the processes of a sandbox")
@pytest.mark.timeout(300)
async def test_libraries_are_learnt_at_the_first_set_up_and_kept_for_the_next_server(
    tmp_path: Path, namespaces: None
) -> None:
    state, options = tmp_path / "state", ("--no-supervisor", "--isolation", "namespaces", "--preload")
    async with supervised_server(state, *options, suite=SUITE) as server:
        await play(server.url)
        with anyio.fail_after(90):
            while not (state / "preload.json").exists():  # noqa: ASYNC110
                await anyio.sleep(0.1)
        (program,) = json.loads((state / "preload.json").read_bytes())["programs"].values()
        assert "mcp.server.lowlevel" in program["names"]
        # The server's own module is run by the fork.
        assert not any(name.startswith("notes") for name in program["names"])
        with anyio.fail_after(90):
            while len(preloaders(server.process.pid)) != 1:  # noqa: ASYNC110
                await anyio.sleep(0.1)
        await play(server.url)
        left = preloaders(server.process.pid)
    assert not any(map(is_alive, left))
    async with supervised_server(state, *options, suite=SUITE) as server:
        await play(server.url)
        left = preloaders(server.process.pid)
        assert len(left) == 1
        server.process.kill()
        with anyio.fail_after(30):
            while any(map(is_alive, left)):  # noqa: ASYNC110
                await anyio.sleep(0.05)
