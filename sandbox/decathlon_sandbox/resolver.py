"""`resolve`: a DNS server on the sandbox's loopback by which every host name leads to the loopback itself.

Together with forwarded ports, it leads programs to a proxy that ignore the variables for one.
"""

from __future__ import annotations

import socket
import struct

from decathlon_sandbox import wire
from decathlon_sandbox.rpc import RequestError, describe_error

TYPE_CHECKING = False
if TYPE_CHECKING:
    from decathlon_sandbox.event_loop import EventLoop

PORT = 53
MAX_QUERY_BYTES = 4096
HEADER_BYTES = 12
MAX_NAME_BYTES = 255
TTL_SECONDS = 60
TYPE_A = 1
CLASS_INTERNET = 1
QUERIES_AT_ONCE = 64
"""Answered before other events of the loop get their turn."""
_OPCODE_AND_ANSWER = 0xF800
_RECURSION_DESIRED = 0x0100
_ANSWER_WITH_RECURSION = 0x8080


class Resolver:
    """Answers queries until the driver ends. IPv4 only: there are no IPv6 addresses."""

    def __init__(self, loop: EventLoop) -> None:
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind(("127.0.0.1", PORT))
        except OSError as error:
            self._socket.close()
            message = f"port {PORT} cannot be listened on: {describe_error(error)}"
            raise RequestError(wire.NETWORK, message) from None
        self._socket.setblocking(False)
        loop.add_reader(self._socket.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        for _ in range(QUERIES_AT_ONCE):
            try:
                query, sender = self._socket.recvfrom(MAX_QUERY_BYTES)
            except OSError:
                return
            reply = answer(query)
            if reply is not None:
                try:
                    self._socket.sendto(reply, sender)
                except OSError:
                    pass  # the client repeats its query


def answer(query: bytes) -> bytes | None:
    """The reply to a DNS query (RFC 1035, 4.1): 127.0.0.1 for an address. None if it is not a query."""
    if len(query) < HEADER_BYTES:
        return None
    number, flags, questions = struct.unpack("!HHH", query[:6])
    if flags & _OPCODE_AND_ANSWER or questions != 1:
        return None
    end = HEADER_BYTES
    while end < len(query) and query[end]:
        if query[end] > 63 or end - HEADER_BYTES > MAX_NAME_BYTES:
            return None
        end += 1 + query[end]
    if end + 5 > len(query):
        return None
    kind, network = struct.unpack("!HH", query[end + 1 : end + 5])
    question, records = query[HEADER_BYTES : end + 5], b""
    if kind == TYPE_A and network == CLASS_INTERNET:
        # The name is that of the question, at byte 12.
        name = 0xC000 | HEADER_BYTES
        records = struct.pack("!HHHIH4B", name, TYPE_A, CLASS_INTERNET, TTL_SECONDS, 4, 127, 0, 0, 1)
    flags = _ANSWER_WITH_RECURSION | flags & _RECURSION_DESIRED
    return struct.pack("!HHHHHH", number, flags, 1, 1 if records else 0, 0, 0) + question + records
