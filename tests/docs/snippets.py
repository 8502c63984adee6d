"""Runs a page's code blocks unchanged, except for the server's address."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from tests.docs.pages import SERVER, Block

TIMEOUT_SECONDS = 120
SUFFIXES = {"python": ".py", "js": ".mjs"}


async def run(
    block: Block,
    program: Sequence[str | Path],
    *,
    url: str | None,
    folder: Path,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run a block with `program` in `folder` and return its output. Fails if the exit code is not 0.

    `url`: the server in the place of the one that the block names; None for a block that starts its own.
    """
    assert (SERVER in block.text) == (url is not None), f"{block}: does it name the server {SERVER}?"
    file = folder / f"block{SUFFIXES.get(block.language, '.sh')}"
    file.write_text(block.text.replace(SERVER, url or SERVER), "utf-8")
    with anyio.fail_after(TIMEOUT_SECONDS):
        process = await anyio.run_process(
            [*map(str, program), str(file)],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            check=False,
        )
    output = process.stdout.decode()
    assert process.returncode == 0, f"{block}\n{output}\n{process.stderr.decode()}"
    return output
