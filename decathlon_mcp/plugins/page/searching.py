"""A text in the calls of all episodes of a run, failures first: as many as are read in a few seconds."""

from __future__ import annotations

from dataclasses import dataclass
from time import monotonic

from decathlon_mcp.plugins.history.values import FAILURES_FIRST, CallEntry, EpisodeQuery, EpisodeSummary
from decathlon_mcp.plugins.page.rendering import query
from decathlon_mcp.plugins.page.site import Visit

SEARCH_SECONDS = 3.0
"""From then on no further episode is read: the page has a link that goes on."""
MAX_FOUND = 100
BATCH = 20
"""Episodes between two looks at the clock. A page of them has a cursor, by which the search goes on."""
EXCERPT_CHARACTERS = 60
"""Before and behind what was found."""


@dataclass(frozen=True, slots=True)
class Found:
    """An episode with such a call. `call`: number of the first. `path`: of the page that shows it.

    `excerpt`: what is before the text, the text, and what is behind it; None if it is not near the beginning
    of the arguments or of the reply.
    """

    episode: EpisodeSummary
    call: int
    name: str
    path: str
    excerpt: tuple[str, str, str] | None


@dataclass(frozen=True, slots=True)
class Search:
    """The found ones among so many `episodes`. `cursor`: where to go on; None if all were searched."""

    text: str
    found: tuple[Found, ...]
    episodes: int
    cursor: str | None


def search_run(visit: Visit, run: str, text: str) -> Search:
    """Search from the cursor of the visit on. Blocks for SEARCH_SECONDS and one batch."""
    wanted = EpisodeQuery(run=run, owner=visit.viewer.owner, order=FAILURES_FIRST)
    found: list[Found] = []
    episodes, cursor, end = 0, visit.query("cursor") or None, monotonic() + SEARCH_SECONDS
    while True:
        page = visit.history.episodes(wanted, limit=BATCH, cursor=cursor)
        for episode in page.items:
            call = visit.history.find(episode.public_id, text) if episode.has_files else None
            if call is not None:
                found.append(_found(visit, episode, call, text))
        episodes += len(page.items)
        cursor = page.cursor
        if cursor is None or len(found) >= MAX_FOUND or monotonic() > end:
            return Search(text, tuple(found), episodes, cursor)


def _found(visit: Visit, episode: EpisodeSummary, call: int, text: str) -> Found:
    entries = visit.history.calls(episode.public_id, call, call)
    entry = next((entry for entry in entries if isinstance(entry, CallEntry)), None)
    texts = [part.raw for part in (entry.arguments, entry.reply) if part] if entry else []
    path = f"/e/{episode.public_id}?{query({'call': call, 'q': text})}#c{call}"
    excerpt = next(filter(None, (_excerpt(each, text) for each in texts)), None)
    return Found(episode, call, entry.name if entry else "", path, excerpt)


def _excerpt(text: str, wanted: str) -> tuple[str, str, str] | None:
    # Of texts that grow or shrink in lower case the excerpt is a little beside it, which harms nobody.
    start = text.lower().find(wanted.lower())
    if start < 0:
        return None
    end = start + len(wanted)
    before = text[max(0, start - EXCERPT_CHARACTERS) : start]
    return before, text[start:end], text[end : end + EXCERPT_CHARACTERS]
