"""The driver's own log: its stderr. A log that nobody reads never holds the driver up."""

from __future__ import annotations

import os
import select

_MAX_BYTES = 4000  # below PIPE_BUF: a pipe that polls as writable takes this much without blocking


def log(text: str) -> None:
    """Write a line, cut to 4 kB; it is lost when stderr is full or gone."""
    data = text.encode("utf-8", "replace")[:_MAX_BYTES].rstrip(b"\n") + b"\n"
    try:
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poll.poll(0)):
            os.write(2, data)
    except OSError:
        pass


def log_failure(what: str) -> None:
    """Write the traceback of the exception being handled."""
    import traceback

    log(f"decathlon: {what}\n{traceback.format_exc()[-3000:]}")
