"""What a pytest that is terminated leaves on this machine."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.sandboxes.local.process_table import sandboxes_with_processes
from tests.driver.peer import until

pytestmark = pytest.mark.anyio

PROGRAM = Path(__file__).parent / "terminated.py"


async def test_terminated_pytest_leaves_no_process_of_a_sandbox(tmp_path: Path) -> None:
    owner, ready = f"test-{secrets.token_hex(4)}", tmp_path / "ready"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(PROGRAM)]
    environment = {**os.environ, "TERMINATED_OWNER": owner, "TERMINATED_READY": str(ready)}
    with (tmp_path / "log").open("wb") as log:
        process = await anyio.open_process(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    async with process:
        await until(ready.exists)
        assert len(sandboxes_with_processes(owner)) == 2
        process.send_signal(signal.SIGTERM)
        await process.wait()
    await until(lambda: not sandboxes_with_processes(owner))
    assert "KeyboardInterrupt" in (tmp_path / "log").read_text()
