"""Network access: a sandbox with a network cannot reach other sandboxes or the server."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import pytest

from tests.cheats.agent import LOW_LIMITS, SUITE, CheatServer, cheat_server
from tests.probe.serving import serving

pytestmark = [pytest.mark.anyio, pytest.mark.docker]

LISTENER = """
import os, socket
probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
probe.connect(("192.0.2.1", 9))
print(probe.getsockname()[0])
listener = socket.create_server(("0.0.0.0", 7777))
if os.fork() == 0:
    os.setsid()
    while True:
        listener.accept()[0].sendall(b"reached")
"""
REACHED_FUNCTION = """
import socket
def reached(host, port):
    try:
        with socket.create_connection((host, port), timeout=1) as peer:
            return peer.recv(100) != b""
    except OSError:
        return False
"""


@pytest.fixture(scope="module", name="networked")
async def networked_cheat_server(
    test_image: str, tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[CheatServer]:
    state = tmp_path_factory.mktemp("state")
    settings = {"suite": (SUITE,), "provider": "docker", "image": test_image, "network": "outbound"}
    async with serving(state, **settings, **LOW_LIMITS) as served, cheat_server(served) as server:
        yield server


async def test_sandbox_cannot_reach_another_by_network(networked: CheatServer) -> None:
    async with networked.episode("sum-prices") as other:
        address = (await other.python(LISTENER)).strip()
        assert await other.python(f"{REACHED_FUNCTION}print(reached({address!r}, 7777))") == "True\n"
        async with networked.unrewarded_episode() as agent:
            names = (address, f"decathlon-{other.public_id}-agent", other.public_id)
            assert (
                await agent.python(f"{REACHED_FUNCTION}print([n for n in {names} if reached(n, 7777)])")
                == "[]\n"
            )
            assert await agent.shell("ls /sys/class/net") == "eth0\nlo\n"


async def test_sandbox_cannot_reach_the_server_by_network(networked: CheatServer) -> None:
    """By default the server listens on loopback only; anywhere else it requires tokens."""
    port = int(networked.served.url.rpartition(":")[2])
    async with networked.unrewarded_episode() as agent:
        program = f"""
import ipaddress
route = open("/proc/net/route").read().splitlines()[1].split()[2]
gateway = str(ipaddress.ip_address(bytes.fromhex(route)[::-1]))
print(reached(gateway, {port}), reached("127.0.0.1", {port}), reached("host.docker.internal", {port}))
"""
        assert await agent.python(REACHED_FUNCTION + program) == "False False False\n"
        for path in ("/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock"):
            assert await agent.shell(f"test -e {path} && echo there") == ""
