"""Other proxies in front of the same tool server, called by the same client, in turns with this server.

They are installed from the package registries when they are needed, each into a folder of its own in the
user's cache folder. A proxy that cannot be installed or does not start is skipped, with the reason.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from benchmarks.calls import connected, over_http
from benchmarks.figures import Figures
from benchmarks.load import closed_loop, echo, for_each, wire_sessions
from benchmarks.running import (
    START_SECONDS,
    TOOL_SERVER,
    Run,
    ServerProcess,
    UnavailableError,
    decathlon,
    started,
    tool_server,
)
from benchmarks.samples import Measurement, measure_in_turns
from benchmarks.wire_client import wire_client

SESSIONS = 16
INSTALL_SECONDS = 600.0
FASTMCP = """\
import sys
from fastmcp.server import create_proxy
server = {"command": sys.argv[2], "args": sys.argv[3:]}
create_proxy({"mcpServers": {"echo": server}}).run("http", host="127.0.0.1", port=int(sys.argv[1]))
"""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that runs a stdio server.

    `install`: commands that install it in a folder. `command` gets that folder, a port, and the command of
    the stdio server.
    """

    name: str
    install: Callable[[Path], Sequence[Sequence[str]]]
    command: Callable[[Path, int, Sequence[str]], Sequence[str]]
    env: Mapping[str, str] = field(default_factory=dict[str, str])


def _pip(*packages: str) -> Callable[[Path], Sequence[Sequence[str]]]:
    def commands(folder: Path) -> Sequence[Sequence[str]]:
        pip = (f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install")
        return ((sys.executable, "-m", "venv", str(folder)), (*pip, *packages))

    return commands


def _npm(package: str) -> Callable[[Path], Sequence[Sequence[str]]]:
    return lambda folder: (("npm", "install", "--silent", "--prefix", str(folder), package),)


PROXIES = (
    Proxy(
        "FastMCP's proxy",
        _pip("fastmcp"),
        lambda folder, port, server: (f"{folder}/bin/python", "-c", FASTMCP, str(port), *server),
        {"FASTMCP_SHOW_SERVER_BANNER": "false", "FASTMCP_CHECK_FOR_UPDATES": "off"},
    ),
    Proxy(
        "mcp-proxy",
        _pip("mcp-proxy", "mcp<2"),
        lambda folder, port, server: (
            f"{folder}/bin/mcp-proxy",
            "--host=127.0.0.1",
            f"--port={port}",
            "--",
            *server,
        ),
    ),
    Proxy(
        "supergateway",
        _npm("supergateway"),
        lambda folder, port, server: (
            *(shutil.which("node") or "node", f"{folder}/node_modules/supergateway/dist/index.js"),
            *("--stdio", " ".join(server), "--outputTransport", "streamableHttp", "--stateful"),
            *("--port", str(port), "--logLevel", "none"),
        ),
    ),
)


async def measure_proxies(run: Run, figures: Figures) -> None:
    """The median of one call, and calls per second and the proxy's own CPU time with some sessions."""
    async with AsyncExitStack() as stack:
        direct = await stack.enter_async_context(tool_server(run))
        processes: dict[str, tuple[ServerProcess, str]] = {"direct": (direct, "echo")}
        for provider in ("docker", "host"):
            server = await stack.enter_async_context(decathlon(run, provider=provider))
            name = f"decathlon-mcp, {provider}"
            processes[name] = (ServerProcess(server.task("echo"), server.pid), "echo__echo")
        for proxy in PROXIES:
            try:
                folder = await anyio.to_thread.run_sync(_install, proxy)
                process = await stack.enter_async_context(_serve(run, proxy, folder))
            except UnavailableError as error:
                run.skipped[proxy.name] = str(error)
            else:
                processes[proxy.name] = (process, "echo")
        for _ in range(run.options.repeats):
            await _measure_single_calls(run, figures, processes)
            await _measure_load(run, figures, processes)


async def _measure_single_calls(
    run: Run, figures: Figures, processes: Mapping[str, tuple[ServerProcess, str]]
) -> None:
    async with AsyncExitStack() as clients:
        measurements: dict[str, Measurement] = {}
        for name, (process, tool) in processes.items():
            client = await clients.enter_async_context(connected(process.url, "handshake"))
            measurements[name] = over_http(client, tool)
        rounds = run.options.rounds
        samples = await measure_in_turns(measurements, rounds=rounds, warm_up=max(1, rounds // 10))
    floor = ("direct", samples["direct"].p50 * 1e3)
    for name in processes:
        if name != "direct":
            figures.add(f"a call, {name}: p50", "ms", samples[name].p50 * 1e3, floor=floor)


async def _measure_load(
    run: Run, figures: Figures, processes: Mapping[str, tuple[ServerProcess, str]]
) -> None:
    direct = 0.0
    for name, (process, tool) in processes.items():
        async with AsyncExitStack() as stack:
            clients = await stack.enter_async_context(wire_sessions([process.url] * SESSIONS))
            for client in clients:
                stack.push_async_callback(client.end)
            await for_each([partial(echo, client, tool) for client in clients])
            load = await closed_loop(
                clients, tool, seconds=run.options.load_seconds, cpu=lambda of=process: of.cpu_seconds
            )
        if name == "direct":
            direct = load.calls_per_second
            continue
        floor = ("direct", direct)
        figures.add(f"calls per second, {name}", "/s", load.calls_per_second, floor=floor, size=SESSIONS)
        assert load.cpu_seconds is not None
        figures.add(
            f"CPU time of the proxy's process per call, {name}", "µs", load.cpu_seconds * 1e6, size=SESSIONS
        )


def _install(proxy: Proxy) -> Path:
    """Install a proxy unless that has been done before. Raises UnavailableError."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "decathlon-mcp" / "benchmarks" / proxy.name.lower().replace("'s ", "-")
    done = folder / "installed"
    if done.exists():
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for command in proxy.install(folder):
        try:
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=INSTALL_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            lines = str(getattr(error, "stderr", "") or error).strip().splitlines()
            raise UnavailableError(f"cannot be installed: {lines[-1]}") from error
    done.touch()
    return folder


@asynccontextmanager
async def _serve(run: Run, proxy: Proxy, folder: Path) -> AsyncGenerator[ServerProcess]:
    """Start a proxy and wait until it answers `initialize`. Raises UnavailableError if it does not."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}/mcp"
    # Python ignores this option. It marks the process for `Run`: not every proxy passes its environment on.
    command = proxy.command(folder, port, (sys.executable, "-X", run.id, str(TOOL_SERVER)))
    async with started(run, command, env=proxy.env, output=subprocess.DEVNULL) as process:
        try:
            with anyio.fail_after(START_SECONDS):
                while not await _answers(url):
                    if process.returncode is not None:
                        raise UnavailableError(f"it ended with status {process.returncode}")
                    await anyio.sleep(0.1)
        except TimeoutError:
            raise UnavailableError(f"it did not answer within {START_SECONDS:g} s") from None
        yield ServerProcess(url, process.pid)


async def _answers(url: str) -> bool:
    try:
        async with wire_client(url) as client:
            await client.request("tools/list", {})
            await client.end()
    except (OSError, EOFError, RuntimeError, ValueError):
        return False
    return True
