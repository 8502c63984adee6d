"""Identity of the programs that processes of this machine find: those of Python, and the PATH."""

from __future__ import annotations

import json
import os
import shutil
from hashlib import sha256
from pathlib import Path
from subprocess import DEVNULL, SubprocessError

import anyio
import anyio.to_thread

_FIND_FOLDERS = "import json, sys; print(json.dumps([sys.version, *filter(None, sys.path)]))"


class LocalEnvironment:
    """Finds a text that changes when another Python is installed, or packages are.

    Programs that are no Python packages, such as those of npm, can change without it.
    """

    def __init__(self) -> None:
        self._python: Path | None = None
        self._folders: list[str] = []

    async def identity(self) -> str | None:
        """The present identity; None if there is no usable `python3`. Looks at the times of some folders."""
        program = shutil.which("python3")
        if program is None:
            return None
        python = Path(program)
        if python != self._python:
            try:
                with anyio.fail_after(10):  # starting Python takes 20 ms on an idle machine
                    result = await anyio.run_process([program, "-c", _FIND_FOLDERS], stderr=DEVNULL)
                self._folders = json.loads(result.stdout)
            except (OSError, SubprocessError, TimeoutError, ValueError):
                return None
            self._python = python
        return await anyio.to_thread.run_sync(self._digest, python)

    def _digest(self, python: Path) -> str:
        # An installation changes the time of its `site-packages`.
        times = {folder: _time_ns(Path(folder)) for folder in (str(python.resolve()), *self._folders)}
        parts = [os.environ.get("PATH"), str(python), times]
        return f"local:{sha256(json.dumps(parts).encode()).hexdigest()}"


def _time_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
