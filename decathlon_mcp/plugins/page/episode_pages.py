"""Pages of episodes: the list, two episodes side by side, and an episode with verdict, prompt and calls."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any, NamedTuple, cast

from starlette.exceptions import HTTPException
from starlette.responses import Response, StreamingResponse

from decathlon_mcp.cli.output import this_command
from decathlon_mcp.plugins.history.columns import ALONG_LABEL, REPLAY_LABEL
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import (
    CallEntry,
    Column,
    Entry,
    EpisodeDetails,
    EpisodeQuery,
    EpisodeSummary,
    Order,
)
from decathlon_mcp.plugins.page import plots
from decathlon_mcp.plugins.page.access import SANDBOXED
from decathlon_mcp.plugins.page.call_entries import ShownCall, shown
from decathlon_mcp.plugins.page.rendering import episode_path, query
from decathlon_mcp.plugins.page.site import Sorting, Visit
from decathlon_mcp.types import as_object, is_public_id

BOX_CALLS = 100
MAX_SEARCH_CHARACTERS = 500
OTHER_ATTEMPTS = 12
MAX_ALONG = 500
"""Branches that are read for the rewards along the way: the newest."""
EPISODE_COLUMNS = ("-result", "task", "run", "-calls", "-took", "-started")
SETTINGS = ("policy", "provider", "isolation", "language", "names", "release")
"""Members of the head line that are shown as they are."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of a verdict. `share`: what it adds to the reward; None if it has no weight."""

    name: str
    value: float
    weight: float | None
    share: float | None


@dataclass(frozen=True, slots=True)
class Box:
    """Calls `first` to `last`. `is_open`: they are rendered with the page."""

    first: int
    last: int
    is_open: bool


def episodes(visit: Visit) -> Response:
    """`/episodes`"""
    filters = {name: visit.query(name) for name in ("show", "task", "run", "label", "branch_of")}
    show, task, run, label, branch_of = filters.values()
    name, _, value = label.partition("=")
    sorting = Sorting.of(visit, "/episodes", EPISODE_COLUMNS, "-started", parameters=filters)
    wanted = EpisodeQuery(
        run=run or None,
        task=task or None,
        labels={name: value} if name and value else {},
        failed=True if show == "failed" else None,
        lost=True if show == "lost" else None,
        owner=visit.viewer.owner,
        with_branches=show == "branches" or bool(branch_of),
        branch_of=branch_of or None,
        order=order_of(sorting),
    )
    page = visit.history.episodes(wanted, cursor=visit.query("cursor") or None)
    more = None
    if page.cursor is not None:
        more = query({**filters, "sort": visit.query("sort"), "cursor": page.cursor})
    return visit.render("episodes.html", episodes=page.items, more=more, filters=filters, sorting=sorting)


def order_of(sorting: Sorting) -> Order:
    """The order of episodes in a table with EPISODE_COLUMNS."""
    return Order(cast("Column", sorting.column), sorting.descending)


def episode(visit: Visit) -> Response:
    """`/e/{id}`"""
    details = find_episode(visit)
    public_id = details.summary.public_id
    last = details.calls
    wanted = min(visit.number("call", 1), max(last, 1))
    open_box = (wanted - 1) // BOX_CALLS
    boxes = [
        Box(first, min(first + BOX_CALLS - 1, last), (first - 1) // BOX_CALLS == open_box)
        for first in range(1, max(last, 1) + 1, BOX_CALLS)
    ]
    entries: list[Entry] = []
    if details.summary.has_files:
        box = boxes[open_box]
        entries = visit.history.calls(public_id, box.first, box.last)
    path = visit.site.href(episode_path(public_id))
    along = _rewards_along(visit, details.summary)
    return visit.render(
        "episode.html",
        tree=visit.history.tree(public_id, owner=visit.viewer.owner),
        others=_other_attempts(visit, details.summary),
        has_workspace=visit.history.has_workspace(public_id),
        boxes=boxes,
        entries=shown(entries),
        along=plots.along(along, path) if len(along) > 1 else None,
        wanted=wanted if visit.query("call") else 0,
        search=visit.query("q")[:MAX_SEARCH_CHARACTERS],
        found_nothing=visit.query("found") == "nothing",
        may_end=visit.site.registry is not None and details.summary.is_live,
        replay_command=_replay_command(visit, details),
        branch_from=_branch_from(visit, details),
        watched=visit.snapshot is not None and visit.snapshot.has(public_id),
        **episode_values(visit.history, details, path),
    )


def episode_values(history: EpisodeHistory, details: EpisodeDetails, path: str) -> Mapping[str, Any]:
    """What the page of an episode and its one file both show. `path`: the address of the page."""
    public_id = details.summary.public_id
    times = history.call_times(public_id) if details.calls else []
    return {
        "details": details,
        "episode": details.summary,
        "verdict": details.verdict,
        "metrics": metrics_of(details),
        "settings": _settings_of(details),
        "replayed": _replayed_by(details.summary),
        "usage": history.usage(public_id),
        "logs": history.server_logs(public_id),
        "timeline": plots.timeline(times, path) if times else None,
    }


def _rewards_along(visit: Visit, episode: EpisodeSummary) -> Mapping[int, float]:
    """What the attempt was worth after each of its calls, as far as branches were graded to know it."""
    query = EpisodeQuery(branch_of=episode.public_id, owner=visit.viewer.owner, with_branches=True)
    branches = visit.history.episodes(query, limit=MAX_ALONG).items
    return {
        branch.origin.at: branch.reward
        for branch in reversed(branches)
        if branch.origin is not None
        and branch.reward is not None
        and branch.labels.get(ALONG_LABEL) == str(branch.origin.at)
    }


def _branch_from(visit: Visit, details: EpisodeDetails) -> str:
    """The episode, if the visitor may branch it on this server; else empty."""
    may_branch = visit.site.registry is not None and visit.viewer.may_watch and details.summary.has_files
    return details.summary.public_id if may_branch else ""


def _replay_command(visit: Visit, details: EpisodeDetails) -> str:
    """The command that makes the calls again; empty if they are gone."""
    if not details.summary.has_files:
        return ""
    words = ["replay", details.summary.public_id]
    if len(visit.site.folders) == 1:
        words += ["--state", visit.site.folders[0]]
    if visit.site.registry is not None:
        words += ["--url", visit.site.public_url or str(visit.request.base_url).rstrip("/")]
    return f"{this_command(anywhere=True)} {shlex.join(words)}"


def find_episode(visit: Visit, name: str | None = None) -> EpisodeDetails:
    """The episode in the address, or with this public id. 404 if there is none that the viewer may see."""
    public_id = name if name is not None else visit.path["id"]
    details = visit.history.episode(public_id)
    if details is None or not (visit.is_own or visit.viewer.may_see(details.summary.owner)):
        raise HTTPException(404, "There is no such episode, or it belongs to somebody else.")
    return details


def calls(visit: Visit) -> Response:
    """`/e/{id}/calls?first=&last=`: a box of calls as a fragment of HTML."""
    details = find_episode(visit)
    first = visit.number("first", 1)
    last = min(visit.number("last", first), first + BOX_CALLS - 1)
    entries = visit.history.calls(details.summary.public_id, first, last)
    whole = visit.query("whole") == "1"
    if whole:
        entries = [entry for entry in entries if isinstance(entry, CallEntry)][:1]
    return visit.render(
        "calls.html",
        episode=details.summary,
        entries=shown(entries, whole=whole),
        wanted=0,
        branch_from=_branch_from(visit, details),
    )


def find(visit: Visit) -> Response:
    """`/e/{id}/find`: leads to the next call that has a text, or that failed."""
    details = find_episode(visit)
    text, failed = visit.query("q")[:MAX_SEARCH_CHARACTERS], visit.query("failed") == "1"
    after = visit.number("after", 0)
    public_id = details.summary.public_id
    match = None
    if text or failed:
        match = visit.history.find(public_id, text, after=after, failed_only=failed)
        if match is None and after:
            match = visit.history.find(public_id, text, after=0, failed_only=failed)
    if match is None:
        values = {"call": after or None, "q": text, "found": "nothing"}
        return visit.redirect(f"/e/{public_id}?{query(values)}#calls")
    return visit.redirect(f"/e/{public_id}?{query({'call': match, 'q': text})}#c{match}")


def reply(visit: Visit) -> Response:
    """`/e/{id}/reply/{seq}`: a whole reply, as text that no browser interprets."""
    details = find_episode(visit)
    seq = visit.path["seq"]
    content = visit.history.raw_reply(details.summary.public_id, seq) if 0 < seq <= details.calls else None
    if content is None:
        raise HTTPException(404, "This call has no reply that was kept.")
    return _as_text(StreamingResponse(content))


def note(visit: Visit) -> Response:
    """`/e/{id}/note/{number}`: a whole note, as text that no browser interprets."""
    details = find_episode(visit)
    found = visit.history.note(details.summary.public_id, visit.path["number"])
    if found is None:
        raise HTTPException(404, "There is no such note.")
    return _as_text(Response(found.text.raw.encode("utf-8", "replace")))


def prompt(visit: Visit) -> Response:
    """`/e/{id}/prompt`: the prompts as the agent got them, as text that no browser interprets."""
    details = find_episode(visit)
    texts = [text.raw for text in (details.system_prompt, details.task_prompt) if text and text.raw]
    if not texts:
        raise HTTPException(404, "This episode has no prompt yet.")
    return _as_text(Response("\n\n".join(texts).encode("utf-8", "replace")))


def tools(visit: Visit) -> Response:
    """`/e/{id}/tools`: the tools as they were offered to the agent."""
    details = find_episode(visit)
    content = visit.history.tools(details.summary.public_id)
    if content is None:
        raise HTTPException(404, "The tools of this episode were not kept.")
    return _as_text(Response(content))


def _as_text(response: Response) -> Response:
    response.headers["content-type"] = "text/plain; charset=utf-8"
    response.headers["content-security-policy"] = SANDBOXED
    return response


def verdict(visit: Visit) -> Response:
    """`/e/{id}/verdict.json`: the signed verdict, to keep."""
    details = find_episode(visit)
    content = verdict_file(details)
    if content is None:
        raise HTTPException(404, "This episode has no verdict to download.")
    headers = {
        "content-disposition": f'attachment; filename="verdict-{details.summary.public_id}.json"',
        "content-security-policy": SANDBOXED,
    }
    return Response(content, media_type="application/json", headers=headers)


def verdict_file(details: EpisodeDetails) -> bytes | None:
    """The signed verdict as JSON, to keep; None without one."""
    # One that names the episode in another way could give its handle away.
    if details.verdict is None or details.verdict.get("episode") != details.summary.public_id:
        return None
    return json.dumps(details.verdict, ensure_ascii=False, indent=1).encode("utf-8", "backslashreplace")


def metrics_of(details: EpisodeDetails) -> list[Metric]:
    """The metrics of the verdict: weighed metrics first, with what each adds to the reward."""
    values = _numbers((details.verdict or {}).get("metrics"))
    weights = _numbers((details.verdict or {}).get("weights"))
    total = sum(weights.values())
    metrics = [
        Metric(
            name,
            value,
            weights.get(name),
            value * weights[name] / total if name in weights and total else None,
        )
        for name, value in values.items()
    ]
    return sorted(metrics, key=lambda metric: metric.weight is None)


def _numbers(value: object) -> dict[str, float]:
    return {
        name: float(number)
        for name, number in (as_object(value) or {}).items()
        if isinstance(number, int | float)
    }


def _replayed_by(episode: EpisodeSummary) -> str | None:
    """The public id of the episode that this episode replays; None for any other episode."""
    replayed = episode.labels.get(REPLAY_LABEL)
    # A branch of a replay has its labels, and anybody can give one.
    return replayed if episode.origin is None and replayed and is_public_id(replayed) else None


def _settings_of(details: EpisodeDetails) -> Mapping[str, str]:
    """What the episode was played with, by name."""
    head, ready = details.head or {}, details.ready or {}
    settings: dict[str, str] = {}
    if details.launch_time:
        settings["launch time"] = details.launch_time
    for name in SETTINGS:
        if (value := head.get(name)) not in (None, ""):
            settings[name] = str(value)
    for name, value in (as_object(head.get("limits")) or {}).items():
        if value is not None:
            settings[name.replace("_", " ")] = str(value)
    for name in ("suite_revision", "image_digest"):
        if value := ready.get(name):
            settings[name.replace("_", " ")] = str(value)
    return settings


def _other_attempts(visit: Visit, episode: EpisodeSummary) -> list[EpisodeSummary]:
    """Other attempts at the task, to compare with: first attempts of the same run."""
    wanted = EpisodeQuery(task=episode.task, suite=episode.suite, owner=visit.viewer.owner)
    found = visit.history.episodes(wanted, limit=2 * OTHER_ATTEMPTS).items
    others = [other for other in found if other.public_id != episode.public_id and not other.is_live]
    return sorted(others, key=lambda other: other.run != episode.run)[:OTHER_ATTEMPTS]


SHOWN_ROWS = 60
"""Rows that one page has. Equal calls are folded, except next to a row that differs."""
MAX_COMPARED = 2_000
"""Calls of each episode that are compared: the alignment of these takes up to a second."""


class _Digest(NamedTuple):
    """A call as it is compared. `key`: tool and arguments, by which calls are aligned."""

    key: tuple[str, bytes]
    reply: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """Calls that were aligned, by their numbers; None where an episode has none.

    `differs`: in what; empty for equal calls. `folded`: how many equal rows this row stands for.
    """

    a: int | None
    b: int | None
    differs: str
    folded: int = 0


def compare_episodes(visit: Visit) -> Response:
    """`/compare/episodes?a=ID&b=ID`"""
    a, b = find_episode(visit, visit.query("a")), find_episode(visit, visit.query("b"))
    ids = a.summary.public_id, b.summary.public_id
    rows = align(*(list(_digests(visit, each)) for each in ids))
    folded = list(fold(rows))
    pairs = [(row, _call(visit, ids[0], row.a), _call(visit, ids[1], row.b)) for row in folded[:SHOWN_ROWS]]
    return visit.render(
        "compare_episodes.html",
        a=a,
        b=b,
        equal=sum(not row.differs for row in rows),
        differing=sum(bool(row.differs) for row in rows),
        pairs=pairs,
        hidden=len(folded) - len(pairs),
        cut=max(a.calls, b.calls) > MAX_COMPARED,
        compared=MAX_COMPARED,
    )


def align(a: list[_Digest], b: list[_Digest]) -> list[Row]:
    """The calls of two episodes in order; calls with equal tool and arguments share a row.

    Between two such rows, calls of the same tool at the same place share a row: their arguments differ.
    """
    rows: list[Row] = []
    matcher = SequenceMatcher(None, [call.key for call in a], [call.key for call in b], autojunk=False)
    for tag, a_start, a_end, b_start, b_end in matcher.get_opcodes():
        if tag == "equal":
            for i, j in zip(range(a_start, a_end), range(b_start, b_end), strict=True):
                rows.append(Row(i + 1, j + 1, "" if a[i].reply == b[j].reply else "another reply"))
            continue
        shared = min(a_end - a_start, b_end - b_start)
        for offset in range(shared):
            i, j = a_start + offset, b_start + offset
            same_tool = a[i].key[0] == b[j].key[0]
            rows.append(Row(i + 1, j + 1, "other arguments" if same_tool else "another tool"))
        rows += [Row(i + 1, None, "only in A") for i in range(a_start + shared, a_end)]
        rows += [Row(None, j + 1, "only in B") for j in range(b_start + shared, b_end)]
    return rows


def fold(rows: list[Row]) -> Iterator[Row]:
    """The rows; of more than two equal rows that follow each other only the first and the last."""
    for differs, group in groupby(rows, key=lambda row: bool(row.differs)):
        equal = list(group)
        if differs or len(equal) <= 3:
            yield from equal
        else:
            yield equal[0]
            yield Row(None, None, "", folded=len(equal) - 2)
            yield equal[-1]


def _digests(visit: Visit, public_id: str) -> Iterator[_Digest]:
    for start in range(1, MAX_COMPARED + 1, BOX_CALLS):
        found = visit.history.calls(public_id, start, start + BOX_CALLS - 1)
        calls = [entry for entry in found if isinstance(entry, CallEntry)]
        for call in calls:
            arguments, reply = (
                hashlib.sha256(
                    repr(part and (part.raw, part.size_bytes)).encode("utf-8", "surrogatepass")
                ).digest()
                for part in (call.arguments, call.reply)
            )
            yield _Digest((call.name, arguments), reply)
        if len(calls) < BOX_CALLS:
            return


def _call(visit: Visit, public_id: str, seq: int | None) -> ShownCall | None:
    entries = [] if seq is None else shown(visit.history.calls(public_id, seq, seq))
    return next((entry for entry in entries if isinstance(entry, ShownCall)), None)
