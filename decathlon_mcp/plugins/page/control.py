"""Controls for a person: end or branch an episode; end, pin or delete a run. Each use is logged."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from starlette.exceptions import HTTPException
from starlette.responses import Response

from decathlon_mcp.plugins.history.values import EpisodeQuery, EpisodeSummary
from decathlon_mcp.plugins.page.changes import RegistryControl
from decathlon_mcp.plugins.page.episodes import find_episode
from decathlon_mcp.plugins.page.rendering import episode_path, run_path
from decathlon_mcp.plugins.page.site import Visit
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.page")

ACTIONS = ("end", "pin", "unpin", "delete")


def end_episode(visit: Visit) -> Response:
    """`POST /page/end`"""
    control = _control(visit)
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
    if control.end(public_id):
        _log(visit, "an episode was ended on the page", episode=public_id)
    return visit.redirect(path)


def branch_episode(visit: Visit) -> Response:
    """`POST /page/branch`: leads to an attempt by hand that stands where the episode stood after a call."""
    control = _control(visit)
    public_id, at = visit.form.get("episode", ""), visit.form.get("at", "")
    find_episode(visit, public_id)
    if not (at.isascii() and at.isdecimal() and len(at) < 10):
        raise HTTPException(400, "The number of the call is missing.")
    attempt = control.branch(public_id, int(at), visit.viewer.principal)
    _log(visit, "an episode was branched on the page", episode=public_id, at=int(at), branch=attempt)
    return visit.redirect(f"/play/{attempt}")


def change_run(visit: Visit) -> Response:
    """`POST /page/run`"""
    control = _control(visit)
    name, action = visit.form.get("run", ""), visit.form.get("action", "")
    episodes = list(_episodes(visit, name))
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
    owner = visit.viewer.owner
    if action == "end":
        changed = sum(control.end(episode.public_id) for episode in episodes if episode.is_live)
    elif action == "delete":
        changed = control.delete(name, owner)
    else:
        control.pin(name, owner, pinned=action == "pin")
        changed = len(episodes)
    _log(visit, "a run was changed on the page", run=name, action=action, episodes=changed)
    return visit.redirect("/runs" if action == "delete" and not live else run_path(name))


def _episodes(visit: Visit, run: str) -> Iterator[EpisodeSummary]:
    """All episodes of a run that the viewer may see."""
    wanted = EpisodeQuery(run=run, owner=visit.viewer.owner, with_branches=True)
    return visit.history.all_episodes(wanted)


def _control(visit: Visit) -> RegistryControl:
    if visit.site.control is None:
        raise HTTPException(403, "These folders are only shown here.")
    return visit.site.control


def _log(visit: Visit, message: str, **values: object) -> None:
    log.info(message, extra=fields(token=visit.viewer.principal.token, **values))
