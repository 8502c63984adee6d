"""Prints the processor time of the test processes and of the processes that they waited for."""

from __future__ import annotations

import resource
from typing import Any

import pytest

_PROPERTY = "cpu_seconds"


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class CpuTime:
    """A plugin of pytest, in every process of pytest-xdist."""

    workers_seconds = 0.0

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_PROPERTY] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self.workers_seconds += getattr(node, "workeroutput", {}).get(_PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        # The workers are children of this process, but not all of them have been waited for.
        own = resource.getrusage(resource.RUSAGE_SELF)
        seconds = (
            own.ru_utime + own.ru_stime + self.workers_seconds if self.workers_seconds else cpu_seconds()
        )
        terminalreporter.write_line(f"processor time: {seconds:.0f} s")
