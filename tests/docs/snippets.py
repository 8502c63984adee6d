"""Running what a page says: as it stands there, but for the address of the server."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from tests.docs.pages import SERVER, Block

PATIENCE_SECONDS = 120
SUFFIXES = {"python": ".py", "js": ".mjs"}


async def run(
    block: Block,
    program: Sequence[str | Path],
    *,
    url: str,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> str:
    """What a block printed, run by `program` in a folder of its own. It must end well."""
    assert SERVER in block.text, f"{block} is for no server"
    file = folder / f"block{SUFFIXES.get(block.language, '.sh')}"
    file.write_text(block.text.replace(SERVER, url), "utf-8")
    with anyio.fail_after(PATIENCE_SECONDS):
        done = await anyio.run_process(
            [*map(str, program), str(file)],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            check=False,
        )
    said = done.stdout.decode()
    assert done.returncode == 0, f"{block}\n{said}\n{done.stderr.decode()}"
    return said
