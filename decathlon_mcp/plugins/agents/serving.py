"""The server in this process whose episodes agents play: for `run`, and for an agent that others start."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import anyio
from anyio.abc import SocketStream
from cyclopts import Parameter
from decathlon_client import ClientError, Decathlon, Episode, NoVerdictError
from decathlon_client.process import shutdown_on_signal
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from decathlon_mcp.background import background_tasks, run_for_ever
from decathlon_mcp.cli.options import (
    DEFAULT_HOST,
    DEFAULT_PORT,
    MORE,
    PLAYER_SECONDS,
    SANDBOX_SETTINGS,
    Host,
    HostNames,
    Labels,
    Port,
    StateFolder,
    run_async,
    settings_model,
)
from decathlon_mcp.cli.output import print_json, shell_path, this_command
from decathlon_mcp.cli.serve import ListenAddress
from decathlon_mcp.cli.usage import check_seconds, report
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.authentication import AllowedHosts
from decathlon_mcp.http.listening import hosts_for, listen
from decathlon_mcp.http.protocol import ConnectionLimits, Connections
from decathlon_mcp.http.server import Server
from decathlon_mcp.labels import parse_labels
from decathlon_mcp.plugins.play import connect, redirect_logs, registry_of
from decathlon_mcp.plugins.shell import NO_VERDICT, NOT_PASSED
from decathlon_mcp.sandboxes.machine_limits import raise_descriptor_limit
from decathlon_mcp.settings import Settings, default_state
from decathlon_mcp.storage.lock import check_state_folder
from decathlon_mcp.types import JsonObject

WAIT_SECONDS = 60.0
"""How much longer than an attempt an episode lives without a request, so that a program that has stopped to
play is ended by its own time limit."""
PATH = "/mcp"


@dataclass(frozen=True, slots=True)
class EmbeddedServer:
    """The episodes of an embedded server, its ASGI application, and the limits of its connections."""

    registry: EpisodeRegistry
    app: ASGIApp
    limits: ConnectionLimits


def with_longer_lives(settings: Settings, seconds: float) -> Settings:
    """Settings with which no episode ends before an attempt of that time, whatever its agent does."""
    names = ("idle_seconds", "first_use_seconds")
    return settings.model_copy(
        update={name: max(getattr(settings, name), seconds + WAIT_SECONDS) for name in names}
    )


@asynccontextmanager
async def embedded_server(
    d: Decathlon, settings: Settings, hosts: AllowedHosts | None = None
) -> AsyncGenerator[EmbeddedServer]:
    """The server of an open `Decathlon.embedded`."""
    registry = registry_of(d)
    max_body_bytes = settings.max_body_mib << 20
    app = http_app(registry, hosts=hosts, max_body_bytes=max_body_bytes)
    limits = ConnectionLimits.for_bodies(max_body_bytes)
    async with app.running():
        yield EmbeddedServer(registry, app, limits)


def report_isolation(d: Decathlon, tasks: Iterable[str]) -> None:
    """Say on stderr which of the tasks' suites an open `Decathlon.embedded` serves without isolation."""
    registry = registry_of(d)
    suites = sorted({registry.catalogue.entry(task)[0].name for task in tasks})
    for suite in suites:
        if registry.factory(suite).provider.isolation == "none":
            danger = f"what an agent runs there can do whatever you can; `{this_command()} doctor` says why"
            report(f"the sandboxes of the suite {suite} isolate nothing: {danger}")


class PlayingApp:
    """ASGI application that serves one episode of another one at `path`, and 404 at every other path.

    `agent_id`: the id by which the episode can be played and not evaluated. With another path than the
    default, clients have to know it.
    """

    def __init__(self, app: ASGIApp, agent_id: str, path: str = PATH) -> None:
        self._app = app
        self._inner = f"/episodes/{agent_id}/mcp"
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != self._path:
            await PlainTextResponse(f"there is only {self._path} here\n", 404)(scope, receive, send)
            return
        inner = {**scope, "path": self._inner, "raw_path": self._inner.encode(), "query_string": b""}
        await self._app(inner, receive, send)


@asynccontextmanager
async def playing(app: ASGIApp, listener: socket.socket, limits: ConnectionLimits) -> AsyncGenerator[None]:
    """Serve on a listening socket, which is closed on exit with all its connections."""
    connections = Connections(limits)
    ready = anyio.Event()
    server = Server(app, connections, ready.set, lifespan=False)

    async def serve() -> None:
        # Never cancelled: it would leave its socket and connections to the event loop.
        with anyio.CancelScope(shield=True):
            await server.serve(sockets=[listener])

    async with background_tasks() as tasks:
        tasks.start_soon(run_for_ever, connections.sweep)
        tasks.start_soon(serve)
        try:
            await ready.wait()
            yield
        finally:
            server.should_exit = server.force_exit = True


REQUEST = b"verdict\n"
"""Without it nothing is graded: another server connects only to learn whether this one lives."""
SOCKET = "episode.sock"
"""Name of the socket in the state folder. It is there while its episode can be played."""


async def serve_until_signal(
    settings: Settings,
    task: str,
    address: ListenAddress,
    seconds: float,
    launch_time: str | None,
    labels: Mapping[str, str],
) -> int:
    """Serve one episode at an address that only plays, until a signal; returns the exit status.

    Prints the address and the prompt as JSON once it can be played. After `seconds` the attempt is truncated.
    Raises DecathlonError.
    """
    raise_descriptor_limit()
    server = with_longer_lives(settings, seconds)
    async with shutdown_on_signal() as watcher:
        try:
            with redirect_logs(server), listen(address.host, address.port) as listener:
                bound = replace(address, port=listener.getsockname()[1])
                hosts = hosts_for(address.host, address.allowed_host, None)
                async with (
                    connect(server, None) as d,
                    embedded_server(d, server, hosts) as embedded,
                    d.episode(task, launch_time=launch_time, labels=labels) as episode,
                    giving_verdict(episode, server.state),
                ):
                    report_isolation(d, [task])
                    assert episode.agent_address is not None
                    app = PlayingApp(embedded.app, episode.agent_address)
                    async with playing(app, listener, embedded.limits):
                        url = f"{bound.url(bound.port)}{PATH}"
                        print_json({"task": task, "address": url, "prompt": episode.prompt}, indent=None)
                        sys.stdout.flush()
                        state = (
                            "" if server.state == default_state() else f" --state {shell_path(server.state)}"
                        )
                        command = this_command()
                        report(f"{task} can be played at {url}; `{command} episode verdict{state}` grades it")
                        await anyio.sleep(seconds)
                        await episode.truncate()
                        await anyio.sleep_forever()
        except ClientError as error:
            raise DecathlonError(error.message) from error
    return watcher.status or 1


@asynccontextmanager
async def giving_verdict(episode: Episode, state: Path) -> AsyncGenerator[None]:
    """Grade the episode when somebody asks at the socket, and answer with its verdict, always the same.

    Raises BadRequestError if the state folder has the socket of an episode that is served now.
    """

    async def answer(client: SocketStream) -> None:
        async with client:
            with suppress(anyio.BrokenResourceError, anyio.EndOfStream):  # nobody waits any more
                if await client.receive(len(REQUEST)) == REQUEST:
                    await client.send(json.dumps(await _verdict(episode)).encode())

    with _short_path(state) as path:
        with suppress(OSError):
            async with await anyio.connect_unix(path):
                raise BadRequestError(
                    f"another episode is served with the state folder {state}: name another with --state"
                )
        # A socket that a killed server left is replaced.
        async with (
            await anyio.create_unix_listener(path, mode=0o600) as listener,
            background_tasks() as tasks,
        ):
            tasks.start_soon(listener.serve, answer)
            try:
                yield
            finally:
                _remove(path)


async def print_verdict(state: Path) -> int:
    """Grade the episode that `serve_episode` serves with this state folder; returns the exit status.

    0 if the attempt has succeeded, NOT_PASSED if not, NO_VERDICT without a verdict. Raises DecathlonError if
    no episode is served, or if its server ends.
    """
    check_state_folder(state)
    answer = b""
    try:
        with _short_path(state) as path:
            async with await anyio.connect_unix(path) as stream:
                await stream.send(REQUEST)
                async for chunk in stream:
                    answer += chunk
    except OSError as error:
        raise DecathlonError(
            f"no episode is served with the state folder {state} ({error.strerror}): "
            "`decathlon-mcp serve-episode TASK` serves one"
        ) from None
    except anyio.BrokenResourceError:
        answer = b""
    if not answer:
        raise DecathlonError("the server of the episode ended before there was a verdict")
    reply = json.loads(answer)
    verdict: JsonObject | None = reply["verdict"]
    if verdict is not None:
        print_json(verdict)
    if reply["problem"]:
        report(reply["problem"])
        return NO_VERDICT
    return 0 if (verdict or {}).get("success") is True else NOT_PASSED


async def _verdict(episode: Episode) -> JsonObject:
    try:
        return {"verdict": (await episode.evaluate()).raw, "problem": ""}
    except NoVerdictError as error:
        return {"verdict": error.verdict or None, "problem": error.message}
    except ClientError as error:
        return {"verdict": None, "problem": error.message}


def _remove(path: str) -> None:
    # Not by a thread: it is also called when this task is cancelled.
    Path(path).unlink(missing_ok=True)


@contextmanager
def _short_path(state: Path) -> Generator[str]:
    """A path of the socket for bind(2) and connect(2), which take 107 bytes. Raises OSError."""
    folder = os.open(state, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{SOCKET}"
    finally:
        os.close(folder)


AgentOptions = settings_model("AgentOptions", (*SANDBOX_SETTINGS, "network", "language", "max_calls"))
AgentSettings = Annotated[AgentOptions, Parameter(name="*")]
AGENT_DEFAULTS = AgentOptions.model_validate({})


def serve_episode(
    task: Annotated[str, Parameter(metavar="TASK")],
    /,
    *,
    host: Host = DEFAULT_HOST,
    port: Port = DEFAULT_PORT,
    allowed_host: Annotated[HostNames, Parameter(metavar="NAME")] = (),
    player_seconds: Annotated[float, Parameter(metavar="SECONDS", validator=check_seconds)] = PLAYER_SECONDS,
    launch_time: Annotated[str | None, Parameter(group=MORE, metavar="TIME")] = None,
    label: Annotated[Labels, Parameter(group=MORE)] = (),
    settings: AgentSettings = AGENT_DEFAULTS,
) -> int:
    """Serve one episode at an address for playing only.

    Until a signal, the address is `http://HOST:PORT/mcp`, for an agent that you start yourself, as in a
    container; `run` starts agents for you. `episode verdict` grades the attempt.

    Parameters
    ----------
    task
        The task.
    host
        Address to listen on. Anyone who reaches this address can play, without a token.
    port
        Port to listen on; 0 picks a free one.
    allowed_host
        A host name that the agent may use for this address. Can be repeated.
    player_seconds
        Time limit of the attempt, after which it is truncated.
    launch_time
        The time at which the attempt is played, in ISO 8601, which the prompt may name. [now]
    """
    address = ListenAddress(host, port, None, allowed_host, (), None, page=False)
    labels = parse_labels(label)
    return run_async(serve_until_signal, settings, task, address, player_seconds, launch_time, labels)


def verdict(*, state: StateFolder = None) -> int:
    """Grade the episode that `serve-episode TASK` serves, and print its verdict.

    Later calls print the same verdict. Exit status 0 if the attempt passed, 4 if the attempt did not pass, 5
    if there is no verdict.
    """
    return run_async(print_verdict, state or default_state())
