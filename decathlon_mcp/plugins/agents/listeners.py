"""Opens listening sockets in the network that it is started in, and sends them to another process.

    python3 -I -S -c SOURCE DESCRIPTOR '[[ADDRESS, PORT], ...]'

The loopback interface gets the addresses that it lacks. The descriptors of the sockets are sent in one
message through the socket with this descriptor. Runs outside of a sandbox, as a user who may change its
network. Standard library only, any Python from 3.10.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys

SIOCSIFADDR = 0x8916


def main() -> None:
    """Open and send the sockets."""
    listeners = [
        listen(address, port, alias) for alias, (address, port) in enumerate(json.loads(sys.argv[2]))
    ]
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        socket.send_fds(channel, [b"1"], [listener.fileno() for listener in listeners])


def listen(address: str, port: int, alias: int) -> socket.socket:
    """A listening socket at an IPv4 address."""
    if not address.startswith("127."):
        name, value = f"lo:{alias}".encode(), socket.inet_aton(address)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
            fcntl.ioctl(
                control, SIOCSIFADDR, struct.pack("16sH2s4s8s", name, socket.AF_INET, b"", value, b"")
            )
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, port))
    listener.listen(128)
    return listener


if __name__ == "__main__":
    main()
