"""Lines whose check sums follow from each other: what is lost, torn, doubled or foreign is noticed."""

from __future__ import annotations

import pytest
from decathlon_sandbox.lines import (
    DAMAGED,
    NONCE_DIGITS,
    OVERLONG,
    Control,
    Lines,
    attach_line,
    refused_line,
)
from hypothesis import given
from hypothesis import strategies as st

NONCE, OTHER = b"0" * NONCE_DIGITS, b"f" * NONCE_DIGITS
BODIES = [b'{"a":1}', b"done 1 2", b"{}", b"x" * 500]


def pair(max_bytes: int = 1000) -> tuple[Lines, Lines]:
    """A writer and a reader of one attachment."""
    writer, reader = Lines(max_bytes), Lines(max_bytes)
    writer.begin_writing(NONCE)
    reader.begin_reading(NONCE)
    return writer, reader


@given(st.integers(0, 3), st.sampled_from(["lost", "doubled", "torn", "changed"]), st.integers(1, 500))
def test_line_that_is_not_as_it_was_written_is_noticed_at_the_next_one(
    index: int, fault: str, position: int
) -> None:
    writer, reader = pair()
    lines = [writer.frame(body) for body in [*BODIES, b"last"]]
    line = lines[index]
    position %= len(line) - 1
    changed = {
        "lost": [],
        "doubled": [line, line],
        "torn": [line[:position]],
        "changed": [line[:position] + bytes([line[position] ^ 1]) + line[position + 1 :]],
    }[fault]
    received = [*reader.receive(b"".join([*lines[:index], *changed, *lines[index + 1 :], b"\n"]))]
    expected = [*BODIES, b"last"]
    if fault == "doubled":
        # Nothing is missing, but it is noticed.
        assert received == [*expected[: index + 1], DAMAGED, *expected[index + 1 :]]
    else:
        assert received[:index] == expected[:index]
        assert set(received[index:]) == {DAMAGED}


def test_lines_of_another_attachment_are_damaged() -> None:
    writer, reader = pair()
    writer.begin_writing(OTHER)
    assert [*reader.receive(writer.frame(b"{}"))] == [DAMAGED]


@pytest.mark.parametrize("size", [7, 100_000])
def test_line_over_the_limit_is_reported_once_and_takes_no_memory(size: int) -> None:
    _, reader = pair(max_bytes=100)
    data = b"x" * 10_000 + b"\n" + refused_line(NONCE, 7)
    received = [
        line for start in range(0, len(data), size) for line in reader.receive(data[start : start + size])
    ]
    assert received[0] == OVERLONG
    assert isinstance(received[1], Control)
    assert len(received) == 2


@pytest.mark.parametrize(
    "line",
    [
        b"attach",
        b"00000000 attach " + NONCE + b" 1 2 3",
        attach_line(NONCE, 1, 2, 3).strip()[:-1],
        attach_line(NONCE, 1, 2, 3).strip() + b" 4",
    ],
)
def test_control_line_that_is_not_intact_is_none(line: bytes) -> None:
    assert [*Lines(1000).receive(line + b"\n")] == []
