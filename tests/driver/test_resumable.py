"""The resumable connection in memory: each message once and in order, bounded, whatever a stream does."""

from __future__ import annotations

import time
from binascii import crc32
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

import pytest
from decathlon_sandbox import wire
from decathlon_sandbox.resumable import (
    ACKNOWLEDGE_AFTER_BYTES,
    ACKNOWLEDGE_AFTER_MESSAGES,
    MAX_NUMBER,
    MAX_PREFIX_BYTES,
    OVERHEAD_BYTES,
    ConnectionFullError,
    DriverEnd,
    Limits,
    ServerEnd,
)
from hypothesis import given, settings, strategies
from hypothesis.stateful import run_state_machine_as_test as run_state_machine

from tests.driver.resumable_model import SLOW, ResumableModel

LIMITS = Limits(
    send_payload_bytes=4096,
    send_buffer_bytes=20_000,
    receive_payload_bytes=4096,
    receive_window_bytes=20_000,
)
SMALL = Limits(
    send_payload_bytes=100,
    send_buffer_bytes=600,
    receive_payload_bytes=100,
    receive_window_bytes=600,
)
Pair = tuple[ServerEnd, DriverEnd]


def new_server(limits: Limits = LIMITS, *, generation: int = 1, taken_back: bool = False) -> ServerEnd:
    return ServerEnd(limits, generation=generation, survive_seconds=300, taken_back=taken_back)


def attach(server: ServerEnd, driver: DriverEnd, nonce: str = "a" * 32) -> None:
    """Attach over a stream that works, and lose nothing."""
    server.attach(nonce)
    assert driver.receive(server.data_to_send()) == []
    assert server.receive(driver.data_to_send()) == []


def attached_pair(limits: Limits = LIMITS) -> Pair:
    server, driver = new_server(limits), DriverEnd(limits)
    attach(server, driver)
    assert server.attached
    return server, driver


def line(body: bytes, nonce: str | None = "a" * 32) -> bytes:
    key = crc32(nonce.encode()) if nonce else 0
    return b"%08x %b\n" % (crc32(body, key), body)


# an exchange that is cut at every byte


@dataclass
class Exchange:
    """A server that makes calls and logs the replies, and a driver that answers them.

    After `limit` bytes in direction `cut`, the stream is lost in both directions.
    """

    cut: str | None = None
    limit: int = 0
    server: ServerEnd = field(default_factory=new_server)
    driver: DriverEnd = field(default_factory=lambda: DriverEnd(LIMITS))
    calls: dict[int, bytes] = field(default_factory=dict[int, bytes])
    log: dict[int, bytes] = field(default_factory=dict[int, bytes])
    run: list[bytes] = field(default_factory=list[bytes])
    passed: dict[str, int] = field(default_factory=lambda: {"to_driver": 0, "to_server": 0})
    lost: dict[str, bytes] = field(default_factory=lambda: {"to_driver": b"", "to_server": b""})

    def begin(self) -> None:
        for number in range(1, 5):
            payload = b'{"call":%d,"text":"%b"}' % (number, b"a1 " * number * number)
            self.calls[self.server.next_number] = payload
            self.server.send(payload)
        self.server.attach("1" * 32)
        self.driver.send(b'{"ready":true}')

    def pump(self) -> None:
        """Carry bytes in both directions until there are none, or the stream is cut."""
        while True:
            to_driver = self.passing("to_driver", self.server.data_to_send(100))
            for number, payload in self.driver.receive(to_driver):
                if payload not in self.run:  # as the driver does, by the ids of requests
                    self.run.append(payload)
                    self.driver.send(b'{"reply":%b}' % payload)
                self.driver.acknowledge(number)
            to_server = self.passing("to_server", self.driver.data_to_send(100))
            for number, payload in self.server.receive(to_server):
                assert self.log.setdefault(number, payload) == payload
                self.server.acknowledge(number)
            if not to_driver and not to_server:
                if not self.server.acknowledgement_pending and not self.driver.acknowledgement_pending:
                    return
                self.server.acknowledge_now()
                self.driver.acknowledge_now()

    def passing(self, direction: str, data: bytes) -> bytes:
        """The part of `data` that arrives."""
        room = len(data)
        if self.cut is not None:
            room = self.limit - self.passed[direction] if self.cut == direction else room
            if self.passed[self.cut] >= self.limit:
                room = 0
        self.passed[direction] += min(room, len(data))
        self.lost[direction] += data[room:]
        return data[:room]

    def continue_on_new_stream(self, *, restart: bool, late_after: int | None) -> None:
        """`late_after`: the bytes of the lost stream still arrive, without the first so many."""
        self.cut = None
        if restart:
            self.server = new_server(generation=2, taken_back=True)
        else:
            self.server.stream_lost()
        if late_after is not None:
            assert self.driver.receive(self.lost["to_driver"][late_after:]) == []
        self.server.attach("2" * 32)
        if late_after is not None:
            assert self.server.receive(self.lost["to_server"][late_after:]) == []
        self.pump()
        if restart:
            for payload in self.calls.values():
                if b'{"reply":%b}' % payload not in self.log.values():
                    self.server.send(payload)
            self.pump()

    def check(self) -> None:
        assert self.server.failure is None
        assert self.driver.failure is None
        assert self.run == list(self.calls.values())
        replies = [b'{"ready":true}', *(b'{"reply":%b}' % payload for payload in self.run)]
        assert [self.log[number] for number in sorted(self.log)] == replies
        assert self.server.unacknowledged_bytes == self.driver.unacknowledged_bytes == 0


def test_an_exchange_without_a_cut_is_complete() -> None:
    exchange = Exchange()
    exchange.begin()
    exchange.pump()
    exchange.check()


@pytest.mark.parametrize("late_after", [None, 1, 5])
@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("direction", ["to_driver", "to_server"])
def test_an_exchange_cut_at_any_byte_is_completed(
    direction: str, restart: bool, late_after: int | None
) -> None:
    whole = Exchange()
    whole.begin()
    whole.pump()
    for limit in range(whole.passed[direction]):
        exchange = Exchange(direction, limit)
        exchange.begin()
        exchange.pump()
        exchange.continue_on_new_stream(restart=restart, late_after=late_after)
        exchange.check()


def test_an_exchange_cut_twice_is_completed() -> None:
    for first in range(0, 900, 13):
        for second in range(0, 400, 29):
            exchange = Exchange("to_server", first)
            exchange.begin()
            exchange.pump()
            exchange.server.stream_lost()
            exchange.server.attach("3" * 32)
            exchange.limit = exchange.passed["to_server"] + second
            exchange.pump()
            exchange.continue_on_new_stream(restart=True, late_after=None)
            exchange.check()


def test_model_of_streams_and_server_processes() -> None:
    run_state_machine(
        ResumableModel,
        settings=settings(
            max_examples=60,
            stateful_step_count=60,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=SLOW,
        ),
    )


# acknowledgements


@pytest.mark.parametrize("count", [ACKNOWLEDGE_AFTER_MESSAGES - 1, ACKNOWLEDGE_AFTER_MESSAGES])
def test_acknowledgement_without_a_message_comes_after_enough_messages(count: int) -> None:
    server, driver = attached_pair()
    for _ in range(count):
        driver.send(b"reply")
    for number, _ in server.receive(driver.data_to_send()):
        server.acknowledge(number)
    assert server.acknowledgement_pending
    assert bool(server.data_to_send()) == (count == ACKNOWLEDGE_AFTER_MESSAGES)


def test_acknowledgement_without_a_message_comes_after_enough_bytes() -> None:
    limits = Limits(
        send_payload_bytes=100_000,
        send_buffer_bytes=200_000,
        receive_payload_bytes=100_000,
        receive_window_bytes=200_000,
    )
    server, driver = attached_pair(limits)
    driver.send(b"x" * ACKNOWLEDGE_AFTER_BYTES)
    for number, _ in server.receive(driver.data_to_send()):
        server.acknowledge(number)
    driver.receive(server.data_to_send())
    assert driver.unacknowledged_bytes == 0


def test_acknowledgement_is_sent_on_demand_and_once() -> None:
    server, driver = attached_pair()
    driver.send(b"reply")
    [(number, _)] = server.receive(driver.data_to_send())
    server.acknowledge_now()
    assert not server.data_to_send()
    server.acknowledge(number)
    server.acknowledge_now()
    server.acknowledge_now()
    driver.receive(data := server.data_to_send())
    assert data.count(b"\n") == 1
    assert driver.unacknowledged_bytes == 0
    assert not server.acknowledgement_pending


def test_messages_acknowledged_out_of_order_stay_in_the_other_buffer() -> None:
    server, driver = attached_pair()
    for _ in range(3):
        driver.send(b"reply")
    first, second, third = [number for number, _ in server.receive(driver.data_to_send())]
    server.acknowledge(third)
    server.acknowledge(second)
    assert not server.acknowledgement_pending
    server.acknowledge(first)
    server.acknowledge_now()
    driver.receive(server.data_to_send())
    assert driver.unacknowledged_bytes == 0


def test_message_cannot_be_acknowledged_twice() -> None:
    server, driver = attached_pair()
    driver.send(b"reply")
    [(number, _)] = server.receive(driver.data_to_send())
    server.acknowledge(number)
    with pytest.raises(KeyError):
        server.acknowledge(number)


# bounds


def test_full_send_buffer_refuses_until_it_is_acknowledged() -> None:
    server, driver = attached_pair(SMALL)
    payload = b"x" * 100
    sent = 0
    while driver.room_bytes >= len(payload):
        driver.send(payload)
        sent += 1
    assert sent == SMALL.send_buffer_bytes // (len(payload) + OVERHEAD_BYTES)
    with pytest.raises(ConnectionFullError):
        driver.send(payload)
    for number, _ in server.receive(driver.data_to_send()):
        server.acknowledge(number)
    server.acknowledge_now()
    driver.receive(server.data_to_send())
    assert driver.room_bytes == len(payload)


def test_empty_messages_and_line_feeds_are_refused() -> None:
    server, _ = attached_pair()
    for payload in (b"", b"a\nb"):
        with pytest.raises(ValueError):
            server.send(payload)


def test_driver_that_ignores_the_window_fails() -> None:
    server, _ = attached_pair(SMALL)
    for number in range(1, 20):
        server.receive(line(b"%d 0 %b" % (number, b"x" * 50)))
    assert server.failure == "it sent over 600 bytes without an acknowledgement"
    assert server.in_progress_bytes <= SMALL.receive_window_bytes
    assert server.data_to_send() == b""


def test_overlong_line_of_a_driver_fails_only_once_it_is_attached() -> None:
    server, driver = new_server(SMALL), DriverEnd(SMALL)
    server.attach("a" * 32)
    for _ in range(100):
        assert server.receive(b"x" * 1000) == []
    assert server.failure is None
    driver.receive(server.data_to_send())
    server.receive(b"\n" + driver.data_to_send())
    assert server.attached
    server.receive(b"x" * (SMALL.send_payload_bytes + MAX_PREFIX_BYTES + 1))
    assert server.failure == "it sent a line of more than 148 bytes"


def test_driver_ignores_an_overlong_line_and_reports_it() -> None:
    server, driver = attached_pair(SMALL)
    driver.receive(b"x" * 10_000)
    driver.receive(b"x" * 10_000 + b"\n")
    server.receive(driver.data_to_send())
    assert server.attach_due
    attach(server, driver, "b" * 32)
    assert not server.attach_due
    server.send(b"call")
    assert driver.receive(server.data_to_send()) == [(1, b"call")]


@pytest.mark.parametrize(
    ("body", "failure"),
    [
        (b"1 1 reply", "it acknowledged a message that was never sent"),
        (b"ack 1 0", "it acknowledged a message that was never sent"),
        (b"ack 0", "it sent a malformed line"),
        (b"1 0", "it sent a malformed line"),
        (b"", "it sent a malformed line"),
        (b"-1 0 reply", "it sent a malformed line"),
        (b"1_0 0 reply", "it sent a malformed line"),
        (b"1 0x1 reply", "it sent a malformed line"),
        (b"9" * 16 + b" 0 reply", "it sent a malformed line"),
        ("١ 0 reply".encode(), "it sent a malformed line"),
    ],
)
def test_driver_that_breaks_the_protocol_fails(body: bytes, failure: str) -> None:
    server, _ = attached_pair()
    assert server.receive(line(body)) == []
    assert server.failure == failure
    assert server.receive(line(b"1 0 reply")) == []


@pytest.mark.parametrize(
    ("positions", "failure"),
    [
        ("0 1 1", "it received a message that was never sent"),
        ("1 0 1", "it received a message that was never sent"),
        ("0 0 9", "it dropped a message that was not acknowledged"),
    ],
)
def test_driver_with_impossible_positions_fails(positions: str, failure: str) -> None:
    server = new_server()
    server.attach("a" * 32)
    server.receive(line(f"attached {'a' * 32} {wire.VERSION} {positions}".encode(), None))
    assert server.failure == failure


def test_driver_that_forgets_what_it_acknowledged_fails() -> None:
    server, driver = attached_pair()
    server.send(b"call")
    for number, _ in driver.receive(server.data_to_send()):
        driver.acknowledge(number)
    driver.acknowledge_now()
    server.receive(driver.data_to_send())
    server.attach("b" * 32)
    server.receive(line(f"attached {'b' * 32} {wire.VERSION} 0 0 1".encode(), None))
    assert server.failure == "it lost a message that it had acknowledged"


@pytest.mark.parametrize(
    "positions", [f"{MAX_NUMBER} {MAX_NUMBER} {MAX_NUMBER}", f"0 {MAX_NUMBER} 1", f"0 0 {MAX_NUMBER}"]
)
def test_huge_numbers_cost_a_new_server_process_nothing(positions: str) -> None:
    server = new_server(generation=2, taken_back=True)
    server.attach("a" * 32)
    begin = time.perf_counter()
    server.receive(line(f"attached {'a' * 32} {wire.VERSION} {positions}".encode(), None))
    server.data_to_send()
    assert time.perf_counter() - begin < 0.5
    assert server.attached
    try:
        server.send(b"call")
    except ConnectionFullError:
        assert server.failure == "it used all numbers"


def test_noise_never_raises_and_delivers_nothing() -> None:
    server, driver = attached_pair()
    body = b"attached " + b"a" * 32
    noise: list[Callable[[], bytes]] = [
        lambda: b"\n" * 100,
        lambda: b"\xff" * 100 + b"\n",
        lambda: b"1 0 {}\n" * 100,
        lambda: line(body, None),
        lambda: line(body + b" 1 x 1 1", None),
        lambda: line(b"attach " + b"g" * 32 + b" 1 1 1 1 1 1", None),
        lambda: line(b"attach " + b"a" * 32 + b" 1" * 200, None),
        lambda: line(b"refused " + b"a" * 32, None),
        lambda: line(b"attached", None),
    ]
    for make in noise:
        assert server.receive(make()) == []
        assert driver.receive(make()) == []
    assert server.failure is None
    assert driver.failure is None


words = b"attach attached refused ack lost x -1 0 1 2 3 300".split()
tokens = strategies.sampled_from([*words, b"", b"a" * 32, b"b" * 32, b"%d" % MAX_NUMBER, b"%d0" % MAX_NUMBER])
bodies = strategies.lists(tokens, max_size=9).map(b" ".join)
foreign_lines = strategies.one_of(
    bodies.map(line), bodies.map(lambda body: line(body, None)), strategies.binary(max_size=300)
)


@given(foreign_lines=strategies.lists(foreign_lines, max_size=20), taken_back=strategies.booleans())
@settings(deadline=None, database=None, derandomize=True, max_examples=200, suppress_health_check=SLOW)
def test_lines_of_a_hostile_end_raise_nothing_and_stay_within_the_bounds(
    foreign_lines: list[bytes], taken_back: bool
) -> None:
    server, driver = new_server(SMALL, taken_back=taken_back), DriverEnd(SMALL)
    server.attach("a" * 32)
    driver.receive(server.data_to_send())
    if not taken_back:
        server.receive(driver.data_to_send())
    for foreign_line in foreign_lines:
        for end in (server, driver):
            delivered = end.receive(foreign_line)
            for number, _ in delivered[:1]:
                end.acknowledge(number)
            assert end.in_progress_bytes <= SMALL.receive_window_bytes
            assert len(end.data_to_send()) < 10_000
            end.acknowledge_now()
            if end.room_bytes >= 3:
                with suppress(ConnectionFullError):
                    end.send(b"abc")


# several servers


def test_driver_ignores_what_a_replaced_server_wrote() -> None:
    old, driver = attached_pair()
    old.send(b"stale call")
    stale = old.data_to_send()
    new = new_server(generation=2, taken_back=True)
    attach(new, driver, "b" * 32)
    assert driver.receive(stale) == []
    new.send(b"call")
    assert driver.receive(new.data_to_send()) == [(1, b"call")]


def test_replaced_server_is_refused_when_it_attaches_again() -> None:
    old, driver = attached_pair()
    new = new_server(generation=2, taken_back=True)
    new.attach("b" * 32)
    driver.receive(new.data_to_send())
    old.receive(driver.data_to_send())
    assert old.attach_due
    attach(old, driver, "c" * 32)
    assert old.failure == "another server process has taken it over"


def test_torn_line_of_a_replaced_server_does_not_spoil_the_next_attachment() -> None:
    old, driver = attached_pair()
    old.send(b'{"text":"1 0 {}"}')
    whole = old.data_to_send()
    for cut in range(len(whole)):
        new = new_server(generation=2, taken_back=True)
        new.attach(f"{cut:032x}")
        assert driver.receive(whole[:cut] + new.data_to_send() + whole[cut:]) == []
        new.receive(driver.data_to_send())
        assert new.attached
        new.stream_lost()


def test_lines_of_two_servers_that_are_mixed_are_sent_again() -> None:
    old, driver = attached_pair()
    old.send(b"stale call" * 3)
    stale = old.data_to_send()
    for cut in range(1, 40):
        new = new_server(generation=cut + 1, taken_back=True)
        attach(new, driver, "b" * 32)
        number = new.next_number
        payload = b"call %d of the new server" % cut
        new.send(payload)
        data = new.data_to_send()
        assert driver.receive(data[:cut] + stale + data[cut:]) == []
        new.receive(driver.data_to_send())
        assert new.attach_due
        attach(new, driver, "c" * 32)
        assert driver.receive(new.data_to_send()) == [(number, payload)]


def test_lines_of_a_replaced_server_do_not_count_as_signs_of_life() -> None:
    old, driver = attached_pair()
    new = new_server(generation=2, taken_back=True)
    attach(new, driver, "b" * 32)
    before = driver.valid_lines
    for _ in range(3):
        old.send(b"ping")
    driver.receive(old.data_to_send() + b"noise\n\n")
    assert driver.valid_lines == before
    new.send(b"ping")
    driver.receive(new.data_to_send())
    assert driver.valid_lines == before + 1


# new processes


def test_new_process_uses_no_number_twice() -> None:
    old, driver = attached_pair()
    old.send(b"call 1")
    old.send(b"call 2")
    received = driver.receive(old.data_to_send())
    new = new_server(generation=2, taken_back=True)
    with pytest.raises(ConnectionFullError):
        new.send(b"too early")
    attach(new, driver, "b" * 32)
    assert new.send(b"call 3") == 3
    assert [*received, *driver.receive(new.data_to_send())] == [
        (1, b"call 1"),
        (2, b"call 2"),
        (3, b"call 3"),
    ]


def test_new_process_gets_what_its_predecessor_had_not_acknowledged() -> None:
    old, driver = attached_pair()
    for _ in range(5):
        driver.send(b"reply")
    for number, _ in old.receive(driver.data_to_send()):
        old.acknowledge(number)
    old.acknowledge_now()
    driver.receive(old.data_to_send())
    new = new_server(generation=2, taken_back=True)
    attach(new, driver, "b" * 32)
    driver.send(b"reply 6")
    assert new.receive(driver.data_to_send()) == [(6, b"reply 6")]
    assert new.failure is None


def test_new_process_attaches_again_when_the_answer_is_lost() -> None:
    old, driver = attached_pair()
    driver.send(b"reply 1")
    [(number, _)] = old.receive(driver.data_to_send())
    old.acknowledge(number)
    old.send(b"ping")
    driver.receive(old.data_to_send())
    new = new_server(generation=2, taken_back=True)
    for nonce in ("b" * 32, "c" * 32):
        new.attach(nonce)
        driver.receive(new.data_to_send())
        assert driver.data_to_send()
        new.stream_lost()
    attach(new, driver, "d" * 32)
    driver.send(b"reply 2")
    assert new.receive(driver.data_to_send()) == [(2, b"reply 2")]
    assert driver.failure is None


def test_unacknowledged_messages_come_to_the_new_process_too() -> None:
    old, driver = attached_pair()
    driver.send(b"reply 1")
    driver.send(b"reply 2")
    first, _ = old.receive(driver.data_to_send())
    old.acknowledge(first[0])
    new = new_server(generation=2, taken_back=True)
    new.attach("b" * 32)
    driver.receive(new.data_to_send())
    # The acknowledgement of the first one was not sent.
    assert new.receive(driver.data_to_send()) == [(1, b"reply 1"), (2, b"reply 2")]


# versions and survival


def test_driver_of_another_version_fails_with_that_reason() -> None:
    server = new_server()
    server.attach("a" * 32)
    server.receive(line(f"attached {'a' * 32} 99 0 0 1".encode(), None))
    assert server.failure == f"it has wire version 99, and this server has {wire.VERSION}"
    assert server.peer_version == 99


def test_additional_numbers_of_a_later_version_are_ignored() -> None:
    server, driver = new_server(), DriverEnd(LIMITS)
    server.attach("a" * 32)
    driver.receive(line(f"attach {'a' * 32} 1 9 300 0 0 1 77 88".encode(), None))
    assert driver.attached
    assert driver.peer_version == 9
    server.receive(line(f"attached {'a' * 32} {wire.VERSION} 0 0 1 77".encode(), None))
    assert server.attached


def test_server_decides_how_long_the_driver_survives() -> None:
    driver = DriverEnd(LIMITS)
    assert driver.survive_seconds == 0
    attach(ServerEnd(LIMITS, generation=1, survive_seconds=300), driver)
    assert driver.survive_seconds == 300
    attach(ServerEnd(LIMITS, generation=2, survive_seconds=0), driver, "b" * 32)
    assert driver.survive_seconds == 0


def test_limits_must_allow_the_largest_message() -> None:
    for name in ("send_buffer_bytes", "receive_window_bytes"):
        bounds = dict.fromkeys(Limits.__slots__, 1000) | {
            "send_payload_bytes": 900,
            "receive_payload_bytes": 900,
        }
        Limits(**bounds)
        with pytest.raises(ValueError):
            Limits(**bounds | {name: 999})


@pytest.mark.parametrize("nonce", ["", "a" * 31, "A" * 32, "g" * 32, " " * 32])
def test_nonces_have_a_fixed_form(nonce: str) -> None:
    with pytest.raises(ValueError):
        new_server().attach(nonce)
