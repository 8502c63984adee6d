"""Runs the tests in several processes (`--forks N`), forked once everything is imported and collected.

pytest-xdist starts each of its processes from nothing: to collect takes 4 s of processor time in each. Here a
process more takes 10 ms, so there can be enough of them to fill the time in which tests wait.

A fork takes whole modules, whose fixtures are shared. Those that took longest in the last run are the first.
"""

from __future__ import annotations

import os
import signal
import struct
import sys
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import groupby
from mmap import mmap
from multiprocessing.connection import Connection, Pipe, wait
from tempfile import TemporaryFile
from typing import Any, cast

import pytest
from _pytest.runner import runtestprotocol  # other plugins use it too: nothing else returns the reports

SECONDS_BY_MODULE = "decathlon/seconds"
NUMBER = struct.Struct("=I")


@dataclass
class Fork:
    """A process that runs tests. `items`: what it has taken and not finished, in order."""

    pid: int
    exited: int
    """Readable once the process has ended."""
    reports: Connection
    items: list[pytest.Item] = field(default_factory=list[pytest.Item])


class Forks:
    """A plugin of pytest."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.modules: list[list[pytest.Item]] = []
        self.queue, self.entrance = os.pipe()
        self.stop = mmap(-1, 1)
        """Not zero once no further test is to start."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        config = session.config
        if session.testsfailed or config.option.collectonly or config.option.usepdb or not session.items:
            return None  # pytest's own loop
        cache = getattr(config, "cache", None)
        known: dict[str, float] = cache.get(SECONDS_BY_MODULE, {}) if cache else {}
        self._divide(session.items, known)
        for index in range(len(self.modules)):
            os.write(self.entrance, NUMBER.pack(index))
        os.set_blocking(self.queue, False)
        config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one for all
        if terminal := config.pluginmanager.getplugin("terminalreporter"):
            cast("Any", terminal).showfspath = False  # modules run beside each other
        forks = [self._fork(session) for _ in range(min(self.number, len(self.modules)))]
        seconds: dict[str, float] = {}
        try:
            for report in self._reports(session, forks):
                module = report.nodeid.partition("::")[0]
                seconds[module] = seconds.get(module, 0) + report.duration
                if session.shouldfail or session.shouldstop:
                    self.stop[0] = 1
        finally:
            self._end(forks)
        if cache:
            cache.set(SECONDS_BY_MODULE, {**known, **seconds})
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _divide(self, items: list[pytest.Item], known: dict[str, float]) -> None:
        modules = [list(tests) for _, tests in groupby(items, key=_module)]
        modules.sort(key=lambda tests: -known.get(_module(tests[0]), sum(map(_assumed_seconds, tests))))
        self.modules = modules

    def _fork(self, session: pytest.Session, first: list[pytest.Item] | None = None) -> Fork:
        receiver, sender = cast("tuple[Connection, Connection]", Pipe(duplex=False))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._run(session, first or [], sender)
                status = 0
            except KeyboardInterrupt:
                pass
            except BaseException:  # noqa: BLE001  # a fault of pytest or of a plugin
                traceback.print_exc(file=sys.__stderr__)
            finally:
                os._exit(status)  # not into pytest's frames, which would print results
        sender.close()
        return Fork(pid, os.pidfd_open(pid), receiver, list(first or []))

    def _reports(self, session: pytest.Session, forks: list[Fork]) -> Iterator[pytest.TestReport]:
        """Pass on the reports of all forks.

        The test in which a fork dies fails, and another fork runs what is left.
        """
        hook = session.config.hook
        while forks:
            ready = wait([source for fork in forks for source in (fork.reports, fork.exited)])
            for fork in [fork for fork in forks if fork.reports in ready or fork.exited in ready]:
                ended = fork.exited in ready
                while fork.reports.poll():
                    try:
                        message: Any = fork.reports.recv()
                    except EOFError:
                        break
                    if isinstance(message, int):
                        fork.items.extend(self.modules[message])
                        continue
                    report = hook.pytest_report_from_serializable(config=session.config, data=message)
                    if report.when == "setup":
                        hook.pytest_runtest_logstart(nodeid=report.nodeid, location=report.location)
                    hook.pytest_runtest_logreport(report=report)
                    if report.when == "teardown":
                        hook.pytest_runtest_logfinish(nodeid=report.nodeid, location=report.location)
                        fork.items.pop(0)
                    yield report
                if ended:
                    forks.remove(fork)
                    status = self._reap(fork)
                    if fork.items and not self.stop[0]:
                        died = fork.items.pop(0)
                        reason = f"its process ended with status {status}"
                        report = pytest.TestReport(died.nodeid, died.location, {}, "failed", reason, "call")
                        hook.pytest_runtest_logreport(report=report)
                        yield report
                        forks.append(self._fork(session, fork.items))

    def _reap(self, fork: Fork) -> int:
        _, status = os.waitpid(fork.pid, 0)
        os.close(fork.exited)
        fork.reports.close()
        return os.waitstatus_to_exitcode(status)

    def _end(self, forks: list[Fork]) -> None:
        """After an interrupt: the forks tear down their fixtures."""
        self.stop[0] = 1
        for fork in forks:
            os.kill(fork.pid, signal.SIGTERM)
        for fork in forks:
            self._reap(fork)

    # What follows runs in a fork.

    def _run(self, session: pytest.Session, first: list[pytest.Item], sender: Connection) -> None:
        _capture_into_own_files(session.config)
        session.config.pluginmanager.register(_Sender(sender))
        items = self._items(first, sender)
        item = next(items, None)
        try:
            while item and not self.stop[0]:
                following = next(items, None)
                session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                item = following
        finally:
            # What an interrupt leaves; pytest itself does this in a hook in which other plugins print.
            state: Any = session._setupstate  # pyright: ignore[reportPrivateUsage]  # no public name
            state.teardown_exact(None)

    def _items(self, first: list[pytest.Item], sender: Connection) -> Iterator[pytest.Item]:
        yield from first
        while True:
            try:
                (index,) = NUMBER.unpack(os.read(self.queue, NUMBER.size))  # atomic
            except BlockingIOError:
                return
            sender.send(index)
            yield from self.modules[index]


class _Sender:
    """Sends the reports of a fork's tests, instead of printing them."""

    def __init__(self, sender: Connection) -> None:
        self.sender = sender

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            self.sender.send(
                item.config.hook.pytest_report_to_serializable(config=item.config, report=report)
            )
        return True


def _assumed_seconds(test: pytest.Item) -> float:
    """How long a test may take that has not run here."""
    if timeout := test.get_closest_marker("timeout"):
        return timeout.args[0] / 60
    return 1.0 if test.get_closest_marker("docker") else 0.2


def _capture_into_own_files(config: pytest.Config) -> None:
    """Replace the files in which pytest captures output: forks share the positions of open files.

    The objects stay, because some libraries have `sys.stderr` as the default of an argument.
    """
    manager: Any = config.pluginmanager.getplugin("capturemanager")
    both = manager and manager._global_capturing  # pytest 9 has no public name
    for capture in (both.out, both.err) if both else ():
        if hasattr(capture, "tmpfile"):
            with TemporaryFile(buffering=0) as own:
                os.dup2(own.fileno(), capture.tmpfile.fileno())


def _module(item: pytest.Item) -> str:
    return item.nodeid.partition("::")[0]
