"""Runs a page's code blocks unchanged, except for the server's address, with packages in new environments."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio

from tests.docs.pages import SERVER, Block

INSTALL_SECONDS = 1800
SUFFIXES = {"python": ".py", "js": ".mjs"}


async def output_of(
    command: Sequence[str | Path],
    folder: Path,
    environment: Mapping[str, str] | None = None,
    seconds: float = 120,
) -> str:
    """Run a program in a folder and return its output. Fails if the exit code is not 0."""
    with anyio.fail_after(seconds):
        process = await anyio.run_process(
            [*map(str, command)],
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            check=False,
        )
    output = process.stdout.decode()
    assert process.returncode == 0, f"{command}\n{output}\n{process.stderr.decode()}"
    return output


async def run(
    block: Block,
    program: Sequence[str | Path],
    *,
    url: str | None,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    seconds: float = 120,
) -> str:
    """Run a block with `program` in `folder` and return its output.

    `url`: the server in the place of the one that the block names; None for a block that starts its own.
    """
    assert (SERVER in block.text) == (url is not None), f"{block}: does it name the server {SERVER}?"
    file = folder / f"block{SUFFIXES.get(block.language, '.sh')}"
    file.write_text(block.text.replace(SERVER, url or SERVER), "utf-8")
    return await output_of([*program, file], folder, environment, seconds)


async def install(folder: Path, *packages: str, python: str = sys.executable) -> Path:
    """Install packages in a new virtual environment and return the folder of its programs."""
    programs = folder / "venv" / "bin"
    pip = (programs / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for command in ((python, "-m", "venv", folder / "venv"), (*pip, *packages)):
        await output_of(command, folder, seconds=INSTALL_SECONDS)
    return programs
