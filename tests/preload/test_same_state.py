"""A server that is a fork is like one that starts by itself."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.preload.conftest import STATE, Machine

pytestmark = pytest.mark.anyio


async def state_of(machine: Machine) -> dict[str, Any]:
    async with machine.sandbox(STATE) as (_, driver):
        await driver.start(["state"], deadline_seconds=60)
        found = json.loads(await machine.call(driver, "state"))
        found["children"] = (await machine.call(driver, "run", code=CHILD)).splitlines()
        return found


def comparable(value: object) -> list[str]:
    """What must be the same: without addresses, the driver's marks, and numbers of sandboxes and mounts."""
    text = json.dumps(value, indent=1)
    text = re.sub(r"0x[0-9a-f]{6,}|[0-9a-f]{16}-\d+-|test-[0-9a-f-]{8,}|bindfile\w{6}", "", text)
    return re.sub(r'"\d+ \d+ \d+:\d+ ', '"', text).splitlines()


CHILD = """
import os, subprocess, sys
print(subprocess.run([sys.executable, "-c", "import os, sys; print(sorted(os.environ.items()), sys.argv)"],
                     capture_output=True, text=True).stdout)
status = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True).stdout
print(status.count("NoNewPrivs:\\t1"))
"""


@contextmanager
def ignored(*numbers: signal.Signals) -> Generator[None]:
    """As in a server that a shell has started in the background."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def test_a_fork_has_the_state_of_a_server_that_starts_by_itself(machine: Machine) -> None:
    machine.merges = True
    cold = await state_of(machine)
    assert machine.preloads.cold == ["it is not preloaded"]
    with ignored(signal.SIGINT, signal.SIGQUIT):
        await machine.preload(STATE)
    machine.preloads.cold.clear()
    fork = await state_of(machine)
    assert not machine.preloads.cold
    extra = {*fork.pop("modules")} - {*cold.pop("modules")}
    for key in cold:
        assert comparable(fork[key]) == comparable(cold[key]), key
    # What this process needs itself; all of the standard library.
    assert extra <= {"ctypes", "_ctypes", "ctypes._endian", "gc"}
