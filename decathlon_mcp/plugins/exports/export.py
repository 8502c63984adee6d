"""`export`: episodes of a state folder, and tasks, for other tools. It works without a running server."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from decathlon_mcp.cli.output import printed
from decathlon_mcp.errors import BadRequestError, SettingsError, UnknownEpisodeError
from decathlon_mcp.plugins.exports.episodes import finished_episodes, read_episodes
from decathlon_mcp.plugins.exports.output import new_file, new_folder
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.list_runs import unknown_run
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import check_state_folder
from decathlon_mcp.storage.store import Store

if TYPE_CHECKING:
    from decathlon_mcp.catalogue.draws import TaskFilter
    from decathlon_mcp.plugins.exports.harbor import HarborOptions

Format: TypeAlias = Literal["jsonl", "parquet", "inspect", "html"]
_PACKAGES = {"parquet": ("pyarrow", "export"), "inspect": ("inspect_ai", "inspect")}
"""What a format needs: the package, and the extra that has it."""


def export(state: Path, name: str | None, *, every: bool, to: Format, out: Path, force: bool) -> int:
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
            raise SettingsError(f"--to {to} requires {package}: pip install 'decathlon-mcp[server,{extra}]'")
    found = finished_episodes(history, name)
    if not found and name is not None and history.run(name) is None:
        raise unknown_run(state, history, name)
    episodes = read_episodes(history, found)
    # Imported late: they take a second.
    match to:
        case "jsonl":
            from decathlon_mcp.plugins.exports.jsonl import write_jsonl

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
    # Imported late: most of the server is needed to read tasks.
    from decathlon_mcp.app import read_catalogue
    from decathlon_mcp.catalogue.draws import runnable_tasks
    from decathlon_mcp.plugins.exports.harbor import write_harbor_tasks

    catalogue = read_catalogue(settings)
    names = runnable_tasks(catalogue, filters)
    with new_folder(out, holds="*/task.toml", force=force) as folder:
        write_harbor_tasks(catalogue, names, settings, options, folder)
    sys.stderr.write(f"decathlon-mcp: {len(names)} tasks in {out}\n")
    return 0


def _export_page(history: EpisodeHistory, state: Path, name: str, out: Path, *, force: bool) -> int:
    from decathlon_mcp.plugins.page.one_file import render_one_file

    with Store.open_read_only(state) as store:
        rows = [] if store is None else store.find_episodes(name, 2)
    details = history.episode(rows[0].public_id) if len(rows) == 1 else None
    if details is None:
        problem = "more than one episode begins" if len(rows) > 1 else "there is no episode that begins"
        raise UnknownEpisodeError(f"{problem} with {printed(repr(name[:12]))} in {state}")
    with new_file(out, force=force) as file:
        file.writelines(render_one_file(history, details))
    sys.stderr.write(f"decathlon-mcp: episode {details.summary.public_id} in {out}\n")
    return 0
