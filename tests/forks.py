"""Runs functions in forks of this process, as a Python of its own that need not import anything again."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextvars import Context
from pathlib import Path
from tempfile import TemporaryFile

LIMIT_SECONDS = 120
"""After this time SIGALRM ends a fork: it could wait for ever for a lock that another thread had."""


def in_fork(
    run: Callable[[], object],
    *,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
    given: str = "",
    merged: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a function in a process, with the exit status that Python would have. `given`: its stdin.

    `merged`: stdout has what it writes to stderr too.
    """
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(given.encode())
        stdin.seek(0)
        descriptors = (stdin.fileno(), stdout.fileno(), (stdout if merged else stderr).fileno())
        with warnings.catch_warnings():
            # Later Pythons warn of the threads of pytest-xdist, which no fork needs.
            warnings.simplefilter("ignore", DeprecationWarning)
            if (pid := os.fork()) == 0:
                try:
                    _become(descriptors, folder, environment)
                    os._exit(Context().run(_status_of, run))
                finally:
                    os._exit(2)
        _, status = os.waitpid(pid, 0)
        texts: list[str] = []
        for file in (stdout, stderr):
            file.seek(0)
            texts.append(file.read().decode())
        return subprocess.CompletedProcess([], os.waitstatus_to_exitcode(status), *texts)


def _become(
    descriptors: tuple[int, int, int], folder: Path | None, environment: Mapping[str, str] | None
) -> None:
    """Make this process one of its own, without what pytest has set up."""
    signal.alarm(LIMIT_SECONDS)
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False, buffering=1)  # noqa: SIM115
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    logging.getLogger().handlers.clear()
    if folder is not None:
        os.chdir(folder)
    if environment is not None:
        os.environ.clear()
        os.environ.update(environment)


def _status_of(run: Callable[[], object]) -> int:
    try:
        run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (as Python does)
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
    return 0
