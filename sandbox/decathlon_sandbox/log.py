"""Log of the driver: its stderr, written without ever blocking."""

from __future__ import annotations

import os
import select
import sys

_MAX_BYTES = 4000  # below PIPE_BUF: a pipe that polls as writable accepts this much without blocking


def log(text: str) -> None:
    """Write one entry of at most 4 kB. It is dropped if stderr is full or closed."""
    data = text.encode("utf-8", "replace")[:_MAX_BYTES].rstrip(b"\n") + b"\n"
    try:
        poll = select.poll()
        poll.register(2, select.POLLOUT)
        if any(event & select.POLLOUT for _, event in poll.poll(0)):
            os.write(2, data)
    except OSError:
        pass


def log_exception(message: str) -> None:
    """Log the exception being handled, with the places it passed through."""
    # Without the module `traceback`: it would be imported from a file system that an agent may have changed.
    kind, error, trace = sys.exc_info()
    lines = [f"decathlon: {message}: {kind.__name__ if kind else None}: {error}"]
    while trace is not None:
        code = trace.tb_frame.f_code
        lines.append(f"  {code.co_filename}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    log("\n".join(lines))
