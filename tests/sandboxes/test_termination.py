"""What a pytest that is terminated or killed leaves on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from tests.driver.peer import until
from tests.probe.leftovers import processes_by_sandbox

pytestmark = pytest.mark.anyio

PROGRAM = Path(__file__).parent / "terminated.py"


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
async def test_pytest_that_is_ended_leaves_no_process_of_a_sandbox(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    owner, ready = f"test-{secrets.token_hex(4)}", tmp_path / "ready"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(PROGRAM)]
    command += ["--basetemp", str(tmp_path / "here")]
    environment = {**os.environ, "TERMINATED_OWNER": owner, "TERMINATED_READY": str(ready)}
    with (tmp_path / "log").open("wb") as log:
        process = await anyio.open_process(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    async with process:
        await until(ready.exists)
        (sandboxes,) = (tmp_path / "here").glob("**/sandboxes")
        assert len(processes_by_sandbox(sandboxes)) == 2
        process.send_signal(signal_number)
        await process.wait()
    await until(lambda: not processes_by_sandbox(sandboxes))
    is_orderly = signal_number is signal.SIGTERM
    assert ("KeyboardInterrupt" in (tmp_path / "log").read_text()) == is_orderly
    assert (list((tmp_path / "here").glob("**/sandboxes/*")) == []) == is_orderly
