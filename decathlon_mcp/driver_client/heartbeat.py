"""Renews the lease of a driver, and closes the connection to one that does not start or does not answer."""

from __future__ import annotations

import asyncio
import time

from decathlon_sandbox import wire

from decathlon_mcp.driver_client.link import DriverLink, Request

MIN_BEAT_SECONDS = 0.1
"""Shortest time between two beats: the rest of a lease does not get less while the driver is not attached."""


class Heartbeat:
    """Sends a ping three times in each lease.

    `boot_seconds`: how long the driver may take to be attached; None for one that runs already.
    """

    # A timer of the event loop and no task: of a thousand episodes most are idle, and a task that sleeps
    # takes several times the memory.

    def __init__(self, link: DriverLink, *, boot_seconds: float | None) -> None:
        self._link = link
        self._lease_seconds = wire.LEASE_SECONDS
        self._period_seconds = min(self._lease_seconds, link.survival.seconds or self._lease_seconds) / 3
        self._boot_seconds = boot_seconds
        self._boot_deadline = None if boot_seconds is None else time.monotonic() + boot_seconds
        # When the ping without an answer was sent, by a clock that stops while the driver is not attached.
        self._pinged_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin. `stop` must be called at the end."""
        self._schedule(self._wait_for_boot())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _beat(self) -> None:
        if not self._link.closed.is_set():
            self._schedule(self._ping() if self._link.ready else self._wait_for_boot())

    def _schedule(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._beat)

    def _wait_for_boot(self) -> float:
        """Check the time limit of the boot; returns the seconds until the next beat."""
        if self._boot_deadline is None:
            return self._period_seconds
        remaining_seconds = self._boot_deadline - time.monotonic()
        if remaining_seconds <= 0:
            self._link.close(f"the driver did not come up within {self._boot_seconds:.0f} s")
        return max(0.0, min(remaining_seconds, self._period_seconds))

    def _ping(self) -> float:
        """Send a ping unless one waits for its answer; returns the seconds until the next beat."""
        now = self._link.attached_clock()
        if self._pinged_at is None:
            ping = Request(self._link.new_id(), wire.PING, {}, lambda reply: None, self._on_answer)
            if self._link.send_now(ping, urgent=True):
                self._pinged_at = now
            return self._period_seconds
        remaining_seconds = self._pinged_at + self._lease_seconds - now
        if remaining_seconds <= 0:
            self._link.close(f"the driver has not answered for {self._lease_seconds:.0f} s", by_driver=True)
        return min(max(remaining_seconds, MIN_BEAT_SECONDS), self._period_seconds)

    def _on_answer(self, outcome: object) -> None:
        self._pinged_at = None
