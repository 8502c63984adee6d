"""An episode that a dead server ran, with the server that goes on with it."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.grading import require_whole_record
from decathlon_mcp.episodes.records import StoredEpisode
from decathlon_mcp.episodes.state import Phase
from decathlon_mcp.errors import SandboxLostError
from decathlon_mcp.events import Recovered, RecoveryResult
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.episodes")


class Reattachment(EpisodeHooks):
    """The first link of the beginning of one episode, which `Episode.restore` has got too.

    `stored`: what the store has of it.
    """

    def __init__(self, episode: Episode, stored: StoredEpisode) -> None:
        self._episode = episode
        self._stored = stored
        self._is_counted = False

    @asynccontextmanager
    async def recovering(self) -> AsyncGenerator[None]:
        """Read the calls of the dead server, and count what becomes of the episode in the body.

        Raises SandboxLostError if the episode cannot be continued.
        """
        try:
            await self._restore()
            self._note_phase(self._episode.state.phase)
            self._episode.state.on_move = self._note_phase
            yield
        finally:
            self._episode.state.on_move = None
            self._count("ended")

    async def begin(self, start: Start, following: Following) -> AgentSandbox:
        """Continue the agent's sandbox; an attempt that is open is READY afterwards. Raises SandboxLostError.

        An episode that was not ready starts over.
        """
        episode, factory = start.episode, start.episode.sandbox_factory
        if not episode.was_ready:
            self._count("started_over")
            return await following()
        row = episode.sandbox_records.former.get(episode.records.progress.agent or "")
        if row is None or self._stored.tools is None:
            raise SandboxLostError("the agent's sandbox had been removed when its server died")
        async with start.admission.opening:
            sandbox, driver = await start.stack.enter_async_context(
                factory.reattach(
                    row,
                    episode.sandbox_records,
                    forwards=start.resources.services.targets,
                    web=start.resources.web if factory.uses_web(episode.spec.task, "agent") else None,
                    unanswered={
                        call.request for call in episode.calls.unanswered if call.request is not None
                    },
                )
            )
        # Now that the sandbox will be removed in any case, and before a call is sent to it.
        require_whole_record(episode)
        if episode.claim is not None:
            return AgentSandbox(sandbox, driver, None)
        if driver is None:
            raise SandboxLostError("the agent's sandbox does not run any more")
        session = await start.offer.tool_session(sandbox, driver)
        episode.become_ready(session)
        self._count("continued")
        log.info("episode taken back", extra=fields(episode=episode.public_id))
        return AgentSandbox(sandbox, driver, session)

    async def _restore(self) -> None:
        episode, stored = self._episode, self._stored
        obstacle = stored.obstacle
        try:
            await episode.calls.restore(starts_over=not episode.was_ready)
        except OSError as error:
            obstacle = obstacle or f"its trajectory cannot be read: {error.strerror}"
        if obstacle is not None and episode.verdict is None and not stored.is_closed:
            raise SandboxLostError(f"the episode cannot be continued: {obstacle}")
        if episode.claim is not None:
            episode.calls.end()

    def _note_phase(self, phase: Phase) -> None:
        if phase is Phase.SCORED:
            self._count("graded")

    def _count(self, result: RecoveryResult) -> None:
        """Count what has become of the episode, once."""
        if not self._is_counted:
            self._is_counted = True
            self._episode.emit(Recovered(result))
