"""Networks of local sandboxes' own: they lead to other machines, and to nothing of this one."""

from __future__ import annotations

import os
import signal
import socket
import sys
from ipaddress import IPv4Network
from pathlib import Path
from threading import Thread

import anyio
import pytest

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.plugins.conformance.target import receive_all, receive_line
from decathlon_mcp.sandboxes.host.mounts import device_launcher
from decathlon_mcp.sandboxes.host.network import TUN, OwnNetwork
from decathlon_mcp.sandboxes.host.plugin import FOLDER
from decathlon_mcp.sandboxes.host.processes import ProcessId
from decathlon_mcp.sandboxes.host.sandbox_folder import HELPER_FILE, LEADER_FILE, read_process
from tests.sandboxes.conftest import Bench, open_to_everyone
from tests.sandboxes.outside import addresses_of_this_machine, listening_everywhere, outside

pytestmark = pytest.mark.anyio
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="creates network and mount namespaces")

GREETING = """
import socket
def greeting(address, port):
    try:
        with socket.create_connection((address, port), timeout=1) as peer:
            return peer.recv(100).decode()
    except OSError:
        return None
"""
ROUTE = """
lines = [line.split() for line in open("/proc/net/route")][1:]
gateway = next(socket.inet_ntoa(bytes.fromhex(line[2])[::-1]) for line in lines if line[1] == "00000000")
"""


async def output(bench: Bench, script: str) -> str:
    """What a script prints in a sandbox whose network is connected."""
    async with bench.provider.open(bench.python_spec(f"input()\n{script}")) as sandbox:
        await sandbox.stream.send(b"\n")
        return (await receive_all(sandbox)).decode() + sandbox.log_tail


@needs_root
async def test_another_machine_is_reached_and_no_address_of_this_one(networked: Bench) -> None:
    with outside() as other, listening_everywhere() as port:
        addresses = [*addresses_of_this_machine(), "0.0.0.0", "::", "localhost", socket.gethostname()]
        assert {"127.0.0.1", "::1", other.neighbour} <= set(addresses)
        addresses += ["169.254.169.254", "fd00:ec2::254", "::ffff:" + other.neighbour, "255.255.255.255"]
        script = f"""{GREETING}{ROUTE}
addresses = {addresses!r} + [gateway, "10.0.2.2", "10.0.2.3"]
print(greeting({other.address!r}, {other.port}), gateway)
print([address for address in addresses if greeting(address, {port}) is not None])
"""
        assert greeting_here(other.neighbour, port) == "inside"
        greeting, reached = (await output(networked, script)).splitlines()
    assert greeting.split()[0] == "outside"
    assert reached == "[]"


def greeting_here(address: str, port: int) -> str:
    with socket.create_connection((address, port), timeout=3) as peer:
        return peer.recv(100).decode()


async def test_abstract_sockets_and_datagrams_of_this_machine_are_not_reached(networked: Bench) -> None:
    with socket.socket(socket.AF_UNIX) as abstract, socket.socket(type=socket.SOCK_DGRAM) as datagrams:
        abstract.bind("\0" + networked.owner)
        abstract.listen()
        datagrams.bind(("0.0.0.0", 0))
        datagrams.setblocking(False)
        addresses = [address for address in addresses_of_this_machine() if ":" not in address]
        script = f"""import socket{ROUTE}
with socket.socket(socket.AF_UNIX) as peer:
    print(peer.connect_ex({chr(0) + networked.owner!r}) == 0)
with socket.socket(type=socket.SOCK_DGRAM) as peer:
    for address in {addresses!r} + [gateway, "224.0.0.1", "10.0.2.2"]:
        try:
            peer.sendto(b"datagram", (address, {datagrams.getsockname()[1]}))
        except OSError:
            pass
"""
        assert await output(networked, script) == "False\n"
        with pytest.raises(BlockingIOError):
            datagrams.recv(100)


async def test_two_sandboxes_do_not_reach_each_other(networked: Bench) -> None:
    listener = """
import socket
with socket.create_server(("0.0.0.0", 7777)) as server, socket.socket(type=socket.SOCK_DGRAM) as probe:
    input()
    probe.connect(("192.0.2.1", 9))
    print(probe.getsockname()[0], flush=True)
    input()
    print(server.accept()[0].send(b"reached"))
"""
    async with networked.provider.open(networked.python_spec(listener)) as sandbox:
        await sandbox.stream.send(b"\n")
        address = (await sandbox.stream.receive()).decode().strip()
        script = f"{GREETING}print(greeting({address!r}, 7777))"
        assert await output(networked, script) == "None\n"


@needs_root
@pytest.mark.usefixtures("own_network")
async def test_names_are_resolved_by_a_name_server_on_this_machines_loopback(tmp_path: Path) -> None:
    """As with systemd-resolved. The program has its own /etc/resolv.conf."""
    configuration = tmp_path / "resolv.conf"
    with socket.socket(type=socket.SOCK_DGRAM) as server:
        server.bind(("127.0.0.97", 53))
        answers = Thread(target=_answer_queries, args=(server,))
        answers.start()
        configuration.write_text("nameserver 127.0.0.97\nsearch example.test\noptions timeout:3\n")
        script = "import socket\nprint(socket.gethostbyname('somewhere.example'), *open('/etc/resolv.conf'))"
        program = [sys.executable, "-m", "tests.sandboxes.networked", str(tmp_path / "sandboxes"), script]
        replace = f'mount --bind {configuration} $(readlink -f /etc/resolv.conf) && exec "$@"'
        try:
            result = await anyio.run_process(
                ["unshare", "--mount", "sh", "-c", replace, "sh", *program], check=False
            )
        finally:
            server.sendto(b"", server.getsockname())
            answers.join()
    assert result.stdout.decode() == (
        "198.51.100.7 nameserver 10.0.2.3\n search example.test\n options timeout:3\n\n"
    ), result.stderr.decode()


def _answer_queries(server: socket.socket) -> None:
    """Answer with messages of DNS (RFC 1035) with one address, for its name, until an empty query."""
    while True:
        query, peer = server.recvfrom(512)
        if not query:
            return
        question = query[12 : query.index(b"\0", 12) + 5]
        is_address = question.endswith(b"\0\1\0\1")
        head = query[:2] + b"\x81\x80\0\1" + (b"\0\1" if is_address else b"\0\0") + bytes(4)
        record = b"\xc0\x0c\0\1\0\1\0\0\0\1\0\4" + socket.inet_aton("198.51.100.7")
        server.sendto(head + question + record * is_address, peer)


@needs_root
@pytest.mark.usefixtures("own_network")
async def test_an_ordinary_user_has_such_a_network() -> None:
    """Where everybody can open /dev/net/tun, as on most machines."""
    with outside() as other, listening_everywhere() as port, open_to_everyone() as folder:
        script = f"""{GREETING}
print(greeting({other.address!r}, {other.port}), greeting({other.neighbour!r}, {port}))
"""
        program = [sys.executable, "-m", "tests.sandboxes.networked", str(folder), script, "1000000"]
        result = await anyio.run_process([*device_launcher(TUN), *program], check=False)
    assert result.stdout == b"outside None\n", result.stderr.decode()


async def test_helper_ends_with_the_sandbox_also_without_a_server(networked: Bench) -> None:
    spec = networked.python_spec("import signal\nsignal.pause()", survives=True)
    await networked.leave_behind([spec], "none")
    folder = sandboxes(networked) / spec.name
    helper, first = read_process(folder, HELPER_FILE), read_process(folder, LEADER_FILE)
    assert helper is not None
    assert first is not None
    assert ProcessId.of(helper.pid) == helper
    pidfd = os.pidfd_open(helper.pid)
    try:
        os.kill(first.pid, signal.SIGKILL)
        with anyio.fail_after(10):
            await anyio.wait_readable(pidfd)
    finally:
        os.close(pidfd)
    assert await networked.provider.sweep(networked.former_owner) == 1


@needs_root
async def test_network_is_there_after_the_server_was_killed(networked: Bench) -> None:
    script = f"{GREETING}\nwhile line := input():\n    print(greeting(*line.split()), flush=True)"
    spec = networked.python_spec(script, survives=True)
    with outside() as other, listening_everywhere() as port:
        await networked.leave_behind([spec], "none")
        async with networked.provider.reattach(networked.former_owner, spec) as sandbox:
            await sandbox.stream.send(f"{other.address} {other.port}\n".encode())
            assert await receive_line(sandbox) == "outside"
            await sandbox.stream.send(f"{other.neighbour} {port}\n".encode())
            assert await receive_line(sandbox) == "None"


async def test_helper_that_does_not_start_is_an_error_and_leaves_nothing(
    networked: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    network = OwnNetwork("/usr/bin/env", IPv4Network("10.0.2.0/24"))
    monkeypatch.setattr(OwnNetwork, "of_this_machine", lambda: network)
    with pytest.raises(ProviderUnavailableError, match="connected no network"):
        async with networked.provider.open(networked.new_spec()):
            pass
    assert "unrecognized option" in str([vars(record) for record in caplog.records])
    await networked.assert_nothing_left()


def sandboxes(bench: Bench) -> Path:
    return bench.scratch / FOLDER
