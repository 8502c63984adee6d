"""Closed attempts that are kept in the folders of their episodes, to be graded again (`--keep workspace`).

The files of an attempt are complete or absent.

A task's folder as preprocess left it contains both the suite's files of that day and what preprocess wrote.
A later grading takes the first from the checkout as it is then, and the second from the kept archive.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import logging
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from secrets import token_hex
from typing import Any, BinaryIO, Final, NamedTuple, Self, TypeAlias

import anyio.from_thread
import anyio.to_thread
import msgspec.structs
from pydantic import ValidationError

from decathlon_mcp.archives.reading import Body, Kind, Member, digest_of
from decathlon_mcp.archives.unpacking import checked_entries
from decathlon_mcp.archives.writing import Entry, archive_chunks, save
from decathlon_mcp.episodes.beginnings import AgentSandbox, EpisodeHooks, Following, Start
from decathlon_mcp.episodes.episode import Episode
from decathlon_mcp.episodes.registry import RegistryOptions
from decathlon_mcp.episodes.sandbox_factory import SandboxFactory
from decathlon_mcp.errors import AtCapacityError, BadRequestError, DecathlonError, LimitExceededError
from decathlon_mcp.grading.attempt import Attempt, Facts
from decathlon_mcp.grading.inputs import CapturedWorkspace
from decathlon_mcp.plugins.history.workspaces import KEPT_WORKSPACE
from decathlon_mcp.plugins.settings import KeepSettings
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.disk import create_private, open_regular
from decathlon_mcp.storage.kept_files import KeptFiles
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, Language, as_object, read_object

CHUNK_BYTES = 1 << 20
COMPRESSION_LEVEL = 1
"""gzip's fastest: the grading waits for it, and it takes most of what there is to gain from text."""
MAX_VERDICTS = 10_000
"""Verdicts of one episode. A limit on the search for a free name."""


_File: TypeAlias = BinaryIO | gzip.GzipFile


class AttemptFiles(KeptFiles):
    """The kept files of one attempt. All methods block: run them in a worker thread."""

    def has(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def keep_archive(self, source: Path, name: str, limit_bytes: int) -> None:
        """Write or replace a file: `source`, compressed with gzip, at most `limit_bytes` long.

        Raises LimitExceededError past the limit, AtCapacityError if the disk is nearly full, and OSError.
        """
        if self.disk is not None:
            self.disk.refuse_if_low()
        with (
            source.open("rb") as plain,
            self._new_file(name) as out,
            # No name and no time, so that the same archive gives the same bytes.
            gzip.GzipFile("", "wb", COMPRESSION_LEVEL, out, mtime=0) as packed,
        ):
            self._copy(name, plain, packed, out, limit_bytes)

    def restore_archive(self, name: str, into: Path, limit_bytes: int) -> None:
        """Decompress a kept file to the new file `into`, of at most `limit_bytes`.

        Raises LimitExceededError past the limit, AtCapacityError if the disk is nearly full, BadRequestError
        if the file is broken, and OSError.
        """
        try:
            with (
                open_regular(self.folder / name) as kept,
                gzip.GzipFile(fileobj=kept) as packed,
                into.open("xb") as out,
            ):
                self._copy(name, packed, out, packed, limit_bytes)
                is_empty = not out.tell()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadRequestError(f"the kept file {name} is broken: {error}") from None
        if is_empty:
            raise BadRequestError(f"the kept file {name} is broken: it is empty")

    def _copy(self, name: str, source: _File, into: _File, counted: _File, limit_bytes: int) -> None:
        """Copy until `counted` is longer than the limit, or than the disk allows."""
        allowed_bytes = limit_bytes if self.disk is None else self.disk.limit_archive(limit_bytes)
        while True:
            chunk = source.read(CHUNK_BYTES)
            if counted.tell() > allowed_bytes:
                if allowed_bytes < limit_bytes:
                    raise AtCapacityError(f"the server's disk is nearly full: there is no room for {name}")
                message = f"{name} is over the limit of {limit_bytes} bytes"
                raise LimitExceededError(message, limitBytes=limit_bytes)
            if not chunk:
                return
            into.write(chunk)
            anyio.from_thread.check_cancelled()

    def write(self, name: str, value: JsonObject) -> None:
        """Write or replace a JSON file. Raises AtCapacityError if the disk is nearly full, and OSError."""
        if self.disk is not None:
            self.disk.refuse_if_low()
        with self._new_file(name) as out:
            # ASCII: an answer may contain lone surrogates, which UTF-8 cannot encode.
            out.write(json.dumps(value).encode("ascii"))

    def read(self, name: str) -> JsonObject:
        """Read a JSON file. Raises BadRequestError if it is missing or no JSON object."""
        try:
            with open_regular(self.folder / name) as file:
                value = read_object(file.read())
        except OSError as error:
            raise BadRequestError(f"{name} cannot be read: {error.strerror}") from None
        if value is None:
            raise BadRequestError(f"{name} is not a JSON object")
        return value

    def remove(self, *names: str) -> None:
        """Delete files; missing files are ignored. Raises OSError."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def add_verdict(self, verdict: JsonObject) -> str:
        """Write a verdict to the next free of `verdict-2.json`, `verdict-3.json`, ... and return that name.

        Raises OSError.
        """
        draft = self.folder / f".verdict-draft.{token_hex(6)}"
        try:
            with create_private(draft) as out:
                out.write((json.dumps(verdict, indent=2) + "\n").encode("ascii"))
            for number in range(2, MAX_VERDICTS):
                try:
                    # link(2) never replaces a file, so that two regradings at once keep both verdicts.
                    (self.folder / f"verdict-{number}.json").hardlink_to(draft)
                except FileExistsError:
                    continue
                return f"verdict-{number}.json"
        finally:
            draft.unlink(missing_ok=True)
        raise OSError(f"{self.folder} has {MAX_VERDICTS} verdicts")


FOLDER = "folder"
"""Content id of a folder."""
_CACHE = "__pycache__"


def content_ids(archive: Path, folder: PurePosixPath) -> dict[str, str]:
    """The entries of an archive below `folder`, by their path in it, each with an id of its content.

    The id of a file is the SHA-256 of its content, a symlink's id begins with `->`. Modes and times do not
    count; Python's caches are left out. Blocks. Raises BadRequestError.
    """
    return {name: entry.id for name, entry in _scan(archive, folder).items()}


def overlay(
    checkout: Path,
    preprocessed: Path,
    into: Path,
    *,
    folder: PurePosixPath,
    original: Mapping[str, str],
) -> None:
    """Write a task's folder, with names relative to it, as preprocess would have left it today.

    `checkout`: archive of the suite's files, the task's below `folder`. `preprocessed`: archive of the task's
    folder after preprocess. `original`: `content_ids` of the task's folder before preprocess. What preprocess
    created or changed comes from `preprocessed`, what it removed is absent, and the rest is the checkout's.
    Blocks. Raises BadRequestError for a broken archive.
    """
    after = _scan(preprocessed, PurePosixPath())
    # A file with several names counts as a whole: the archive has its content under one of them only.
    roots = {entry.root for name, entry in after.items() if original.get(name) != entry.id}
    written = {name: entry.kind for name, entry in after.items() if entry.root in roots}
    removed = original.keys() - after.keys()

    def entries() -> Iterator[Entry]:
        yield from _unchanged(checkout, folder, written, removed)
        for member, body in checked_entries(preprocessed):
            if member.name in written:
                yield member, body

    save(archive_chunks(entries()), into)


class _Scanned(NamedTuple):
    """One entry: its kind, the id of its content and, of a hard link, the name of the file in the archive."""

    kind: Kind
    id: str
    root: str


def _scan(archive: Path, folder: PurePosixPath) -> dict[str, _Scanned]:
    found: dict[str, _Scanned] = {}
    for member, body in checked_entries(archive):
        name = _relative(member.name, folder)
        if name is None:
            continue
        if member.kind is Kind.HARD_LINK:
            target = found.get(_relative(member.link, folder) or "")
            if target is not None:
                found[name] = target._replace(kind=member.kind)
                continue
        found[name] = _Scanned(member.kind, _content_id(member, body), name)
    return found


def _relative(name: str, folder: PurePosixPath) -> str | None:
    """A member's name relative to `folder`; None if it is not below it or is a cache."""
    path = PurePosixPath(name)
    if _CACHE in path.parts or not path.is_relative_to(folder) or path == folder:
        return None
    return str(path.relative_to(folder))


def _content_id(member: Member, body: Body) -> str:
    match member.kind:
        case Kind.FOLDER:
            return FOLDER
        case Kind.FILE:
            return digest_of(body)
        case _:
            return f"->{member.link}"


def _unchanged(
    checkout: Path, folder: PurePosixPath, written: Mapping[str, Kind], removed: Collection[str]
) -> Iterator[Entry]:
    """The members of the checkout that preprocess neither changed nor removed."""
    above_written = {str(parent) for name in written for parent in PurePosixPath(name).parents}
    for member, body in checked_entries(checkout):
        name = _relative(member.name, folder)
        if name is None or name in written or name in removed:
            continue
        if member.kind is not Kind.FOLDER and name in above_written:
            continue
        parents = map(str, PurePosixPath(name).parents)
        if any(written.get(parent, Kind.FOLDER) is not Kind.FOLDER for parent in parents):
            continue
        yield msgspec.structs.replace(member, name=name), body


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
    `language` the task's language. `in_place`: it was graded in the agent's sandbox, of which nothing is
    kept. `sealed`: preprocess has changed the task's folder, so that `KEPT_SEALED` exists. `location`: see
    `CapturedWorkspace`.
    """

    attempt: Attempt
    task_id: str
    language: Language
    in_place: bool
    sealed: bool
    location: str | None = None

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
            "location": self.location,
        }

    @classmethod
    def parse(cls, values: JsonObject) -> Self:
        """Read the content of `attempt.json`. Raises BadRequestError."""
        # Not a pydantic model: pydantic refuses texts with lone surrogates, which an agent can send.
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
        if start.episode.was_ready or start.episode.spec.task.files.preprocess is None:
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
            attempt=attempt,
            task_id=task.id,
            language=language,
            in_place=in_place,
            sealed=sealed,
            location=None if captured.location is None else str(captured.location),
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
        # Not the text of an OSError: it has the path, and so the episode's handle.
        why = error.message if isinstance(error, DecathlonError) else error.strerror
        values = fields(episode=episode.public_id, why=why)
        log.warning("the attempt could not be kept for a later grading", extra=values)
        try:
            await anyio.to_thread.run_sync(
                files.remove, ATTEMPT_FILE, KEPT_WORKSPACE, KEPT_SEALED, ORIGINAL_FILE
            )
        except OSError:
            log.exception("kept files could not be removed", extra=fields(episode=episode.public_id))
