"""Prints the processor time that the tests took, and with `--cpu-time N` the N test modules that took most.

Counted are the test processes and the child processes that they waited for; containers are not.
"""

from __future__ import annotations

import resource
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import pytest

_PROPERTY = "cpu_seconds"


def cpu_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class CpuTime:
    """A plugin of pytest, in every process of pytest-xdist."""

    def __init__(self) -> None:
        self._by_module: defaultdict[str, float] = defaultdict(float)
        self._workers_seconds = 0.0
        self._started: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self._started[item.nodeid] = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown":
            seconds = cpu_seconds() - self._started.pop(item.nodeid)
            report.user_properties.append((_PROPERTY, seconds))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            seconds = dict(report.user_properties).get(_PROPERTY, 0.0)
            self._by_module[report.nodeid.partition("::")[0]] += float(str(seconds))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_PROPERTY] = cpu_seconds()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._workers_seconds += getattr(node, "workeroutput", {}).get(_PROPERTY, 0.0)

    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> None:
        # The workers are children of this process, but not all of them have been waited for.
        own = resource.getrusage(resource.RUSAGE_SELF)
        seconds = (
            own.ru_utime + own.ru_stime + self._workers_seconds if self._workers_seconds else cpu_seconds()
        )
        terminalreporter.write_line(f"processor time: {seconds:.0f} s")
        modules = sorted(self._by_module.items(), key=lambda module: -module[1])
        for module, module_seconds in modules[: config.getoption("--cpu-time")]:
            terminalreporter.write_line(f"{module_seconds:8.1f} s  {module}")
