"""The replies of the sandbox's DNS server."""

from __future__ import annotations

import struct

import pytest
from decathlon_sandbox.resolver import answer

A, AAAA, HTTPS = 1, 28, 65


def query(name: str, kind: int = A, *, flags: int = 0x0100, questions: int = 1, extra: bytes = b"") -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return (
        struct.pack("!HHHHHH", 0x1234, flags, questions, 0, 0, len(extra) > 0)
        + labels
        + b"\0"
        + struct.pack("!HH", kind, 1)
        + extra
    )


def test_every_name_has_the_address_of_the_loopback() -> None:
    asked = query("www.example.org")
    reply = answer(asked)
    assert reply is not None
    assert struct.unpack("!HHHHHH", reply[:12]) == (0x1234, 0x8180, 1, 1, 0, 0)
    assert reply[12 : len(asked)] == asked[12:]
    assert reply[len(asked) :] == struct.pack("!HHHIH4B", 0xC00C, A, 1, 60, 4, 127, 0, 0, 1)


@pytest.mark.parametrize("kind", [AAAA, HTTPS, 16])
def test_there_are_no_other_records(kind: int) -> None:
    reply = answer(query("www.example.org", kind))
    assert reply is not None
    assert struct.unpack("!HHHHHH", reply[:12])[:4] == (0x1234, 0x8180, 1, 0)
    assert len(reply) == len(query("www.example.org", kind))


def test_extensions_of_a_query_are_ignored() -> None:
    assert answer(query("a.example", extra=b"\0\0\x29\x10\0\0\0\0\0\0\0")) == answer(query("a.example"))


@pytest.mark.parametrize(
    "datagram",
    [
        b"",
        b"x" * 11,
        query("a.example", flags=0x8180),
        query("a.example", flags=0x2900),
        query("a.example", questions=0),
        query("a.example", questions=2),
        query("a.example")[:-3],
        query("a.example")[:12] + b"\xc0\x0c\0\1\0\1",
        query("a.example")[:12] + b"\x3f" + b"a" * 10,
        query("a.example")[:12] + (b"\x01a" * 2000),
    ],
)
def test_what_is_not_a_query_is_not_answered(datagram: bytes) -> None:
    assert answer(datagram) is None
