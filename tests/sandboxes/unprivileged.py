"""Program for tests: stops being root, and runs conformance checks on an image, also with kernel `gvisor`.

Prints "all passed", or the checks that failed.
"""

from __future__ import annotations

import os
import secrets
import sys
import tempfile
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import anyio

from decathlon_mcp.plugins.conformance import (
    file_copies,
    first_processes,
    opening,
    snapshots,
    survival,
)
from decathlon_mcp.plugins.conformance.conformance import ProviderUnderTest
from decathlon_mcp.plugins.conformance.target import download, receive_all, receive_line
from decathlon_mcp.plugins.gvisor.sandbox import GvisorSandbox
from decathlon_mcp.sandboxes.base import Limits
from decathlon_mcp.sandboxes.capabilities import snapshots_of
from decathlon_mcp.sandboxes.host.namespaces import NamespaceSandbox
from decathlon_mcp.sandboxes.host.provider import HostProvider
from tests.sandboxes.networked import become

USER = 1_000_000
CHECKS = (
    opening.first_process_answers_on_the_stream,
    opening.nothing_is_left_after_exit,
    file_copies.files_survive_a_round_trip,
    file_copies.unpacked_files_belong_to_the_first_process,
    first_processes.paused_sandbox_does_nothing_and_its_files_can_be_read,
    survival.reopened_stream_reaches_the_same_first_process,
    opening.ready_machine_passes_the_providers_own_check,
)
SNAPSHOT_CHECKS = (
    snapshots.copies_go_on_where_the_sandbox_was_saved,
    snapshots.unusable_snapshots_are_refused,
)


async def main(kind: str, image: str, folder: Path) -> None:
    owner = f"test-{secrets.token_hex(4)}"
    sandboxes = folder / "sandboxes"

    async def resources() -> Collection[str]:
        return [path.name for path in sandboxes.glob("*")]

    sandbox = GvisorSandbox if kind == "gvisor" else NamespaceSandbox
    provider = HostProvider(owner, sandboxes, kernel=sandbox)
    unused: Any = None
    target = ProviderUnderTest(
        owner=owner,
        provider=provider,
        create_second=lambda: provider,
        former_owner=owner,
        leave_behind=unused,
        resources=resources,
        scratch=folder,
        image=image,
    )
    async with provider:
        for check in CHECKS:
            await check(target)
        if snapshots_of(provider) is not None:
            for check in SNAPSHOT_CHECKS:
                await check(replace(target, scratch=Path(tempfile.mkdtemp(dir=folder))))
        await check_unreadable_files(target, folder / "out.tar")
        await check_limit_on_processes(target)
    sys.stdout.write("all passed\n")


async def check_unreadable_files(target: ProviderUnderTest, archive: Path) -> None:
    """What its owner has made unreadable is copied all the same."""
    script = """
import os
open("a", "w").close()
os.mkdir("b")
os.chmod("a", 0)
os.chmod("b", 0)
print("ready", flush=True)
input()
"""
    async with target.provider.open(target.python_spec(script)) as sandbox:
        await receive_line(sandbox)
        assert {"a", "b"} <= (await download(sandbox, sandbox.root, archive)).keys()


async def check_limit_on_processes(target: ProviderUnderTest) -> None:
    """Processes are limited by a resource limit where no control groups can be created."""
    script = """
import os, time
input()
count = 0
try:
    while count < 100:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
except BlockingIOError:
    print(count)
"""
    assert "pids" not in target.provider.unlimited
    spec = replace(target.python_spec(script), limits=Limits(pids=20))
    async with target.provider.open(spec) as sandbox:
        await sandbox.stream.send(b"\n")
        assert int(await receive_all(sandbox)) < 20


if __name__ == "__main__":
    if os.geteuid() == 0:
        become(USER)
    with tempfile.TemporaryDirectory() as scratch:
        anyio.run(main, sys.argv[1], sys.argv[2], Path(scratch))
