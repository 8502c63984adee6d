"""First process of a container in a test: answers every call over the resumable connection.

The test sends it through `wire.LOADER` in place of the driver.
"""

from __future__ import annotations

import json
import os
import selectors
import time

from decathlon_sandbox.resumable import ACKNOWLEDGE_AFTER_SECONDS, DriverEnd, Limits

LIMITS = Limits(
    send_payload_bytes=100_000,
    send_buffer_bytes=400_000,
    receive_payload_bytes=100_000,
    receive_window_bytes=800_000,
)
LARGEST_REPLY_BYTES = 60_000
LEASE_SECONDS = 60.0


def main() -> int:
    end = DriverEnd(LIMITS)
    waiting: list[tuple[int, bytes]] = []
    output = b""
    runs = valid_lines = 0
    serials: set[int] = set()
    heard_at = time.monotonic()
    selector = selectors.DefaultSelector()
    for fd in (0, 1):
        os.set_blocking(fd, False)
    selector.register(0, selectors.EVENT_READ)
    while end.failure is None and time.monotonic() < heard_at + LEASE_SECONDS:
        output = output or end.data_to_send()
        if output and 1 not in selector.get_map():
            selector.register(1, selectors.EVENT_WRITE)
        elif not output and 1 in selector.get_map():
            selector.unregister(1)
        ready = [key.fd for key, _ in selector.select(ACKNOWLEDGE_AFTER_SECONDS)]
        if 0 in ready:
            waiting += end.receive(os.read(0, 65536))
        if 1 in ready:
            output = output[os.write(1, output) :]
        if not ready:
            end.acknowledge_now()
        # A call begins only if there is room for its reply.
        while waiting and end.room_bytes >= LARGEST_REPLY_BYTES:
            number, call = waiting.pop(0)
            serial = json.loads(call)["serial"]
            if serial not in serials:  # otherwise its reply comes again, or was acknowledged
                serials.add(serial)
                runs += 1
                end.send(b'{"run":%d,"call":%b}' % (runs, call))
            end.acknowledge(number)
        if end.valid_lines > valid_lines:
            heard_at, valid_lines = time.monotonic(), end.valid_lines
    return 1
