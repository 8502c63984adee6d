"""`serve-episode`: serve one episode to an agent that others start; `episode verdict` grades it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import anyio
from decathlon_client import ClientError, Episode
from decathlon_client.shutdown import shutdown_on_signal

from decathlon_mcp.cli.output import print_json, shell_path, this_command
from decathlon_mcp.cli.serve import ListenAddress
from decathlon_mcp.cli.usage import report
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.http.listening import hosts_for, listen
from decathlon_mcp.plugins.agents.embedding import embedded_server, with_longer_lives
from decathlon_mcp.plugins.agents.playing import PATH, PlayingApp, playing
from decathlon_mcp.plugins.agents.verdict_socket import ask_for_verdict, giving_verdict
from decathlon_mcp.plugins.play.play import connect, redirect_logs
from decathlon_mcp.plugins.shell import NO_VERDICT, NOT_PASSED
from decathlon_mcp.sandboxes.kernel_limits import raise_descriptor_limit
from decathlon_mcp.settings import Settings, default_state


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
