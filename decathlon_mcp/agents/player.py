"""Plays an episode with a program: it gets an address that only plays, and its output becomes notes."""

from __future__ import annotations

import codecs
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import anyio
from anyio.abc import ByteReceiveStream
from decathlon_client import ClientError, Decathlon, Episode
from starlette.types import ASGIApp

from decathlon_mcp.agents.configuration import configure
from decathlon_mcp.agents.launch import Launcher
from decathlon_mcp.agents.programs import Program
from decathlon_mcp.agents.reach import relay_connections
from decathlon_mcp.background import background_tasks
from decathlon_mcp.http.playing import PlayingApp, playing
from decathlon_mcp.http.protocol import ConnectionLimits
from decathlon_mcp.telemetry.logs import fields

NOTE_SECONDS = 1.0
"""Time between two notes: a line each would be thousands."""
MAX_NOTES_BYTES = 8 << 20
"""How much of a program's output becomes notes. A log of an episode has 256 MiB for all of it."""
NOTE_LIMIT_SECONDS = 3.0
"""How long a note may take: grading waits for the last one."""
_LAST_CHARACTERS = 500

log = logging.getLogger("decathlon.agents")


class ProgramFailedError(Exception):
    """A program failed before it made a call, so that there is no attempt to be graded."""


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """A player of a batch, see `Decathlon.batch`. It returns the program's exit status.

    `d` and `app`: the server, as a client and as an ASGI application. `seconds`: what an attempt may take.
    `shows_output`: whether the program's output is also written to stderr.
    """

    d: Decathlon
    app: ASGIApp
    limits: ConnectionLimits
    program: Program
    launcher: Launcher
    seconds: float
    shows_output: bool

    async def __call__(self, episode: Episode) -> int:
        """Run the program until it ends. Raises ProgramFailedError, DecathlonError."""
        assert episode.agent_address is not None
        async with AsyncExitStack() as stack:
            place = stack.enter_context(self.launcher.place())
            configuration = configure(
                self.program.command,
                place.folders,
                address=place.address,
                prompt=episode.prompt,
                tool_seconds=self.seconds,
            )
            running = await stack.enter_async_context(self.launcher.start(place, configuration))
            listener, *relayed = (*([place.listener] if place.listener else ()), *running.listeners)
            app = PlayingApp(self.app, episode.agent_address, place.path)
            await stack.enter_async_context(playing(app, listener, self.limits))
            tasks = await stack.enter_async_context(background_tasks())
            for socket, endpoint in zip(relayed, self.launcher.endpoints, strict=True):
                tasks.start_soon(relay_connections, socket, endpoint)
            async with _noting(episode) as output:
                async for text in _texts(running.output):
                    output.add(text)
                    if self.shows_output:
                        sys.stderr.write(text)
                        sys.stderr.flush()
                status = await running.wait()
            if status and not await self._has_played(episode):
                raise ProgramFailedError(
                    f"{self.program.name} ended with exit status {status} before it made a call; its output "
                    f"ends with: {output.last or '(nothing)'}"
                )
            return status

    async def _has_played(self, episode: Episode) -> bool:
        state = (await self.d.ask("episode_status", {"episode": episode.id})).structured or {}
        return bool(state.get("calls")) or state.get("phase") != "ready"


class _Output:
    """What a program writes, as notes of its episode."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode
        self._waiting = ""
        self._remaining_bytes = MAX_NOTES_BYTES
        self._sending = anyio.Lock()
        self.last = ""
        """The end of what was written."""

    def add(self, text: str) -> None:
        """Add to the next note. What is too much is dropped; the last note says so."""
        self.last = (self.last + text)[-_LAST_CHARACTERS:]
        if self._remaining_bytes <= 0:
            return
        self._remaining_bytes -= len(text.encode())
        self._waiting += text
        if self._remaining_bytes <= 0:
            self._waiting += f"\n[further output is not kept: a program has {MAX_NOTES_BYTES >> 20} MiB]\n"

    async def run(self) -> None:
        """Send notes until cancelled."""
        while True:
            await anyio.sleep(NOTE_SECONDS)
            await self.send()

    async def send(self) -> None:
        """Send what has come since the last note, also if this is cancelled meanwhile."""
        with anyio.move_on_after(NOTE_LIMIT_SECONDS, shield=True):
            async with self._sending:
                text, self._waiting = self._waiting, ""
                if not text.strip():
                    return
                try:
                    await self._episode.note(text)
                except ClientError as error:
                    self._remaining_bytes = 0
                    why = fields(episode=self._episode.public_id, why=error.message)
                    log.warning("the output of a program is not kept", extra=why)


@asynccontextmanager
async def _noting(episode: Episode) -> AsyncGenerator[_Output]:
    """An output that is sent while the body runs; at its end, what waits is sent too."""
    output = _Output(episode)
    async with background_tasks() as tasks:
        tasks.start_soon(output.run)
        try:
            yield output
        finally:
            await output.send()


async def _texts(stream: ByteReceiveStream) -> AsyncGenerator[str]:
    """The texts of a stream in UTF-8; a character that is cut waits for its rest."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for chunk in stream:
        if text := decoder.decode(chunk):
            yield text
