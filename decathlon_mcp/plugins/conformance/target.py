"""The provider that is checked, and the first process of most checks."""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import anyio

from decathlon_mcp.sandboxes.base import Limits, Provider, SandboxSpec
from decathlon_mcp.types import Network

ROOT = PurePosixPath("/episode")
_PROBE = """
import json, sys
for line in sys.stdin.buffer:
    try:
        request = json.loads(line)
    except ValueError:
        continue
    if "write" in request:
        with open(request["write"], "w") as file:
            file.write(request["text"])
    if "exit" in request:
        sys.exit(request["exit"])
    print(json.dumps({"python": sys.version_info[:2], "echo": request.get("echo")}), flush=True)
"""
PROBE_COMMAND = ("python3", "-I", "-S", "-u", "-c", _PROBE)
"""First process of most checks. Answers each line of JSON with one; torn lines are ignored.

If the line says so, it writes a file ("write", "text") or exits ("exit").
"""
OUTPUT_BYTES = 32 << 10
"""What a first process that survives can write without a stream and without waiting, see `Sandbox.reopen`."""


LastStep = Literal["none", "pause", "end", "save", "copy"]
"""What a server does to its sandboxes before it is killed: nothing, pause them, or wait for their end.

For providers with snapshots: `save` saves them and opens copies of other names, over and over, until it is
killed. `copy` has each replaced by a copy of the same name. The snapshots are in folders with
"saved-by-server" in their names, next to the provider's own."""


@dataclass(frozen=True, kw_only=True)
class ProviderUnderTest:
    """A provider to check. It must be entered, and have no sandbox open.

    `create_second` makes another provider of the same owner on the same machine. `leave_behind` opens
    sandboxes in a server with the owner `former_owner` and kills that server with SIGKILL, after it has done
    to each what the given step says. `resources` lists everything on the machine that belongs to both owners'
    sandboxes (containers, processes, folders). `scratch` is an existing folder for archives. `runs_commands`
    is false for a fake, whose only first process is one that answers as `PROBE_COMMAND` does. `survives` is
    that of the provider's `ProviderPlugin`. `network` is that of the sandboxes that the checks open.
    """

    owner: str
    provider: Provider
    create_second: Callable[[], Provider]
    former_owner: str
    leave_behind: Callable[[Sequence[SandboxSpec], LastStep], Awaitable[None]]
    resources: Callable[[], Awaitable[Collection[str]]]
    scratch: Path
    image: str | None = None
    root: PurePosixPath = ROOT
    runs_commands: bool = True
    survives: bool = True
    network: Network = "none"

    def new_spec(self, command: tuple[str, ...] = PROBE_COMMAND, *, survives: bool = False) -> SandboxSpec:
        """A sandbox with a new name."""
        return SandboxSpec(
            name=f"{self.owner}-{secrets.token_hex(4)}",
            command=command,
            root=self.root,
            image=self.image,
            network=self.network,
            limits=Limits(memory_mib=512),
            survives=survives,
        )

    def python_spec(self, script: str, *, survives: bool = False) -> SandboxSpec:
        """A sandbox whose first process is a Python script."""
        return self.new_spec(("python3", "-I", "-S", "-u", "-c", script), survives=survives)

    async def assert_nothing_left(self) -> None:
        """Assert that this owner has nothing on the machine."""
        remaining = await self.resources()
        assert not remaining, f"left on the machine: {sorted(remaining)}"

    async def wait_until_nothing_left(self) -> None:
        """For removals that nobody waits for; the check's time limit bounds it."""
        while await self.resources():  # noqa: ASYNC110  (nothing reports that a process is gone)
            await anyio.sleep(0.05)
