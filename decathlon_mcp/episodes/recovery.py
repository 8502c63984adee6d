"""Recovery: takes over the episodes of dead servers, and removes everything else that they left.

There is one way for a server to leave episodes to the next one: it ends without cleaning up, killed or on
purpose (`--hand-over`). What it had written into the store before is all that the next one needs.
"""

from __future__ import annotations

import itertools
import logging
import shutil
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio
import anyio.to_thread
from decathlon_sandbox import wire

from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.grading import require_whole_record
from decathlon_mcp.episodes.records import StoredEpisode, read_episode
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import DecathlonError, SandboxLostError
from decathlon_mcp.events import Recovered, RecoveryResult, Swept
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import Provider, kernel_of
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.storage.kept_files import VERDICT_FILE
from decathlon_mcp.storage.lock import InstanceLock
from decathlon_mcp.storage.store import EpisodeRow, SandboxRow, Store
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import public_id

ENGINE_SECONDS = 30.0
ENGINE_RETRY_SECONDS = 1.0
"""How long, and how often, an engine is asked again that is gone in the middle of a recovery."""
RECONCILE_SECONDS = 60.0
"""Time between two sweeps of a running server over its own sandboxes."""

log = logging.getLogger("decathlon.episodes")


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovers the episodes of dead servers into a running registry.

    `scratch`: folder for the archives of running episodes, `SCRATCH/LABEL`. The folder of a dead server is
    `PARENT/SERVER-*`, where PARENT is the parent of `scratch`.
    """

    registry: EpisodeRegistry
    lock: InstanceLock
    providers: Collection[Provider]
    scratch: Path
    _owners: set[str] = field(default_factory=set[str], init=False)
    """Dead servers that may have sandboxes: of episodes that were continued, or not yet swept."""

    async def run(self) -> None:
        """Continue every episode that can be continued, and remove what else the dead servers left.

        Episodes that cannot be continued are logged before any sandbox is taken back: their rows say so.
        Returns when clients can find every other episode; their sandboxes are taken back in the background.
        Raises ProviderUnavailableError, and SettingsError if the store cannot be used, before anything is
        done: an episode that had been continued would end with this server.
        """
        store = self.registry.store
        # Rows of an earlier `serve`, except episodes that wait for another provider.
        others = self.lock.others()
        unfinished = [] if store is None else store.unfinished_episodes()
        rows = [row for row in unfinished if row.server not in others]
        if not (rows or self.lock.dead):
            return
        for provider in self.providers:
            await provider.sweep(self.lock.name)  # has nothing yet: this asks whether the engine answers
        self.registry.recovering = True
        try:
            stored = [] if store is None else self._adopt(store, rows)
            await anyio.to_thread.run_sync(self._move_scratch, stored)
            # Episodes in play come first: removing the sandboxes and files of the others can take seconds.
            for episode in stored:
                if episode.phase is Phase.READY:
                    self._recover(episode)
            await anyio.to_thread.run_sync(self._remove_scratch)
            sandboxes = [row for episode in stored for row in episode.sandboxes]
            continued = (episode for episode in stored if episode.obstacle is None)
            keep = {row.name for episode in continued for row in episode.needed_sandboxes}
            self._owners.update(self.lock.dead, (row.owner for row in sandboxes))
            if await self._sweep(keep):
                self._forget_owners({row.owner for row in sandboxes if row.name in keep})
                # The names of pooled sandboxes do not come again, so that no later row would replace these.
                for row in sandboxes:
                    if store is not None and row.name not in keep:
                        store.delete(SandboxRow, row.name)
            for episode in stored:
                if episode.phase is not Phase.READY:
                    self._recover(episode)
        finally:
            self.registry.recovering = False

    async def reconcile(self) -> None:
        """Remove sandboxes that no episode has, from time to time, until cancelled."""
        while True:
            await anyio.sleep(RECONCILE_SECONDS)
            try:
                await self._sweep_without_episode()
            except (DecathlonError, OSError) as error:
                # A damaged store, which the episodes do not need at once.
                log.warning("sandboxes could not be swept", extra=fields(why=str(error)))

    async def finish(self) -> None:
        """Remove what dead servers left, at the end of this server, once its episodes have ended.

        An episode that ends before its sandbox was taken back leaves it running, without a row. The next
        server removes what this server cannot remove in time.
        """
        if self._owners:
            with anyio.move_on_after(ENGINE_SECONDS, shield=True):
                await self._sweep_without_episode()

    async def _sweep_without_episode(self) -> None:
        """Remove the sandboxes of this server and of dead servers that no episode has."""
        store = self.registry.store
        rows = [] if store is None else store.find(SandboxRow)
        owners, keep = (self.lock.name, *self._owners), {row.name for row in rows}
        if await self._sweep_once(owners, keep, "removed sandboxes that no episode had"):
            self._forget_owners({row.owner for row in rows})

    def _forget_owners(self, in_use: Collection[str]) -> None:
        """Remove the lock files of the swept dead servers, except lock files `in_use` when the sweep began.

        An episode that has ended since then may have left its sandbox, which the sweep still spared.
        """
        for owner in self._owners.difference(in_use).intersection(self.lock.dead):
            self.lock.forget(owner)
        self._owners.intersection_update(in_use)

    def _adopt(self, store: Store, rows: Sequence[EpisodeRow]) -> list[StoredEpisode]:
        """Make the episodes of these rows this server's own; end episodes whose rows cannot be read."""
        stored: list[StoredEpisode] = []
        unreadable: list[EpisodeRow] = []
        for row in rows:
            try:
                episode = self._read(store, row)
                obstacle = episode.obstacle
            except (DecathlonError, ValueError) as error:
                unreadable.append(row)
                obstacle = str(error)
            else:
                stored.append(episode)
            if obstacle is not None:
                log.error(
                    "an episode cannot be continued",
                    extra=fields(episode=public_id(row.id), task=row.task, phase=row.phase, why=obstacle),
                )
        store.adopt(self.lock.others())
        for row in unreadable:
            # Its owner is unknown too, so that there is nobody to notify.
            self.registry.events.emit(Recovered("ended"))
            store.end_episode(row.id, Ending.NOT_CONTINUED)
        for episode in stored:
            if episode.verdict is not None:
                store.update_episode(episode.spec.id, verdict=episode.verdict.to_json())
        return stored

    def _read(self, store: Store, row: EpisodeRow) -> StoredEpisode:
        """Raises ValueError for rows that are not valid."""
        episode = read_episode(row, tuple(store.find(SandboxRow, episode=row.id)), self.registry.catalogue)
        if episode.verdict is None:
            # Its server could not write the store any more. Clients may have this verdict, and there must not
            # be a second verdict.
            episode = replace(episode, verdict=_written_verdict(self.registry.folder(row.id)))
        obstacle = episode.obstacle or _obstacle(self.registry.factory(episode.suite).provider, episode)
        return replace(episode, obstacle=obstacle)

    def _recover(self, stored: StoredEpisode) -> None:
        """Continue an episode in the background, or end it there."""
        registry, spec, is_admitted = self.registry, stored.spec, stored.phase is not Phase.QUEUED
        about = {"episode": spec.public_id, "task": spec.task_name}
        ticket = registry.admission.restore(
            spec.task_name,
            registry.factory(stored.suite).suite.shared_resources(spec.task.id),
            spec.owner.share_key,
            stored.progress.slots if is_admitted else None,
        )
        if stored.verdict is not None:
            registry.admission.release(ticket)
        episode = registry.make(spec, stored.suite, ticket)
        try:
            episode.trajectory.reopen()
            episode.files.reserve_again()
        except OSError as error:
            obstacle = f"its trajectory cannot be continued: {error.strerror}"
            stored = replace(stored, obstacle=obstacle)
            log.exception("an episode cannot be continued", extra=fields(**about, why=obstacle))
        episode.restore(stored)
        reattachment = Reattachment(episode, stored)
        registry.run(episode, [reattachment], reattachment.recovering())
        if stored.obstacle is None:
            log.info("continuing an episode of a server that died", extra=fields(**about, phase=stored.phase))

    def _move_scratch(self, stored: Sequence[StoredEpisode]) -> None:
        """Move the archives of the episodes into this server's folder."""
        for folder in self._dead_scratch():
            for episode in stored:
                archives = folder / episode.spec.public_id
                if archives.is_dir():
                    archives.rename(self.scratch / episode.spec.public_id)

    def _remove_scratch(self) -> None:
        """Delete what else the dead servers had: gigabytes, if they saved tasks that were set up."""
        for folder in self._dead_scratch():
            shutil.rmtree(folder, ignore_errors=True)

    def _dead_scratch(self) -> list[Path]:
        return [folder for owner in self.lock.dead for folder in self.scratch.parent.glob(f"{owner}-*")]

    async def _sweep(self, keep: Collection[str]) -> bool:
        """Remove the sandboxes of dead servers; waits some time for an engine that is gone for a moment.

        Returns whether they are gone.
        """
        deadline = anyio.current_time() + ENGINE_SECONDS
        while not await self._sweep_once(self._owners, keep, "removed sandboxes of a server that died"):
            if anyio.current_time() > deadline:
                return False  # `reconcile` goes on with it
            await anyio.sleep(ENGINE_RETRY_SECONDS)
        return True

    async def _sweep_once(self, owners: Collection[str], keep: Collection[str], message: str) -> bool:
        """Remove sandboxes, and log `message` with their number; whether none is left."""
        count, complete = 0, True
        for provider, owner in itertools.product(self.providers, owners):
            try:
                count += await provider.sweep(owner, keep=keep)
            except Exception as error:  # noqa: BLE001  (its failure ends neither the server nor other sweeps)
                complete = False
                log.warning(
                    "sandboxes could not be swept",
                    extra=fields(provider=provider.name, server=owner, why=str(error)),
                )
        self.registry.events.emit(Swept(count))
        if count:
            log.warning(message, extra=fields(sandboxes=count))
        return complete


def _written_verdict(folder: Path) -> Verdict | None:
    """The verdict in an episode's folder."""
    try:
        with open_regular(folder / VERDICT_FILE) as file:
            return Verdict.model_validate_json(file.read())
    except (OSError, ValueError):
        return None


def _obstacle(provider: Provider, episode: StoredEpisode) -> str | None:
    """Why a sandbox that a dead server's episode needs cannot be taken back here; None if it can be."""
    here = (provider.name, provider.isolation, kernel_of(provider))
    for row in episode.needed_sandboxes:
        opened = (row.provider, row.isolation, row.spec.get("kernel"))
        if opened != here:
            return f"its sandbox has {_described(*opened)}, and this server has {_described(*here)}"
        # The workspace of a closed attempt is copied without the driver.
        is_copied = episode.phase is Phase.CLAIMED and row.role == "agent" and not episode.spec.task.in_place
        if row.wire_version != wire.VERSION and not is_copied:
            return (
                f"its sandbox's driver has wire version {row.wire_version}, and this server has "
                f"{wire.VERSION}"
            )
    return None


def _described(provider: str, isolation: str, kernel: object) -> str:
    return f"provider {provider} and isolation {isolation}" + (f" and kernel {kernel}" if kernel else "")


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
                    attached=start.resources.attached,
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
