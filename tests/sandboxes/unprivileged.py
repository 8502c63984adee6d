"""Program for tests: stops being root, and runs conformance checks on an image, also with kernel `gvisor`.

Prints "all passed", or the checks that failed.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import anyio

from decathlon_mcp.plugins.conformance import file_copies, first_processes, opening, snapshots, survival
from decathlon_mcp.plugins.conformance.conformance import ProviderUnderTest
from decathlon_mcp.plugins.conformance.target import download, receive_line
from tests.sandboxes.conftest import namespaces_bench
from tests.sandboxes.networked import become

USER = 1_000_000
CHECKS = (
    opening.first_process_answers_on_the_stream,
    opening.nothing_is_left_after_exit,
    file_copies.files_survive_a_round_trip,
    file_copies.unpacked_files_belong_to_the_first_process,
    first_processes.paused_sandbox_does_nothing_and_its_files_can_be_read,
    # By a resource limit where no control groups can be created.
    first_processes.number_of_processes_is_limited,
    survival.reopened_stream_reaches_the_same_first_process,
    opening.ready_machine_passes_the_providers_own_check,
)
SNAPSHOT_CHECKS = (
    snapshots.copies_go_on_where_the_sandbox_was_saved,
    snapshots.unusable_snapshots_are_refused,
)
UNREADABLE = """
import os
open("a", "w").close()
os.mkdir("b")
os.chmod("a", 0)
os.chmod("b", 0)
print("ready", flush=True)
input()
"""


async def main(kind: str, image: str, folder: Path) -> None:
    target = namespaces_bench(f"test-{secrets.token_hex(4)}", folder, kind, image)
    async with target.provider:
        assert "pids" not in target.provider.unlimited
        for check in CHECKS:
            await check(target)
        for check in SNAPSHOT_CHECKS if kind == "gvisor" else ():
            await check(replace(target, scratch=Path(tempfile.mkdtemp(dir=folder))))
        await check_unreadable_files(target, folder / "out.tar")
    sys.stdout.write("all passed\n")


async def check_unreadable_files(target: ProviderUnderTest, archive: Path) -> None:
    """What its owner has made unreadable is copied all the same."""
    async with target.provider.open(target.python_spec(UNREADABLE)) as sandbox:
        await receive_line(sandbox)
        assert {"a", "b"} <= (await download(sandbox, sandbox.root, archive)).keys()


if __name__ == "__main__":
    if os.geteuid() == 0:
        become(USER)
    with tempfile.TemporaryDirectory() as scratch:
        anyio.run(main, sys.argv[1], sys.argv[2], Path(scratch))
