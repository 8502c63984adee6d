"""Keeps what a later grading needs of an episode in its folder (`--keep workspace`).

The files are written before the grading starts, so that a server that dies in it loses nothing. A file that
cannot be kept, on a full disk for example, never costs the episode its verdict.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import anyio.to_thread

from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.errors import DecathlonError
from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.job import CapturedWorkspace
from decathlon_mcp.grading.kept import ATTEMPT_FILE, KEPT_SEALED, KEPT_WORKSPACE, ORIGINAL_FILE, KeptAttempt
from decathlon_mcp.storage.kept_files import KeptFiles
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.rewards")


async def keep_sealed(episode: Episode, sealed: Path, original: Mapping[str, str]) -> None:
    """Keep the archive of the task's folder after preprocess; before the episode is READY.

    `original`: see `grading.kept.ORIGINAL_FILE`. Raises nothing but cancellation.
    """
    files, limit_bytes = _files(episode), episode.spec.limits.workspace_bytes

    def keep() -> None:
        files.write(ORIGINAL_FILE, {"files": dict(original)})
        files.keep_archive(sealed, KEPT_SEALED, limit_bytes)

    try:
        await anyio.to_thread.run_sync(keep)
    except (DecathlonError, OSError) as error:
        await _give_up(episode, files, error)


async def keep_attempt(
    episode: Episode, attempt: Attempt, captured: CapturedWorkspace, *, in_place: bool = False
) -> None:
    """Keep a claimed attempt with its workspace, before its grading. Raises nothing but cancellation."""
    files, limit_bytes = _files(episode), episode.spec.limits.workspace_bytes
    task, language = episode.spec.task, episode.sandbox_factory.suite.language
    sealed = captured.sealed is not None and not in_place
    if sealed and not files.has(KEPT_SEALED):
        return  # its loss has been logged
    kept = KeptAttempt(attempt=attempt, task_id=task.id, language=language, in_place=in_place, sealed=sealed)

    def keep() -> None:
        if captured.workspace is not None:
            files.keep_archive(captured.workspace, KEPT_WORKSPACE, limit_bytes)
        # Last: an attempt that has this file has the others.
        files.write(ATTEMPT_FILE, kept.to_json())

    try:
        await anyio.to_thread.run_sync(keep)
    except (DecathlonError, OSError) as error:
        await _give_up(episode, files, error)


def _files(episode: Episode) -> KeptFiles:
    return KeptFiles(episode.journal.folder, episode.journal.disk)


async def _give_up(episode: Episode, files: KeptFiles, error: DecathlonError | OSError) -> None:
    why = error.message if isinstance(error, DecathlonError) else error.strerror
    log.warning(
        "the attempt could not be kept for a later grading", extra=fields(episode=episode.spec.label, why=why)
    )
    try:
        await anyio.to_thread.run_sync(files.remove, ATTEMPT_FILE, KEPT_WORKSPACE, KEPT_SEALED, ORIGINAL_FILE)
    except OSError:
        log.exception("kept files could not be removed", extra=fields(episode=episode.spec.label))
