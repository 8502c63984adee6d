"""`gc`: remove sandboxes, archives and sessions of dead servers, which no running server owns.

It also removes saved states of episodes that are over, and lists of tools that no episode has.

The next `serve` on the state folder does the same. This command is for a machine on which none will start,
and to see what is left. The command takes the lock of each dead server first (`storage/lock.py`), and the
lock of `serve` if no `serve` has the state folder. So it never touches what a running server uses, and no
server takes over what it removes.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import anyio.to_thread

from decathlon_mcp.cli.options import Flag, StateFolder, run_async
from decathlon_mcp.cli.output import print_json
from decathlon_mcp.episodes.state import Ending, Phase
from decathlon_mcp.errors import DecathlonError, ProviderUnavailableError
from decathlon_mcp.hooks import providers
from decathlon_mcp.plugins.branches.states import remove_states_of_ended
from decathlon_mcp.plugins.retention import RECENT_SECONDS, remove_unnamed_tools
from decathlon_mcp.sandboxes.plugins import Inventory, load_provider
from decathlon_mcp.settings import default_state
from decathlon_mcp.storage.database import FILE_NAME
from decathlon_mcp.storage.lock import (
    InstanceLock,
    Server,
    check_state_folder,
    instance_lock,
    running_servers,
    server_files,
    serving,
)
from decathlon_mcp.storage.store import EpisodeRow, SandboxRow, Store


def gc(
    *,
    dry_run: Flag = False,
    abandon: Flag = False,
    json: Flag = False,
    state: StateFolder = None,
) -> int:
    """Remove the leftovers of crashed servers.

    Running servers, and what belongs to them, are never touched.

    Parameters
    ----------
    dry_run
        Only say what would be removed.
    abandon
        Also remove the episodes that the next `serve` could continue.
    json
        Print `{"removed": [...], "kept": {...}}`.
    """
    return run_async(collect, state or default_state(), dry_run, abandon, json)


_SESSION_COUNTS = "SELECT server, count(*) FROM sessions GROUP BY server"
SERVER_NAME = re.compile(r"[0-9a-f]{12}")
GRADED_LATER = frozenset({Phase.CLAIMED, Phase.SCORED})
"""Phases of episodes that can be continued without a live sandbox: what is graded is on the disk."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What was left by one dead server, or would be removed.

    `abandoned`: episodes that nobody continues. `sessions`: MCP sessions. `failed`: sandboxes that are still
    there.
    """

    server: str
    sandboxes: int = 0
    scratch: int = 0
    abandoned: int = 0
    sessions: int = 0
    failed: int = 0


@dataclass(slots=True)
class Report:
    """What was removed; `kept`: numbers of episodes that are left to the next `serve`, by server.

    `restarting`: the supervisor that starts a server again, which died and was left alone.
    `unreachable`: why nobody could say what a provider's sandboxes are, by its name. `tools`: lists of tools
    that no episode has. `states`: saved states of episodes that are over.
    """

    removed: list[Removed] = field(default_factory=list[Removed])
    kept: dict[str, int] = field(default_factory=dict[str, int])
    restarting: int | None = None
    unreachable: dict[str, str] = field(default_factory=dict[str, str])
    tools: int = 0
    states: int = 0


async def collect(state: Path, dry_run: bool, abandon: bool, as_json: bool) -> int:
    """Remove what dead servers have left, or with `dry_run` only say what; print it on stdout.

    A provider that cannot be asked for its sandboxes is a line on stderr. Episodes that the next `serve`
    could continue are kept, unless `abandon`. Returns 1 if a sandbox could not be removed. Raises
    SettingsError.
    """
    check_state_folder(state)
    report = Report()
    if (state / "servers").is_dir():
        async with _inventories(state, report) as inventories:
            await _collect(state, inventories, report, dry_run=dry_run, abandon=abandon)
    report.tools = await anyio.to_thread.run_sync(
        partial(remove_unnamed_tools, state, time.time() - RECENT_SECONDS, dry_run=dry_run)
    )
    report.states = await anyio.to_thread.run_sync(
        partial(remove_states_of_ended, state / "episodes", dry_run=dry_run)
    )
    if as_json:
        print_json({"dry_run": dry_run, **asdict(report)})
    else:
        for line in _lines(report, state, dry_run):
            sys.stdout.write(line + "\n")
        for name, why in report.unreachable.items():
            sys.stderr.write(f"sandboxes of the provider {name} were not looked for: {why}\n")
    return 1 if any(removed.failed for removed in report.removed) else 0


@asynccontextmanager
async def _inventories(state: Path, report: Report) -> AsyncGenerator[list[Inventory]]:
    """The inventories of all providers that were used, or have sandboxes in the state folder."""
    used = await anyio.to_thread.run_sync(_used_providers, state)
    inventories: list[Inventory] = []
    async with AsyncExitStack() as stack:
        for name in sorted(providers().keys() | used):
            try:
                plugin = load_provider(name)
                if plugin.is_remote and name not in used:
                    continue
                if plugin.inventory is None:
                    report.unreachable[name] = "its plug-in does not say what servers leave behind"
                    continue
                inventories.append(await stack.enter_async_context(plugin.inventory(state)))
            except Exception as error:  # noqa: BLE001  (of a plug-in; the other providers are asked all the same)
                if name in used:
                    reason = error.message if isinstance(error, DecathlonError) else repr(error)
                    report.unreachable[name] = reason[:500]
        yield inventories


def _used_providers(state: Path) -> set[str]:
    """The names of the providers that servers on the state folder have had. Blocks. Raises SettingsError."""
    with Store.open_read_only(state) as store:
        rows = [] if store is None else store.find(SandboxRow)
    noted = {name for file in server_files(state) for name in file.server.providers or ()}
    return noted | {row.provider for row in rows}


async def _collect(
    state: Path, inventories: Sequence[Inventory], report: Report, *, dry_run: bool, abandon: bool
) -> None:
    # Listed before the locks: a server has its lock before it has a folder.
    scratch = sorted(folder for folder in (state / "scratch").glob("*-*") if folder.is_dir())
    found = [(inventory, await inventory.owners()) for inventory in inventories]
    owners = {folder.name.partition("-")[0] for folder in scratch}.union(*(names for _, names in found))
    # Read before the store: what has no file now is not a server that ends meanwhile.
    earlier = running_servers(state).keys()
    other = serving(state)
    with Store.open_read_only(state) as store:
        episodes = [] if store is None else store.unfinished_episodes()
        sandboxes = [] if store is None else store.find(SandboxRow)
        sessions = {} if store is None else dict[str, int](store.query(_SESSION_COUNTS))
    if other is not None:
        # The provider of that server has all sandboxes of episodes, whichever server opened them.
        continued = {row.server for row in episodes} | {row.owner for row in sandboxes}
        report.restarting = other.supervisor if other.pid == other.supervisor else None
        episodes = []
    else:
        continued = set[str]() if abandon else await _continued(episodes, sandboxes, inventories)
    names = [inventory.name for inventory in inventories]
    unasked = {row.episode for row in sandboxes if row.provider not in names}
    # A `serve` that starts now waits for this command.
    own = Server.of_this_process(names, serves=other is None, survives=other is None, stops=True)
    # A server with something to continue keeps its lock file free for the next `serve`.
    with instance_lock(state, own, leave=continued) as lock:
        dead, names = lock.dead, lock.others()
        # Of servers whose file is gone: nobody else would ever find it.
        recorded = {row.server for row in episodes} | sessions.keys()
        lost = (owners | recorded) - names - earlier - {*dead, *continued}
        for owner in (*dead, *sorted(filter(SERVER_NAME.fullmatch, lost))):
            unfinished = [row for row in episodes if row.server == owner]
            is_known = owner in dead or owner in recorded
            where = [inventory for inventory, names_found in found if is_known or owner in names_found]
            removed = await _remove(owner, where, scratch, dry_run=dry_run)
            is_complete = not (removed.failed or unasked & {row.id for row in unfinished})
            # By its file, or its episodes, the next `gc` finds the sandboxes that could not be removed.
            if is_complete and (abandon or not unfinished):
                removed = replace(removed, abandoned=len(unfinished), sessions=sessions.get(owner, 0))
                if not dry_run:
                    _forget(owner, state, unfinished, lock)
            elif unfinished:
                report.kept[owner] = len(unfinished)
            if removed != Removed(owner):
                report.removed.append(removed)
        for row in episodes:
            if row.server in continued:
                report.kept[row.server] = report.kept.get(row.server, 0) + 1


async def _continued(
    episodes: Iterable[EpisodeRow], sandboxes: Iterable[SandboxRow], inventories: Sequence[Inventory]
) -> set[str]:
    """The servers that something must be left of: they ran, or opened sandboxes of, episodes to continue."""
    by_name = {inventory.name: inventory for inventory in inventories}
    known: dict[tuple[str, str], dict[str, bool]] = {}
    owners: dict[str, set[str]] = {}
    alive: set[str] = set()
    for row in sandboxes:
        owners.setdefault(row.episode, set()).add(row.owner)
        if row.provider not in by_name:
            alive.add(row.episode)  # nobody can tell
            continue
        key = (row.provider, row.owner)
        if key not in known:
            known[key] = await by_name[row.provider].sandboxes(row.owner)
        if known[key].get(row.name):
            alive.add(row.episode)
    kept = [row for row in episodes if row.phase in GRADED_LATER or row.id in alive]
    return {row.server for row in kept}.union(*(owners.get(row.id, ()) for row in kept))


async def _remove(
    owner: str, inventories: Iterable[Inventory], scratch: Iterable[Path], *, dry_run: bool
) -> Removed:
    """Remove, or with `dry_run` count, the sandboxes and the archives of one server."""
    sandboxes = failed = 0
    for inventory in inventories:
        found, left = len(await inventory.sandboxes(owner)), 0
        if found and not dry_run:
            try:
                await inventory.remove(owner)
            except ProviderUnavailableError:
                left = len(await inventory.sandboxes(owner))
        sandboxes += found - left
        failed += left
    folders = [folder for folder in scratch if folder.name.startswith(f"{owner}-")]
    if not dry_run:
        for folder in folders:
            await anyio.to_thread.run_sync(lambda folder=folder: shutil.rmtree(folder, ignore_errors=True))
    return Removed(owner, sandboxes, len(folders), failed=failed)


def _forget(owner: str, state: Path, unfinished: Iterable[EpisodeRow], lock: InstanceLock) -> None:
    """End the episodes of a dead server whose sandboxes are removed, and remove its sessions and its file."""
    if (state / FILE_NAME).exists():
        with Store.open(state, lock.name) as store:
            for row in unfinished:
                store.end_episode(row.id, Ending.NOT_CONTINUED)
            store.write(("DELETE FROM sessions WHERE server = ?", (owner,)))
    if owner in lock.dead:
        lock.forget(owner)


def _lines(report: Report, state: Path, dry_run: bool) -> Iterator[str]:
    verb = "would remove" if dry_run else "removed"
    if report.tools:
        yield f"{verb} {_count(report.tools, 'list of tools', 'lists of tools')} that no episode has"
    if report.states:
        yield f"{verb} {_count(report.states, 'saved state', 'saved states')} of episodes that are over"
    for removed in report.removed:
        parts = [
            _count(removed.sandboxes, "sandbox", "sandboxes"),
            _count(removed.scratch, "folder of archives", "folders of archives"),
            _count(removed.abandoned, "unfinished episode", "unfinished episodes"),
            _count(removed.sessions, "session", "sessions"),
        ]
        if any(parts):
            yield f"{verb} {', '.join(filter(None, parts))} of server {removed.server}, which died"
        if removed.failed:
            yield (
                f"could not remove {_count(removed.failed, 'sandbox', 'sandboxes')} of server "
                f"{removed.server}, which died: the log says why; the next `decathlon-mcp gc` tries again"
            )
    for server, count in report.kept.items():
        yield (
            f"kept {_count(count, 'episode', 'episodes')} of server {server}, which died: the next "
            "`decathlon-mcp serve` continues or ends them; --abandon removes them"
        )
    if report.restarting is not None:
        yield f"left a server that died to its supervisor: process {report.restarting} starts it again"
    if not (report.removed or report.kept or report.restarting):
        yield f"nothing is left of servers that died in {state}"


def _count(number: int, one: str, several: str) -> str:
    return "" if not number else f"{number} {one if number == 1 else several}"
