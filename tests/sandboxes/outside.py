"""Machines for a sandbox to reach: another one than this, and servers on every address of this one."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Thread

SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as server:
    print(server.getsockname()[1], flush=True)
    while True:
        with server.accept()[0] as peer:
            peer.sendall(b"outside")
"""


@dataclass(frozen=True, slots=True)
class Outside:
    """A network namespace that stands for another machine, with a server that greets.

    `neighbour` is this machine's address in their common network.
    """

    address: str
    port: int
    neighbour: str


@contextmanager
def outside() -> Generator[Outside]:
    """Another machine in a network of its own. Needs root, ip(8)."""
    name = f"dt{secrets.token_hex(4)}"
    # Of the range for benchmarks of networks; another one for each test that runs at the same time.
    network = ipaddress.ip_network((0xC6120000 + (os.getpid() % 0x3FFF) * 8 + 0x1000, 29), strict=False)
    neighbour, address = str(network[1]), str(network[2])
    with ExitStack() as stack:
        _ip("netns", "add", name)
        stack.callback(_ip, "netns", "delete", name)
        _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("address", "add", f"{neighbour}/29", "dev", name)
        _ip("link", "set", name, "up")
        for arguments in (("address", "add", f"{address}/29", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _ip("-n", name, *arguments)
        command = ["ip", "netns", "exec", name, sys.executable, "-I", "-S", "-c", SERVER, address]
        server = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        stack.callback(server.kill)
        assert server.stdout is not None
        yield Outside(address, int(server.stdout.readline()), neighbour)


@contextmanager
def listening_everywhere() -> Generator[int]:
    """A server on every address of this machine, IPv6 and IPv4, that greets; yields its port."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        Thread(target=_greet, args=(server,), daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def _greet(server: socket.socket) -> None:
    while True:
        try:
            peer, _ = server.accept()
        except OSError:
            return
        with peer:
            peer.sendall(b"inside")


def addresses_of_this_machine() -> Iterator[str]:
    """As ip(8) shows them, of every interface."""
    output = subprocess.run(["ip", "-oneline", "address"], capture_output=True, text=True, check=True).stdout
    for line in output.splitlines():
        address = line.split()[3].partition("/")[0]
        yield f"{address}%tap0" if address.startswith("fe80") else address


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
