"""Keeps closed attempts in the folders of their episodes (`--keep workspace`), to be graded again.

`attempt.json` has everything but the files and the calls; the calls are in `trajectory.jsonl`. The files are
written before the grading starts, so that a server that dies in it loses nothing. A file that cannot be kept,
on a full disk for example, never costs the episode its verdict.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self

import anyio.to_thread
import msgspec
from pydantic import ValidationError

from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import RegistryOptions
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.grading.attempt import Attempt, Facts
from decathlon_mcp.grading.inputs import CapturedWorkspace
from decathlon_mcp.plugins.history.workspaces import KEPT_WORKSPACE
from decathlon_mcp.plugins.regrade import KeepSettings
from decathlon_mcp.plugins.regrade.attempt_files import AttemptFiles, content_ids
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, Language, as_object, read_object

log = logging.getLogger("decathlon.rewards")

ATTEMPT_FILE: Final = "attempt.json"
KEPT_SEALED: Final = "sealed.tar.gz"
"""The task's folder as preprocess left it, with names relative to that folder."""
ORIGINAL_FILE: Final = "sealed.json"
"""What was in the task's folder before preprocess: `overlay.content_ids` as member `files`."""
VERSION = 1
_ATTEMPT_FIELDS = {member.name for member in dataclasses.fields(Attempt)}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptAttempt:
    """One closed attempt, as it is in `attempt.json`.

    `attempt` has no calls when it was read from a file. `task_id` is the task's id within its suite,
    `language` that of the task. `in_place`: it was graded in the agent's sandbox, of which nothing is kept.
    `sealed`: preprocess has changed the task's folder, so that `KEPT_SEALED` exists.
    """

    attempt: Attempt
    task_id: str
    language: Language
    in_place: bool
    sealed: bool

    def to_json(self) -> JsonObject:
        attempt = msgspec.to_builtins(replace(self.attempt, calls=()), enc_hook=Facts.noted)
        del attempt["calls"]
        # The facts are members of the attempt there, as they are of its verdict.
        return {
            "version": VERSION,
            "attempt": {**attempt.pop("facts"), **attempt},
            "task_id": self.task_id,
            "language": self.language,
            "in_place": self.in_place,
            "sealed": self.sealed,
        }

    @classmethod
    def parse(cls, values: JsonObject) -> Self:
        """Read the content of `attempt.json`. Raises BadRequestError."""
        # Not a pydantic model: those refuse texts with lone surrogates, which an agent can send.
        if values.get("version") != VERSION:
            raise BadRequestError(
                f"{ATTEMPT_FILE} has version {values.get('version')!r}; this release reads version {VERSION}"
            )
        attempt = dict(as_object(values.get("attempt")) or {})
        facts = {name: attempt.pop(name) for name in attempt.keys() - _ATTEMPT_FIELDS}
        try:
            return msgspec.convert(
                {**values, "attempt": {**attempt, "facts": facts}},
                cls,
                dec_hook=_read_facts,
            )
        except msgspec.ValidationError as error:
            raise BadRequestError(f"{ATTEMPT_FILE} is damaged: {error}") from None


def _read_facts(kind: type[Facts], values: Any) -> Facts:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        (first, *_) = error.errors()
        raise ValueError(f"{first['loc'][0]}: {first['msg']}") from None


# Attempts are read in several threads. msgspec 0.22 describes a dataclass at its first use, and two threads
# that do so at once end the process by SIGSEGV; a decoder describes it here.
msgspec.json.Decoder(KeptAttempt)


class KeptAttempts(EpisodeHooks):
    """Keeps the attempts of one server."""

    async def begin(self, start: Start, following: Following) -> AgentSandbox:
        """Keep the task's folder as preprocess left it, before the episode is READY."""
        if start.episode.was_ready or not start.episode.spec.task.has_preprocess:
            return await following()
        original = await anyio.to_thread.run_sync(_content_ids, start)
        agent = await following()
        if agent.sealed:
            await keep_sealed(start, original)
        return agent

    async def captured(
        self, episode: Episode, attempt: Attempt, captured: CapturedWorkspace, *, in_place: bool
    ) -> None:
        """Keep a claimed attempt with its workspace, before its grading."""
        files, limit_bytes = _files(episode), episode.spec.limits.workspace_bytes
        task, language = episode.spec.task, episode.sandbox_factory.suite.language
        sealed = captured.task_folder_archive is not None and not in_place
        if sealed and not files.has(KEPT_SEALED):
            return  # its loss has been logged
        kept = KeptAttempt(
            attempt=attempt, task_id=task.id, language=language, in_place=in_place, sealed=sealed
        )

        def keep() -> None:
            if captured.workspace is not None:
                files.keep_archive(captured.workspace, KEPT_WORKSPACE, limit_bytes)
            # Last: an attempt that has this file has the others.
            files.write(ATTEMPT_FILE, kept.to_json())

        await _try_to_keep(episode, files, keep)


def create(
    settings: Settings, options: RegistryOptions, factories: Mapping[str, SandboxFactory]
) -> KeptAttempts | None:
    """What keeps the attempts of a server with these settings; None without `--keep`."""
    return KeptAttempts() if settings.of(KeepSettings).keep == "workspace" else None


async def keep_sealed(start: Start, original: Mapping[str, str]) -> None:
    """Keep the archive of the task's folder after preprocess. `original`: see `ORIGINAL_FILE`.

    Raises nothing but cancellation.
    """
    files, limit_bytes = _files(start.episode), start.episode.spec.limits.workspace_bytes

    def keep() -> None:
        files.write(ORIGINAL_FILE, {"files": dict(original)})
        files.keep_archive(start.task_folder_archive, KEPT_SEALED, limit_bytes)

    await _try_to_keep(start.episode, files, keep)


def read_original(folder: Path) -> Mapping[str, str] | None:
    """What `keep_sealed` has kept as `original` in a folder, None if nothing. Raises OSError, ValueError."""
    try:
        content = (folder / ORIGINAL_FILE).read_bytes()
    except FileNotFoundError:
        return None
    if (files := as_object((read_object(content) or {}).get("files"))) is None:
        raise ValueError(f"{ORIGINAL_FILE} is not valid")
    return files


def _content_ids(start: Start) -> Mapping[str, str]:
    """The content ids of the task's folder in the checkout."""
    archive, task = start.scratch / "original.tar", start.episode.spec.task
    start.episode.sandbox_factory.suite.task_archive(task, archive, sealed=True)
    try:
        return content_ids(archive, task.folder)
    finally:
        archive.unlink()


def _files(episode: Episode) -> AttemptFiles:
    return AttemptFiles(episode.files.folder, episode.files.disk)


async def _try_to_keep(episode: Episode, files: AttemptFiles, keep: Callable[[], None]) -> None:
    try:
        await anyio.to_thread.run_sync(keep)
    except (DecathlonError, OSError) as error:
        await _give_up(episode, files, error)


async def _give_up(episode: Episode, files: AttemptFiles, error: DecathlonError | OSError) -> None:
    why = error.message if isinstance(error, DecathlonError) else error.strerror
    log.warning(
        "the attempt could not be kept for a later grading", extra=fields(episode=episode.public_id, why=why)
    )
    try:
        await anyio.to_thread.run_sync(files.remove, ATTEMPT_FILE, KEPT_WORKSPACE, KEPT_SEALED, ORIGINAL_FILE)
    except OSError:
        log.exception("kept files could not be removed", extra=fields(episode=episode.public_id))
