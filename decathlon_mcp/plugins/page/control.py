"""Controls for a person: end or branch an episode; end, pin or delete a run. Each use is logged.

The views run in worker threads, as all views; what changes an episode is called in the server's own thread.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

import anyio.to_thread
from anyio import from_thread
from starlette.exceptions import HTTPException
from starlette.responses import Response

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.episodes.state import Ending
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.plugins.page.episode_pages import find_episode
from decathlon_mcp.plugins.page.rendering import episode_path, run_path
from decathlon_mcp.plugins.page.site import Visit
from decathlon_mcp.plugins.retention import delete_folder
from decathlon_mcp.protocol.lobby_tools import start_tool
from decathlon_mcp.storage.store import ENDED, Store
from decathlon_mcp.telemetry.logs import fields

BY_HAND = "by-hand"
"""The run of attempts that people play on the page."""
ACTIONS = ("end", "pin", "unpin", "delete")
MAX_RUN_EPISODES = 1_000_000
"""Episodes of a run that one call deletes."""

log = logging.getLogger("decathlon.page")


def end_episode(visit: Visit) -> Response:
    """`POST /page/end`"""
    registry = _registry(visit)
    public_id = visit.form.get("episode", "")
    episode = find_episode(visit, public_id).summary
    path = episode_path(public_id)
    if visit.form.get("sure") != "yes":
        return visit.render(
            "sure.html",
            question=f"End this episode of {episode.task}?",
            consequence="Its sandbox is removed. Without a claim there will be no reward.",
            answer="End it",
            action="/page/end",
            fields={"episode": public_id},
            back=path,
        )
    if from_thread.run_sync(_end, registry, {public_id}):
        _log(visit, "an episode was ended on the page", episode=public_id)
    return visit.redirect(path)


def branch_episode(visit: Visit) -> Response:
    """`POST /page/branch`: leads to an attempt by hand that stands where the episode stood after a call."""
    registry = _registry(visit)
    public_id, at = visit.form.get("episode", ""), visit.form.get("at", "")
    find_episode(visit, public_id)
    if not (at.isascii() and at.isdecimal() and len(at) < 10):
        raise HTTPException(400, "The number of the call is missing.")
    attempt = from_thread.run(_branch, registry, public_id, int(at), visit.viewer.principal)
    _log(visit, "an episode was branched on the page", episode=public_id, at=int(at), branch=attempt)
    return visit.redirect(f"/play/{attempt}")


def change_run(visit: Visit) -> Response:
    """`POST /page/run`"""
    registry = _registry(visit)
    name, action = visit.form.get("run", ""), visit.form.get("action", "")
    owner = visit.viewer.owner
    episodes = list(visit.history.all_episodes(EpisodeQuery(run=name, owner=owner, with_branches=True)))
    if not episodes or action not in ACTIONS:
        raise HTTPException(404, "There is no such run, or nothing of that kind to do with it.")
    live = sum(episode.is_live for episode in episodes)
    questions = {
        "end": (f"End the {live} live episodes of {name}?", "Without a claim they will have no reward."),
        "delete": (
            f"Delete the {len(episodes) - live} finished episodes of {name}?",
            "Their calls, verdicts and numbers are removed and cannot be restored.",
        ),
    }
    if action in questions and visit.form.get("sure") != "yes":
        question, consequence = questions[action]
        return visit.render(
            "sure.html",
            question=question,
            consequence=consequence,
            answer="Delete them" if action == "delete" else "End them",
            action="/page/run",
            fields={"run": name, "action": action},
            back=run_path(name),
        )
    store = registry.store
    if action == "end":
        changed = from_thread.run_sync(_end, registry, {episode.public_id for episode in episodes})
    elif store is None:
        raise HTTPException(404, "There is no such run.")
    elif action == "delete":
        changed = from_thread.run(partial(delete_run, store, registry.options.journals, name, owner=owner))
    else:
        from_thread.run_sync(partial(pin_run, store, name, pinned=action == "pin", owner=owner))
        changed = len(episodes)
    _log(visit, "a run was changed on the page", run=name, action=action, episodes=changed)
    return visit.redirect("/runs" if action == "delete" and not live else run_path(name))


def _registry(visit: Visit) -> EpisodeRegistry:
    if visit.site.registry is None:
        raise HTTPException(403, "These folders are only shown here.")
    return visit.site.registry


def _log(visit: Visit, message: str, **values: object) -> None:
    log.info(message, extra=fields(token=visit.viewer.principal.token, **values))


def _end(registry: EpisodeRegistry, public_ids: set[str]) -> int:
    """Begin to end the live episodes among these; returns their number."""
    found = [episode for episode in registry.live if episode.public_id in public_ids]
    for episode in found:
        episode.close(Ending.CLOSED)
    return len(found)


async def _branch(registry: EpisodeRegistry, episode_id: str, at: int, principal: Principal) -> str:
    """Start an attempt by hand that stands after a call of an episode; returns its public id.

    Raises DecathlonError.
    """
    # With this label its starter plays on by hand. People see what differs, and decide.
    arguments = {
        "branch_of": registry.index.handle_of(episode_id),
        "at": at,
        "on_difference": "report",
        "labels": {"run": BY_HAND},
    }
    return (await start_tool().from_arguments(arguments).start(registry, principal)).public_id


def pin_run(store: Store, run: str, *, pinned: bool, owner: str | None = None) -> None:
    """Keep the files of a run's episodes from `--keep-days`, or no longer.

    `owner`: only episodes of that token. Episodes that start later are as the newest of their run.
    """
    change = "UPDATE episodes SET pinned = ? WHERE run = ? AND (? IS NULL OR token = ?)"
    store.write((change, (pinned, run, owner, owner)))


async def delete_run(store: Store, folder: Path, run: str, *, owner: str | None = None) -> int:
    """Delete the episodes of a run that are over, with their files and rows; returns their number.

    `folder`: has a folder for each episode. `owner`: only episodes of that token. Live episodes stay. What
    cannot be deleted is logged and stays.
    """
    deleted = 0
    ended = "SELECT id FROM episodes WHERE run = ? AND phase = ? AND (? IS NULL OR token = ?) LIMIT ?"
    for (handle,) in store.query(ended, run, ENDED, owner, owner, MAX_RUN_EPISODES):
        if await anyio.to_thread.run_sync(delete_folder, folder, handle):
            store.write(("DELETE FROM episodes WHERE id = ? AND phase = ?", (handle, ENDED)))
            deleted += 1
    log.info("deleted a run", extra=fields(run=run, episodes=deleted, owner=owner))
    return deleted
