"""Signals, umask and OOM score of the programs that the driver starts are those of programs outside."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from decathlon_mcp.driver.client import BOOT_COMMAND, connect
from decathlon_mcp.plugins.conformance.first_processes import SIGNALS_SCRIPT
from decathlon_mcp.plugins.conformance.target import receive_all
from tests.sandboxes.conftest import Bench

pytestmark = pytest.mark.anyio
ISOLATED = [
    "namespaces",
    *(pytest.param(kind, marks=pytest.mark.docker) for kind in ("docker", "gvisor")),
]
"""Those for whose image an engine is needed are marked."""
PYTHON = ("python3", "-I", "-S", "-c")
STATUS = ("grep", "Sig[BI]", "/proc/self/status")
GLIBCS_OWN = 0b11 << 31
"""Signals 32 and 33, which no program can set: they stay as the first program was started."""


@pytest.mark.parametrize("bench", ISOLATED, indirect=True)
async def test_programs_of_the_driver_take_signals_as_usual(bench: Bench) -> None:
    async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as driver:
        result = await driver.run([*PYTHON, SIGNALS_SCRIPT], cwd=str(sandbox.root), timeout_seconds=300)
        assert result.exit_code == 0, result
        assert json.loads(result.stdout) == {}


@pytest.mark.parametrize("bench", ["plain", "namespaces"], indirect=True)
async def test_first_process_does_not_inherit_what_its_server_ignores_or_blocks(bench: Bench) -> None:
    """As with `nohup decathlon-mcp serve &` in a script."""
    ignored = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR2)
    with ignoring(ignored, blocked=[signal.SIGUSR1]):
        async with bench.provider.open(bench.spec(*STATUS)) as sandbox:
            found = (await receive_all(sandbox)).decode()
    assert blocked_and_ignored(found) == [0, 0]


@pytest.mark.parametrize("bench", ["namespaces"], indirect=True)
async def test_programs_of_the_driver_do_not_inherit_what_an_engine_ignores(bench: Bench) -> None:
    """An engine that was started so passes it on to its containers."""
    spec = bench.spec("sh", "-c", 'trap "" HUP INT QUIT USR2; exec "$@"', "sh", *BOOT_COMMAND)
    async with bench.provider.open(spec) as sandbox, connect(sandbox) as driver:
        result = await driver.run(STATUS, cwd=str(sandbox.root), timeout_seconds=60)
    assert blocked_and_ignored(result.stdout) == [0, 0]


@pytest.mark.parametrize("bench", ["namespaces"], indirect=True)
async def test_isolated_sandbox_has_no_umask_and_no_oom_score_of_its_server(bench: Bench) -> None:
    """A unit of systemd can set both; an evaluator would find files that upstream's would not make so."""
    with umask_and_oom_score(0o077, -500) as score:
        async with bench.provider.open(bench.spec()) as sandbox, connect(sandbox) as driver:
            script = "umask; cat /proc/self/oom_score_adj; mkdir a; stat -c %a a /tmp /var/tmp ."
            result = await driver.run(["sh", "-c", script], cwd=str(sandbox.root), timeout_seconds=60)
    assert result.stdout.split() == ["0022", str(max(0, score)), "755", "1777", "1777", "755"], result


def blocked_and_ignored(status: str) -> list[int]:
    """The sets of signals in lines of /proc/PID/status."""
    return [int(line.split()[1], 16) & ~GLIBCS_OWN for line in status.splitlines()]


@contextmanager
def umask_and_oom_score(umask: int, score: int) -> Generator[int]:
    """Yields the score that this process has then: a lower one requires CAP_SYS_RESOURCE."""
    file = Path("/proc/self/oom_score_adj")
    former_umask, former_score = os.umask(umask), file.read_text()
    try:
        with suppress(PermissionError):
            file.write_text(str(score))
        yield int(file.read_text())
    finally:
        os.umask(former_umask)
        with suppress(PermissionError):
            file.write_text(former_score)


@contextmanager
def ignoring(numbers: Iterable[signal.Signals], blocked: Iterable[signal.Signals]) -> Generator[None]:
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler)
