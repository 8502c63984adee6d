"""`export`: episodes of a state folder, and tasks, for other tools. It works without a running server.

Files and folders appear when they are complete, and replace others only if that was asked for.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, TypeAlias

from cyclopts import Group, Parameter

from decathlon_mcp.app import read_catalogue
from decathlon_mcp.catalogue.draws import TaskFilter, runnable_tasks
from decathlon_mcp.cli.options import NO_FILTERS, PLAYER_SECONDS, Filters, Flag, settings_model
from decathlon_mcp.cli.usage import check_not_empty, check_seconds
from decathlon_mcp.errors import BadRequestError, SettingsError
from decathlon_mcp.plugins.exports.exported_episodes import finished_episodes, read_episodes, write_jsonl
from decathlon_mcp.plugins.exports.harbor import HarborOptions, write_harbor_tasks
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.list_episodes import find_row
from decathlon_mcp.plugins.history.list_runs import unknown_run
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.plugins.page.one_file import render_one_file
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import check_state_folder
from decathlon_mcp.storage.store import Store

AGENT_IMAGE, SERVER_IMAGE = "python:3.13-slim-bookworm", "decathlon-mcp"
"""Images for agents, with Python for the solutions of bundled tasks, and of this server."""
HARBOR = Group("With --to harbor", sort_key=4)

ExportOptions = settings_model("ExportOptions", ("suite", "language", "state", "config"))
ExportSettings = Annotated[ExportOptions, Parameter(name="*")]
EXPORT_DEFAULTS = ExportOptions.model_validate({})
Image = Annotated[str, Parameter(group=HARBOR, metavar="IMAGE", validator=check_not_empty)]
Seconds = Annotated[float, Parameter(group=HARBOR, metavar="SECONDS", validator=check_seconds)]


def export(
    name: Annotated[str | None, Parameter(name="RUN")] = None,
    /,
    *,
    to: Annotated[Literal["jsonl", "parquet", "inspect", "html", "harbor"], Parameter(metavar="FORMAT")],
    output: Annotated[Path, Parameter(name=("--output", "-o"), metavar="FILE", env_var=())],
    all: Flag = False,  # noqa: A002
    force: Flag = False,
    agent_image: Image = AGENT_IMAGE,
    server_image: Image = SERVER_IMAGE,
    player_seconds: Seconds = PLAYER_SECONDS,
    filters: Filters = NO_FILTERS,
    settings: ExportSettings = EXPORT_DEFAULTS,
) -> int:
    """Write episodes or tasks for other tools.

    The episodes of a run, or all, are written under their public ids, with their signed verdicts.

    Parameters
    ----------
    name
        The run to write; with `--to html`, the episode.
    to
        What is written. `jsonl`: a file with an episode a line. `parquet`: a folder with tables. `inspect`:
        a folder with logs of inspect-ai. `html`: one episode's page as a file. `harbor`: a folder with tasks
        for Harbor, each with a server of one episode as a sidecar; tasks that lack something on this machine
        are left out.
    output
        The file or folder to write.
    all
        Write every episode that has finished.
    force
        Replace what is at the output.
    agent_image
        Image in which Harbor runs its agents.
    server_image
        Image of this server, which docs/operating.md builds.
    player_seconds
        Time limit of an attempt.
    """
    if to == "harbor":
        if name is not None or all:
            raise BadRequestError("--to harbor writes tasks, which filters choose: leave RUN and --all out")
        options = HarborOptions(agent_image, server_image, player_seconds)
        return export_tasks(settings, filters, options, output, force=force)
    if filters.model_dump(exclude_defaults=True):
        raise BadRequestError(f"filters choose the tasks of --to harbor; --to {to} writes episodes")
    return export_episodes(settings.state, name, every=all, to=to, out=output, force=force)


PARTIAL, OLD = ".partial", ".old"
"""Endings of the hidden names of a folder that is being written, or replaced."""
_PACKAGES = {"parquet": ("pyarrow", "export"), "inspect": ("inspect_ai", "inspect")}
"""What a format needs: the package, and the extra that has it."""


@contextmanager
def new_file(out: Path, *, force: bool) -> Generator[BinaryIO]:
    """A file that becomes `out` at the end of the context; after an error nothing is left.

    Raises BadRequestError if `out` exists, unless `force` replaces it, or if it is a folder.
    """
    if out.is_dir():
        raise BadRequestError(f"{out} is a folder; name a file")
    _refuse_existing(out, force=force)
    with _unnamed_file(out) as file:
        yield file
        file.flush()
        _refuse_existing(out, force=force)
        named = _beside(out)
        try:
            # With any descriptor, which an absolute path ignores, os.link follows the link in /proc.
            os.link(f"/proc/self/fd/{file.fileno()}", named, src_dir_fd=file.fileno())
            os.replace(named, out)  # noqa: PTH105  (documented as atomic)
        finally:
            named.unlink(missing_ok=True)


@contextmanager
def _unnamed_file(out: Path) -> Generator[BinaryIO]:
    """A file beside without a name, of which nothing is left if the process is killed.

    Raises BadRequestError if no file can be created there.
    """
    try:
        descriptor = os.open(out.absolute().parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise _cannot_create(out, error) from None
        # This file system (NFS, some of FUSE) has no files without a name.
        partial = _beside(out)
        try:
            file = partial.open("x+b")
        except OSError as error:
            raise _cannot_create(out, error) from None
        try:
            with file:
                yield file
        finally:
            partial.unlink(missing_ok=True)
    else:
        with os.fdopen(descriptor, "w+b") as file:
            yield file


@contextmanager
def new_folder(out: Path, *, holds: str, force: bool) -> Generator[Path]:
    """A folder that becomes `out` at the end of the context; after an error nothing is left.

    `holds`: pattern of an export's files, such as `*.parquet` or `*/task.toml`. Raises BadRequestError if
    `out` exists, unless `force` replaces it. Even then only a folder with such files alone, or with folders
    that have one each: any other is no earlier export.
    """
    if out.exists() and not out.is_dir():
        raise BadRequestError(f"{out} is a file; name a folder")
    _refuse_existing(out, force=force)
    if out.exists():
        expected = {file.relative_to(out).parts[0] for file in out.glob(holds) if file.is_file()}
        if any(file.name not in expected for file in out.iterdir()):
            raise BadRequestError(
                f"{out} has other files than {holds}; --force replaces only an earlier export"
            )
    _remove_unfinished(out)
    partial, old = _beside(out), _beside(out, OLD)
    try:
        partial.mkdir()
    except OSError as error:
        raise _cannot_create(out, error) from None
    lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield partial
        _refuse_existing(out, force=force)
        if out.exists():
            # A folder cannot be replaced in one step: for a moment there is none.
            out.rename(old)
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(old, ignore_errors=True)
        os.close(lock)


def _remove_unfinished(out: Path) -> None:
    """Remove what an export to this folder left that was killed: nobody has its lock."""
    for partial in out.absolute().parent.glob(f".{glob.escape(out.absolute().name)}.????????{PARTIAL}"):
        with suppress(OSError):
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(lock)


def _refuse_existing(out: Path, *, force: bool) -> None:
    if out.exists() and not force:
        raise BadRequestError(f"{out} exists; --force replaces it")


def _cannot_create(out: Path, error: OSError) -> BadRequestError:
    return BadRequestError(f"cannot create {out}: {error.strerror}; name a place in a folder that exists")


def _beside(out: Path, ending: str = PARTIAL) -> Path:
    return out.absolute().parent / f".{out.absolute().name}.{secrets.token_hex(4)}{ending}"


Format: TypeAlias = Literal["jsonl", "parquet", "inspect", "html"]


def export_episodes(state: Path, name: str | None, *, every: bool, to: Format, out: Path, force: bool) -> int:
    """Write a run, `every` episode, or with `html` one episode.

    Raises SettingsError, BadRequestError, UnknownEpisodeError.
    """
    check_state_folder(state)
    if every == (name is not None):
        raise BadRequestError(f"give the name of {'an episode' if to == 'html' else 'a run, or --all'}")
    history = EpisodeHistory([state])
    if to == "html":
        if name is None:
            raise BadRequestError("--to html writes one episode: name it")
        return _export_page(history, state, name, out, force=force)
    if to in _PACKAGES:
        package, extra = _PACKAGES[to]
        if importlib.util.find_spec(package) is None:
            raise SettingsError(
                f"--to {to} requires {package}; in the clone: pip install '.[server,{extra}]'"
            )
    found = finished_episodes(history, name)
    if not found and name is not None and history.run(name) is None:
        raise unknown_run(state, history, name)
    episodes = read_episodes(history, found)
    # What needs another package is imported where it is used.
    match to:
        case "jsonl":
            with new_file(out, force=force) as file:
                count = write_jsonl(episodes, file)
        case "parquet":
            from decathlon_mcp.plugins.exports.parquet import write_parquet

            with new_folder(out, holds="*.parquet", force=force) as folder:
                count = write_parquet(episodes, folder)
        case "inspect":
            from decathlon_mcp.plugins.exports.inspect_logs import log_of, write_inspect_logs

            episodes = read_episodes(history, finished_episodes(history, name, log_of))
            with new_folder(out, holds="*.eval", force=force) as folder:
                count = write_inspect_logs(episodes, folder)
    live = len(history.episodes(EpisodeQuery(run=name, live=True), limit=1).items)
    note = "; those that have not finished are left out" if live else ""
    sys.stderr.write(f"decathlon-mcp: {count} episodes in {out}{note}\n")
    return 0


def export_tasks(
    settings: Settings, filters: TaskFilter, options: HarborOptions, out: Path, *, force: bool
) -> int:
    """Write the tasks that fit and can run here. Raises SuiteError, SettingsError, BadRequestError."""
    catalogue = read_catalogue(settings)
    names = runnable_tasks(catalogue, filters)
    with new_folder(out, holds="*/task.toml", force=force) as folder:
        write_harbor_tasks(catalogue, names, settings, options, folder)
    sys.stderr.write(f"decathlon-mcp: {len(names)} tasks in {out}\n")
    return 0


def _export_page(history: EpisodeHistory, state: Path, name: str, out: Path, *, force: bool) -> int:
    with Store.open_read_only(state) as store:
        details = history.episode(find_row(store, state, name).public_id)
    assert details is not None, "its row was just read"
    with new_file(out, force=force) as file:
        file.writelines(render_one_file(history, details))
    sys.stderr.write(f"decathlon-mcp: episode {details.summary.public_id} in {out}\n")
    return 0
