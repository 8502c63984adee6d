"""Local sandboxes in namespaces: nothing of the machine but programs can be read, and none of it changed.

Servers, whose child processes attack, start by themselves and as forks (`--preload`).
"""

from __future__ import annotations

import secrets
import shutil
import socket
import sys
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from tests.cheats.agent import (
    LOW_LIMITS,
    SUITE,
    CheatServer,
    cheat_server,
    forked_cheat_server,
    forked_suite,
    open_episode,
    replace_workspaces,
)
from tests.probe.serving import serving
from tests.sandboxes.outside import addresses_of_this_machine

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

ANSWER = "tasks/cheats/sum-prices/groundtruth_workspace/total.json"
SECRET = "DECATHLON_TEST_SECRET_VARIABLE"
# AF_UNIX names that begin with a zero byte belong to the network namespace.
START_EPISODE = """
import json, urllib.request
def start_episodes(addresses, port):
    client = {"protocolVersion": "2025-06-18", "capabilities": {}}
    client["clientInfo"] = {"name": "a", "version": "1"}
    body = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": client}
    headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
    headers["host"] = f"127.0.0.1:{port}"
    for address in addresses:
        host = f"[{address}]" if ":" in address else address
        url = f"http://{host}:{port}/tasks/sum-prices/mcp"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=2) as reply:
                print("started an episode through", address, reply.status)
        except OSError:
            pass
    print("done")
"""
REACH = """
import socket
def reaches(family, address):
    with socket.socket(family) as peer:
        peer.settimeout(1)
        return peer.connect_ex(address) == 0
"""


@pytest.fixture(scope="module", name="prefix")
def prefix_of_the_interpreter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that belongs to the server's Python, as an installed package's would."""
    folder = tmp_path_factory.mktemp("prefix")
    folder.chmod(0o755)
    (folder / "notes.txt").write_text("of the operator\n")
    prefix = folder / "lib"
    prefix.mkdir(mode=0o755)
    (prefix / "library.py").write_text("answer = 42\n")
    forked_suite(prefix)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "base_exec_prefix", str(folder))
        patch.setenv(SECRET, "secret")
        yield prefix


@pytest.fixture(
    scope="module", name="cheats", params=["by themselves", pytest.param("forks", marks=pytest.mark.long)]
)
async def cheat_server_in_namespaces(
    request: pytest.FixtureRequest, prefix: Path, anyio_backend: object, namespaces: None
) -> AsyncGenerator[CheatServer]:
    forks = request.param == "forks"
    settings: dict[str, Any] = {"suite": (str(prefix / "suite"),), "provider": "host"}
    settings |= {"isolation": "namespaces", "preload": forks}
    shutil.rmtree(prefix / "state", ignore_errors=True)
    async with (
        serving(prefix / "state", **settings, **LOW_LIMITS) as served,
        forked_cheat_server(served) if forks else cheat_server(served) as server,
    ):
        yield server


async def test_suite_and_state_folder_in_a_folder_of_programs_are_empty(
    cheats: CheatServer, prefix: Path
) -> None:
    assert (prefix / "suite" / ANSWER).is_file()
    assert (prefix / "state" / "episodes").is_dir()
    async with cheats.unrewarded_episode() as agent:
        assert await agent.shell(f"ls -A {prefix}") == "library.py\nstate\nsuite\n"
        assert await agent.shell(f"ls -A {prefix.parent}") == "lib\n"
        assert await agent.shell(f"ls -A {prefix}/suite {prefix}/state | grep -v :") == "\n"
        assert "Read-only" in await agent.shell(f"touch {prefix}/suite/file")
        assert await agent.shell(f"cp {prefix}/suite/{ANSWER} report.json; ls report.json 2>/dev/null") != ""


async def test_homes_and_other_folders_of_the_machine_are_absent(cheats: CheatServer, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    here = Path(__file__).parent
    async with cheats.unrewarded_episode() as agent:
        assert await agent.shell("ls /home; ls -A $HOME /run /var/tmp | grep -v '^/\\|^$'") == "agent\n"
        # There is what leads to the server's Python, and nothing else.
        shown = {*Path(sys.base_prefix).parents, *Path(sys.prefix).parents}
        system = {*map(Path, ("/sys", "/opt", "/srv", "/var/lib", "/boot", "/etc/shadow", "/etc/ssh"))}
        for path in (tmp_path, here, *(system - shown)):
            assert await agent.shell(f"test -e {path} && echo there") == "", path
        expected = sorted(path.name for path in Path.home().iterdir() if path in shown)
        assert (await agent.shell(f"ls -A {Path.home()} 2>/dev/null")).split() == expected


async def test_people_and_variables_of_the_machine_are_unknown(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode() as agent:
        assert (await agent.shell("cut -d: -f1 /etc/passwd")).split() == ["agent", "nobody"]
        assert SECRET not in await agent.shell("env; tr '\\0' '\\n' < /proc/1/environ")
        assert (await agent.shell("id -un; hostname")).split() == ["agent", "sandbox"]


async def test_network_has_a_loopback_interface_of_its_own(cheats: CheatServer) -> None:
    name = f"\0decathlon-{secrets.token_hex(8)}"
    with socket.create_server(("127.0.0.1", 0)) as service, socket.socket(socket.AF_UNIX) as abstract:
        abstract.bind(name)
        abstract.listen()
        port = service.getsockname()[1]
        program = f"""{REACH}
print(reaches(socket.AF_INET, ("127.0.0.1", {port})), reaches(socket.AF_UNIX, {name!r}))
with socket.create_server(("127.0.0.1", 0)) as own:
    print(reaches(socket.AF_INET, own.getsockname()))
"""
        async with cheats.unrewarded_episode() as agent:
            assert (await agent.python(program)).split() == ["False", "False", "True"]


@pytest.mark.usefixtures("own_network")
async def test_server_is_no_oracle_for_an_agent_with_a_network(prefix: Path) -> None:
    """It has no tokens, so that any client that reaches it can play the task and evaluate guesses."""
    settings = {"suite": (str(prefix / "suite"),), "provider": "host", "isolation": "namespaces"}
    async with (
        serving(prefix / "networked", **settings, **LOW_LIMITS, network="outbound") as served,
        cheat_server(served) as server,
        server.unrewarded_episode() as agent,
    ):
        port = int(served.url.rpartition(":")[2])
        before = len(served.episodes.live)
        addresses = ["localhost", "127.0.0.1", "10.0.2.2", "10.0.2.3", *addresses_of_this_machine()]
        assert await agent.python(f"{START_EPISODE}start_episodes({addresses!r}, {port})") == "done\n"
        assert len(served.episodes.live) == before
        assert "tap0" in await agent.shell("cat /proc/net/dev")


async def test_scratch_folder_is_private(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode() as first, cheats.episode("sum-prices") as second:
        files = [f"{folder}/{secrets.token_hex(8)}" for folder in ("/tmp", "/var/tmp", "/dev/shm", "/run")]
        for file in files:
            assert await first.shell(f"echo text > {file}; cat {file}") == "text\n"
            assert "No such file" in await second.shell(f"cat {file}")
            assert not await anyio.Path(file).exists()


async def test_programs_of_the_machine_cannot_be_changed(cheats: CheatServer, prefix: Path) -> None:
    async with cheats.unrewarded_episode() as agent:
        # The folder of a virtual environment may lie in /tmp, of which every sandbox has its own.
        pythons = (f"{prefix}/file", f"{sys.prefix}/lib/file")
        for path in ("/file", "/usr/file", "/etc/file", *pythons, "/dev/file"):
            assert "Read-only" in await agent.shell(f"touch {path}"), path
        assert await agent.shell("echo 1 > /proc/sys/kernel/panic; chmod 0 /dev/null; stat -c %a /dev/null")
    assert (await anyio.Path("/dev/null").stat()).st_mode & 0o666 == 0o666


async def test_processes_have_no_capabilities_and_see_only_their_own(cheats: CheatServer) -> None:
    async with cheats.unrewarded_episode() as agent:
        status = await agent.shell("grep -h '^CapEff\\|^CapBnd\\|^NoNewPrivs\\|^Seccomp:' /proc/self/status")
        values = dict(line.split(":\t") for line in status.splitlines())
        assert set(values.values()) == {"0" * 16, "1", "2"}, status
        for command in ("unshare -U true", "mount -t tmpfs none /tmp", "chroot /", "dmesg"):
            assert await agent.shell(f"{command} > /dev/null 2>&1 || echo refused") == "refused\n", command
        processes = await agent.shell("cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "pytest" not in processes
        assert "decathlon_mcp" not in processes


async def test_honest_work_is_rewarded_and_the_verdict_names_the_isolation(cheats: CheatServer) -> None:
    async with cheats.episode("sum-prices") as agent:
        assert await agent.shell("pwd") == "/episode/workspace\n"
        await agent.shell("""echo '{"total": 70}' > report.json""")
        verdict = await agent.verdict()
    assert (verdict["reward"], verdict["isolation"]) == (1.0, "namespaces"), verdict


@pytest.mark.long
async def test_workspace_that_is_no_folder_is_graded_as_empty(cheats: CheatServer) -> None:
    await replace_workspaces(cheats.served)


@pytest.mark.usefixtures("namespaces")
async def test_workspace_that_leaves_no_room_for_the_attempts_log_is_forfeited(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"provider": "host", "isolation": "namespaces", "memory_mib": 128}
    async with serving(tmp_path, suite=(SUITE,), **settings) as served:
        async with open_episode(served, "sum-prices") as agent:
            for _ in range(4):
                await agent.echo("x" * (1 << 20))
            # Of the 64 MiB that a grader has, also for the log.
            await agent.shell("truncate --size 58M fill")
            verdict = await agent.verdict()
    assert (verdict["status"], verdict.get("reward")) == ("forfeited", 0.0), verdict
