"""Plays an episode with a program: it gets an address that only plays, and its output becomes notes."""

from __future__ import annotations

import codecs
import logging
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace

import anyio
from anyio.abc import ByteReceiveStream
from decathlon_client import ClientError, Episode

from decathlon_mcp.background import background_tasks
from decathlon_mcp.cli.output import without_controls
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.plugins.agents.configuration import configure
from decathlon_mcp.plugins.agents.launch import Launcher
from decathlon_mcp.plugins.agents.programs import Program
from decathlon_mcp.plugins.agents.reach import Reached, relay_connections
from decathlon_mcp.plugins.agents.serving import EmbeddedServer, PlayingApp, playing
from decathlon_mcp.telemetry.logs import fields

NOTE_SECONDS = 1.0
"""Time between two notes: a line each would be thousands."""
MAX_NOTES_BYTES = 8 << 20
"""How much of a program's output becomes notes. A log of an episode has 256 MiB for all of it."""
NOTE_LIMIT_SECONDS = 3.0
"""How long a note may take: grading waits for the last one."""
_LAST_CHARACTERS = 500

log = logging.getLogger("decathlon.agents")


STATUS_LABEL, RUNNING, KILLED = "program_status", "running", "killed"
"""Label of an episode: the exit status of its program, as a shell has it, or one of these. It stays `RUNNING`
if the attempt was over before the program."""


class ProgramFailedError(Exception):
    """A program was not started, or could not reach its model before it made a call: there is no attempt."""


@dataclass(slots=True, kw_only=True)
class AgentPlayer:
    """Plays an attempt of a batch, see `Decathlon.batch`; returns the exit status, None if it was killed.

    `variables`: see `choose_variables`. `seconds`: what an attempt may take. `shows_output`: whether the
    program's output is also written to stderr, without control characters.
    """

    server: EmbeddedServer
    program: Program
    launcher: Launcher
    variables: Mapping[str, str]
    seconds: float
    shows_output: bool
    last_output: str = ""
    """The end of what the program wrote in the latest attempt that ended."""

    async def __call__(self, episode: Episode) -> int | None:
        """Run the program until it ends, or its time is over. Raises ProgramFailedError, DecathlonError."""
        output, reached = _Output(episode), Reached()
        status = None
        with anyio.move_on_after(self.seconds) as limit:
            status = await self._run(episode, output, reached)
        self.last_output = output.last or "(nothing)"
        if status is None and not limit.cancelled_caught:
            raise ProgramFailedError(f"{self.program.name} was not started: {self.last_output}")
        served = self.server.registry.find(episode.id, Principal())
        if reached.why_not and not served.calls.sent and served.claim is None:
            raise ProgramFailedError(
                f"{self.program.name} made no call, and its model could not be reached ({reached.why_not}); "
                f"its output ends with: {self.last_output}"
            )
        # An attempt that was claimed, or met a limit, is graded since; its verdict has the labels of then.
        if served.claim is None and served.state.phase is not Phase.ENDED:
            labels = {**served.spec.labels, STATUS_LABEL: KILLED if status is None else str(status)}
            served.spec = replace(served.spec, labels=labels)
            served.records.write(labels=labels)
            if status is None:
                await episode.truncate()
        return status

    async def _run(self, episode: Episode, output: _Output, reached: Reached) -> int | None:
        """Run the program; its exit status, None if it was never started. `reached`: is kept up to date."""
        assert episode.agent_address is not None
        async with AsyncExitStack() as stack:
            location = stack.enter_context(self.launcher.location())
            configuration = configure(
                self.program.command,
                location.folders,
                address=location.address,
                prompt=episode.prompt,
                tool_seconds=self.seconds,
                variables=self.variables,
            )
            running = await stack.enter_async_context(self.launcher.start(location, configuration))
            listener, *relayed = (*([location.listener] if location.listener else ()), *running.listeners)
            app = PlayingApp(self.server.app, episode.agent_address, location.path)
            await stack.enter_async_context(playing(app, listener, self.server.limits))
            tasks = await stack.enter_async_context(background_tasks())
            for socket, endpoint in zip(relayed, self.launcher.endpoints, strict=True):
                tasks.start_soon(relay_connections, socket, endpoint, reached)
            async with _noting(output):
                async for text in _texts(running.output):
                    output.add(text)
                    if self.shows_output:
                        sys.stderr.write(without_controls(text))
                        sys.stderr.flush()
                return await running.wait()


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
async def _noting(output: _Output) -> AsyncGenerator[None]:
    """Send the output while the body runs; at its end, what waits is sent too."""
    async with background_tasks() as tasks:
        tasks.start_soon(output.run)
        try:
            yield
        finally:
            await output.send()


async def _texts(stream: ByteReceiveStream) -> AsyncGenerator[str]:
    """The texts of a stream in UTF-8; a character that is cut waits for its rest."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    async for chunk in stream:
        if text := decoder.decode(chunk):
            yield text
