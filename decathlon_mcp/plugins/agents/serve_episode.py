"""`serve-episode`: serve one episode to an agent that others start; `episode verdict` grades it.

The verdict can be had at a socket in the state folder, by everyone who can read that folder. The address at
which the episode is played leads elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncGenerator, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from anyio.abc import SocketStream
from decathlon_client import ClientError, Episode, NoVerdictError
from decathlon_client.process import shutdown_on_signal

from decathlon_mcp.background import background_tasks
from decathlon_mcp.cli.output import print_json, shell_path, this_command
from decathlon_mcp.cli.serve import ListenAddress
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.http.listening import hosts_for, listen
from decathlon_mcp.plugins.agents.serving import PATH, PlayingApp, embedded_server, playing, with_longer_lives
from decathlon_mcp.plugins.play.play import connect, redirect_logs
from decathlon_mcp.plugins.shell import NO_VERDICT, NOT_PASSED
from decathlon_mcp.sandboxes.kernel_limits import raise_descriptor_limit
from decathlon_mcp.settings import Settings, default_state
from decathlon_mcp.types import JsonObject

REQUEST = b"verdict\n"
"""Without it nothing is graded: another server connects only to learn whether this one lives."""
SOCKET = "episode.sock"
"""Name of the socket in the state folder. It is there while its episode can be played."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeOptions:
    """Of the episode that is served. `seconds`: what its attempt may take."""

    seconds: float
    launch_time: str | None
    labels: Mapping[str, str]


async def serve_episode(
    settings: Settings, task: str, address: ListenAddress, options: EpisodeOptions
) -> int:
    """Serve one episode at an address that only plays, until a signal; returns the exit status.

    Prints the address and the prompt as JSON once it can be played. Raises DecathlonError.
    """
    raise_descriptor_limit()
    server = with_longer_lives(settings, options.seconds)
    async with shutdown_on_signal() as watcher:
        try:
            with redirect_logs(server), listen(address.host, address.port) as listener:
                bound = replace(address, port=listener.getsockname()[1])
                async with (
                    connect(server, None) as d,
                    embedded_server(
                        d, server, hosts_for(address.host, address.allowed_host, None)
                    ) as embedded,
                    d.episode(task, launch_time=options.launch_time, labels=options.labels) as episode,
                    giving_verdict(episode, server.state),
                ):
                    assert episode.agent_address is not None
                    app = PlayingApp(embedded.app, episode.agent_address)
                    async with playing(app, listener, embedded.limits):
                        url = f"{bound.url(bound.port)}{PATH}"
                        print_json({"task": task, "address": url, "prompt": episode.prompt}, indent=None)
                        sys.stdout.flush()
                        state = (
                            "" if server.state == default_state() else f" --state {shell_path(server.state)}"
                        )
                        report(f"{task} can be played at {url}; `{this_command()} verdict{state}` grades it")
                        await _truncate_late(episode, options.seconds)
        except ClientError as error:
            raise DecathlonError(error.message) from error
    return watcher.status or 1


async def _truncate_late(episode: Episode, seconds: float) -> None:
    """Close the attempt after that time; never returns."""
    await anyio.sleep(seconds)
    await episode.truncate()
    await anyio.sleep_forever()


async def print_verdict(state: Path) -> int:
    """Grade the episode that `serve_episode` serves with this state folder; returns the exit status.

    0 if the attempt has succeeded, NOT_PASSED if not, NO_VERDICT without a verdict. Raises DecathlonError if
    there is no such episode.
    """
    verdict, problem = await ask_for_verdict(state)
    if verdict is not None:
        print_json(verdict)
    if problem:
        report(problem)
        return NO_VERDICT
    return 0 if (verdict or {}).get("success") is True else NOT_PASSED


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


async def ask_for_verdict(state: Path) -> tuple[JsonObject | None, str]:
    """The verdict on the episode that is served with this state folder, and why it has no reward.

    Waits while the attempt is graded. Raises DecathlonError if none is served, or if its server ends.
    """
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
    return reply["verdict"], reply["problem"]


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
