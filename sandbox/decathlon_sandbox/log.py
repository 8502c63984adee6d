"""The driver's own log: its stderr. A log that nobody reads never holds the driver up."""

from __future__ import annotations

import os
import select
import sys

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
    """Write where the exception being handled comes from: without `traceback`, which would be an import."""
    kind, error, trace = sys.exc_info()
    said = [f"decathlon: {what}: {kind.__name__ if kind else None}: {error}"]
    while trace is not None:
        code = trace.tb_frame.f_code
        said.append(f"  {code.co_filename}:{trace.tb_lineno} in {code.co_name}")
        trace = trace.tb_next
    log("\n".join(said))
