"""Model of the resumable connection: server processes that come and go, one driver, and what is between them.

Everything that a stream can do happens in any order: partial writes and reads, loss, truncation and damage of
bytes, two server processes attached at the same time, and new processes that send again what may be lost.
Run it for longer with `python -m tests.driver.resumable_model --minutes 10`.
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from decathlon_sandbox.resumable import (
    ConnectionFullError,
    DriverEnd,
    Limits,
    ServerEnd,
)
from hypothesis import HealthCheck, Phase, settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_state_machine

LIMITS = Limits(
    send_payload_bytes=400,
    send_buffer_bytes=3000,
    receive_payload_bytes=400,
    receive_window_bytes=6000,
)
MAX_LINE_BYTES = 450
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
"""Health checks of hypothesis that a busy machine fails."""
HEAL_ROUNDS = 1000

counts = strategies.one_of(strategies.integers(0, 700), strategies.integers(0, 40))
few = strategies.integers(1, 4)
rounds = strategies.integers(0, 2)
indices = strategies.integers(0, 9)
processes = strategies.sampled_from([-1, -1, 0])
"""The current process, or its predecessor if that still runs."""
sizes = strategies.sampled_from([1, 5, 30, 380])


@dataclass
class Store:
    """What survives a server process. `acknowledged`: calls that need not be sent again."""

    generation: int = 0
    acknowledged: set[bytes] = field(default_factory=set[bytes])
    log: dict[int, bytes] = field(default_factory=dict[int, bytes])


@dataclass
class Process:
    """One server process. `inbox` is None without a stream; `outbox` is written to it piece by piece.

    `unsent`: calls of its predecessors that it sends again. `sent`: its calls, by number.
    """

    end: ServerEnd
    generation: int
    inbox: bytearray | None = None
    outbox: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list[tuple[int, bytes]])
    was_attached: bool = False
    unsent: deque[bytes] = field(default_factory=deque[bytes])
    sent: dict[int, bytes] = field(default_factory=dict[int, bytes])


class ResumableModel(RuleBasedStateMachine):
    """Rules are the events, invariants the guarantees. The last process is the current one."""

    def __init__(self) -> None:
        super().__init__()
        self.store = Store()
        self.processes: list[Process] = []
        self.driver = DriverEnd(LIMITS)
        self.driver_outbox = bytearray()
        self.driver_history = bytearray()
        self.driver_pending: list[tuple[int, bytes]] = []
        self.to_driver = bytearray()
        self.issued_calls: list[bytes] = []
        self.issued_pings: list[bytes] = []
        self.emitted: list[bytes] = []
        self.driver_received: list[bytes] = []
        self.nonces = 0

    @property
    def current(self) -> Process:
        return self.processes[-1]

    def process(self, index: int) -> Process:
        return self.processes[index]

    @initialize()
    def boot(self) -> None:
        self.store.generation = 1
        end = ServerEnd(LIMITS, generation=1, survive_seconds=300)
        self.processes.append(Process(end, 1))
        self.open_stream(self.current)
        self.exchange(-1, 1, True)

    # applications

    # Some rules let bytes pass too: hypothesis leaves whole rules out of many runs.

    @rule(size=sizes, repeat=few, rounds=rounds, settles=strategies.booleans())
    def call(self, size: int, repeat: int, rounds: int, settles: bool) -> None:
        for _ in range(repeat):
            payload = b"call %d %b" % (len(self.issued_calls), b"x" * size)
            if not self.current.unsent and self.accepts(payload):
                self.issued_calls.append(payload)
                self.send_call(payload)
        self.exchange(-1, rounds, settles)

    def send_call(self, payload: bytes) -> None:
        number = self.current.end.next_number
        self.current.sent[number] = payload
        assert self.current.end.send(payload) == number

    def send_again(self) -> None:
        unsent = self.current.unsent
        while unsent and len(unsent[0]) <= self.current.end.room_bytes:
            self.send_call(unsent.popleft())

    @rule()
    def ping(self) -> None:
        """A message that is not stored."""
        payload = b"ping %d" % len(self.issued_pings)
        if self.accepts(payload):
            self.issued_pings.append(payload)
            self.current.end.send(payload)

    @precondition(lambda self: len(self.processes) > 1 and self.current.was_attached)
    @rule()
    def replaced_process_sends(self) -> None:
        end = self.processes[0].end
        if len(b"stale") <= end.room_bytes:
            end.send(b"stale")

    def accepts(self, payload: bytes) -> bool:
        if len(payload) <= self.current.end.room_bytes:
            return True
        try:
            self.current.end.send(payload)
        except ConnectionFullError:
            return False
        raise AssertionError("a message without room was accepted")

    @rule(size=sizes, repeat=few, rounds=rounds, settles=strategies.booleans())
    def emit(self, size: int, repeat: int, rounds: int, settles: bool) -> None:
        for _ in range(repeat):
            payload = b"reply %d %b" % (len(self.emitted), b"y" * size)
            if len(payload) <= self.driver.room_bytes:
                self.emitted.append(payload)
                assert self.driver.send(payload) == len(self.emitted)
        self.exchange(-1, rounds, settles)

    @rule(index=indices, repeat=few)
    def driver_acknowledges(self, index: int, repeat: int) -> None:
        for _ in range(min(repeat, len(self.driver_pending))):
            number, _ = self.driver_pending.pop(index % len(self.driver_pending))
            self.driver.acknowledge(number)

    @rule(which=processes, index=indices, repeat=few)
    def process_logs(self, which: int, index: int, repeat: int) -> None:
        process = self.process(which)
        for _ in range(min(repeat, len(process.pending))):
            # A predecessor can store until its successor is attached.
            if process is self.current or not self.current.was_attached:
                number, payload = process.pending.pop(index % len(process.pending))
                assert self.store.log.setdefault(number, payload) == payload
                process.end.acknowledge(number)

    @rule(which=processes)
    def timer(self, which: int) -> None:
        self.process(which).end.acknowledge_now()
        self.driver.acknowledge_now()

    # bytes

    @rule(which=processes, rounds=few, settles=strategies.booleans())
    def exchange(self, which: int, rounds: int, settles: bool) -> None:
        """Bytes pass without a fault. `settles`: what arrives is acknowledged."""
        for _ in range(rounds):
            self.send_again()
            self.process_writes(which, 10_000)
            self.driver_reads(10_000)
            self.driver_writes(10_000)
            self.process_reads(which, 10_000)
            if settles:
                self.driver_acknowledges(0, 100)
                self.process_logs(which, 0, 100)

    @rule(move=strategies.sampled_from(["to", "in", "out", "from"]), which=processes, count=counts)
    def move_bytes(self, move: str, which: int, count: int) -> None:
        """Some bytes pass, in one place."""
        if move == "to":
            self.process_writes(which, count)
        elif move == "in":
            self.driver_reads(count)
        elif move == "out":
            self.driver_writes(count)
        else:
            self.process_reads(which, count)

    def process_writes(self, which: int, count: int) -> None:
        process = self.process(which)
        if process.inbox is not None:
            if not process.outbox:
                process.outbox += process.end.data_to_send(300)
            self.to_driver += process.outbox[:count]
            del process.outbox[:count]

    def driver_reads(self, count: int) -> None:
        data = bytes(self.to_driver[:count])
        del self.to_driver[:count]
        if b" attach " in data and self.nonces % 3:
            self.driver_outbox.clear()  # also in the middle of a line
        for number, payload in self.driver.receive(data):
            self.driver_pending.append((number, payload))
            # As the driver does, by the ids of requests.
            if not payload.startswith(b"call") or payload not in self.driver_received:
                self.driver_received.append(payload)

    def driver_writes(self, count: int) -> None:
        if not self.driver_outbox:
            self.driver_outbox += self.driver.data_to_send(300)
        data = self.driver_outbox[:count]
        del self.driver_outbox[:count]
        for process in self.processes:
            if process.inbox is not None:
                process.inbox += data
        self.driver_history += data
        del self.driver_history[:-2000]

    def process_reads(self, which: int, count: int) -> None:
        process = self.process(which)
        if process.inbox is not None:
            data = bytes(process.inbox[:count])
            del process.inbox[:count]
            for number, payload in process.end.receive(data):
                assert payload == self.emitted[number - 1]
                process.pending.append((number, payload))
            process.was_attached |= process.end.attached

    # faults

    @rule(which=processes, lost=counts, stale=counts, reopen=strategies.booleans())
    def lose_stream(self, which: int, lost: int, stale: int, reopen: bool) -> None:
        """The stream ends, and with it some bytes that were on their way."""
        process = self.process(which)
        process.inbox = None
        process.outbox.clear()
        process.end.stream_lost()
        if lost:
            del self.to_driver[-lost:]
        if reopen:
            self.open_stream(process, stale)

    @rule(which=processes, stale=counts)
    def attach_again(self, which: int, stale: int) -> None:
        """On the same stream, or on a new one if it was lost."""
        process = self.process(which)
        if process.inbox is None:
            self.open_stream(process, stale)
        else:
            self.attach(process)

    def open_stream(self, process: Process, stale: int = 0) -> None:
        """Attach to a new stream, whose first bytes can be the end of what the driver wrote before."""
        process.inbox = self.driver_history[-stale:] if stale else bytearray()
        self.attach(process)

    def attach(self, process: Process) -> None:
        self.nonces += 1
        if self.nonces % 2:
            process.outbox.clear()  # also in the middle of a line
        process.end.attach(f"{self.nonces:032x}")

    @rule(kill=strategies.booleans(), outdated=strategies.booleans(), stale=counts)
    def start_process(self, kill: bool, outdated: bool, stale: int) -> None:
        """A new server process; its predecessor was killed, or lives on for a while.

        `outdated`: it does not know what the driver has acknowledged to its predecessor.
        """
        previous = self.current
        if not outdated:
            first = previous.end.first_unacknowledged
            self.store.acknowledged |= {call for number, call in previous.sent.items() if number < first}
        if kill:
            self.processes.clear()
        del self.processes[:-1]
        self.store.generation += 1
        generation = self.store.generation
        end = ServerEnd(LIMITS, generation=generation, survive_seconds=300, taken_back=True)
        process = Process(end, generation)
        process.unsent.extend(call for call in self.issued_calls if call not in self.store.acknowledged)
        self.processes.append(process)
        self.open_stream(process, stale)

    @precondition(lambda self: len(self.processes) > 1)
    @rule()
    def kill_predecessor(self) -> None:
        del self.processes[0]

    @rule(to_driver=strategies.booleans(), position=counts, value=strategies.sampled_from(b"\n 0x}"))
    def damage(self, to_driver: bool, position: int, value: int) -> None:
        data = self.to_driver if to_driver else self.current.inbox
        if data:
            data[position % len(data)] = value

    # guarantees

    @invariant()
    def calls_arrive_once_and_in_order(self) -> None:
        calls = [payload for payload in self.driver_received if payload.startswith(b"call")]
        assert calls == self.issued_calls[: len(calls)]
        pings = [payload for payload in self.driver_received if payload.startswith(b"ping")]
        assert len(pings) == len(set(pings))
        assert [ping for ping in self.issued_pings if ping in pings] == pings
        assert b"stale" not in self.driver_received

    @invariant()
    def log_has_what_the_driver_sent(self) -> None:
        for number, payload in self.store.log.items():
            assert payload == self.emitted[number - 1]

    @invariant()
    def only_a_replaced_process_fails(self) -> None:
        assert self.driver.failure is None
        for process in self.processes:
            if process is self.current:
                assert process.end.failure is None
            else:
                assert process.end.failure in (None, "another server process has taken it over")

    @invariant()
    def memory_is_bounded(self) -> None:
        ends: list[Any] = [self.driver, *(process.end for process in self.processes)]
        for end in ends:
            assert end.unacknowledged_bytes <= LIMITS.send_buffer_bytes
            assert end.in_progress_bytes <= LIMITS.receive_window_bytes
            assert end.unacknowledged_bytes == sum(len(data) + 100 for data in end._send_buffer.values())
            assert end.in_progress_bytes == sum(end._in_progress.values())
            assert len(end._partial_line) <= MAX_LINE_BYTES
            assert len(end._control_lines) <= 20

    def teardown(self) -> None:
        """Whatever has happened: once a stream works again, everything arrives."""
        if not self.processes:
            return
        del self.processes[:-1]
        process = self.current
        self.lose_stream(-1, 0, 0, reopen=True)
        for _ in range(HEAL_ROUNDS):
            self.exchange(-1, 1, True)
            if process.end.attach_due:
                self.attach(process)
            self.timer(-1)
            done = process.end.attached and not process.unsent and not process.end.unacknowledged_bytes
            if done and not self.driver.unacknowledged_bytes:
                break
        else:
            raise AssertionError("the connection does not come to rest")
        self.only_a_replaced_process_fails()
        assert [data for data in self.driver_received if data.startswith(b"call")] == self.issued_calls
        assert [self.store.log[number + 1] for number in range(len(self.emitted))] == self.emitted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()
    end_at = time.monotonic() + arguments.minutes * 60
    runs = 0
    batch = settings(
        max_examples=200,
        stateful_step_count=arguments.steps,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=SLOW,
    )
    while time.monotonic() < end_at:
        run_state_machine(ResumableModel, settings=batch)
        runs += 200
        print(f"{runs} runs of up to {arguments.steps} events", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
