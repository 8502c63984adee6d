"""A second Docker engine, which tests may kill."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import anyio
import pytest
from anyio import to_thread


class OwnEngine:
    """A second Docker engine, with live-restore, that tests may kill. Everything of it is in one folder.

    It has a network namespace of its own: without a bridge, an engine removes the interface `docker0`, which
    would be that of the machine's own engine.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.host = f"unix://{folder}/sock"

    async def start(self) -> Self:
        configuration = self._folder / "daemon.json"
        configuration.write_text("{}")
        options = {
            "--config-file": configuration,
            "--data-root": self._folder / "data",
            "--exec-root": self._folder / "exec",
            "--pidfile": self._folder / "pid",
            "--host": self.host,
            "--bridge": "none",
        }
        flags = ("--live-restore", "--iptables=false", "--ip-masq=false")
        argv = [
            "unshare",
            "--net",
            "dockerd",
            *(str(part) for option in options.items() for part in option),
            *flags,
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = await to_thread.run_sync(
                lambda: subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
            )
        while not await self._answers():
            assert self._process.poll() is None, (self._folder / "log").read_text()[-2000:]
            await anyio.sleep(0.05)
        return self

    async def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        await to_thread.run_sync(self._process.wait)
        # The engine's containerd is killed with it. By its file, the next engine would wait for one that has
        # not been reaped yet.
        (self._folder / "exec/containerd/containerd.pid").unlink()

    async def aclose(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            await self.start()
        if containers := await self.containers():
            await self._docker("rm", "--force", *containers)
        # Killed, since it takes 40 s to stop. Each engine mounts its folder, and sometimes layers inside; a
        # killed one leaves them.
        await self.kill()
        self._kill_shims()
        while self._folder.exists():
            await anyio.run_process(["umount", "--recursive", f"{self._folder}/data"], check=False)
            await to_thread.run_sync(lambda: shutil.rmtree(self._folder, ignore_errors=True))

    def _kill_shims(self) -> None:
        """Kill the processes of containers that ended while no engine was there to end them."""
        folder = os.fsencode(self._folder)
        for process in Path("/proc").iterdir():
            with suppress(OSError):
                if process.name.isdecimal():
                    arguments = (process / "cmdline").read_bytes().split(b"\0")
                    if arguments[0].endswith(b"containerd-shim-runc-v2") and any(
                        argument.startswith(folder) for argument in arguments[1:]
                    ):
                        os.kill(int(process.name), signal.SIGKILL)

    async def containers(self) -> list[str]:
        """The ids of all its containers."""
        return (await self._docker("ps", "--all", "--quiet")).stdout.decode().split()

    async def _answers(self) -> bool:
        return (await self._docker("version")).returncode == 0

    async def _docker(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        return await anyio.run_process(["docker", "--host", self.host, *arguments], check=False)


@asynccontextmanager
async def engine_with(image: str) -> AsyncGenerator[OwnEngine]:
    """Start an engine that has this image of the machine's engine. Skips the test without root or dockerd."""
    if os.geteuid() != 0 or not shutil.which("dockerd"):
        pytest.skip("needs root and dockerd")
    # Not pytest's own folder: the path of a socket is limited to 107 bytes.
    engine = OwnEngine(Path(tempfile.mkdtemp(prefix="decathlon-engine-")))
    await engine.start()
    try:
        saved = await anyio.run_process(["docker", "save", image])
        await anyio.run_process(["docker", "--host", engine.host, "load"], input=saved.stdout)
        yield engine
    finally:
        await engine.aclose()
