"""Program for tests: runs a Python script in a sandbox with a network, and prints its output.

Arguments: the folder for sandboxes, the script, and the user to become before, if any.
"""

from __future__ import annotations

import encodings.ascii
import os
import secrets
import sys
from pathlib import Path

import anyio

from decathlon_mcp.plugins.conformance.target import receive_all
from tests.sandboxes.conftest import namespaces_bench


async def main(folder: str, script: str) -> None:
    bench = namespaces_bench(f"networked-{secrets.token_hex(4)}", Path(folder), "networked", None)
    spec = bench.python_spec(f"input()\n{script}")
    async with bench.provider, bench.provider.open(spec) as sandbox:
        await sandbox.stream.send(b"\n")
        sys.stdout.write((await receive_all(sandbox)).decode() + sandbox.log_tail)


def become(user: int) -> None:
    """Everything that is imported late must be by now, as that user may not read this Python's files."""
    assert encodings.ascii
    anyio.run(anyio.sleep, 0)
    os.setgroups([])
    os.setgid(user)
    os.setuid(user)


if __name__ == "__main__":
    folder, script, *user = sys.argv[1:]
    if user:
        become(int(user[0]))
        sys.executable = "/usr/bin/python3"
        sys.prefix = sys.exec_prefix = sys.base_prefix = sys.base_exec_prefix = "/usr"
    anyio.run(main, folder, script)
