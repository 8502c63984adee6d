"""The first page: what plays now, the runs (without any, the latest episodes), and the latest failures."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response

from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.plugins.page.live import MAX_STREAMS, LiveQuery, LiveResponse
from decathlon_mcp.plugins.page.site import Site, Visit

FRONT_RUNS = 12
FRONT_EPISODES = 10
FRONT_FAILURES = 10


def front(visit: Visit) -> Response:
    """`/`"""
    owner = visit.viewer.owner
    # Programs that only look at a server leave sessions behind, which nobody reads as failures.
    query = EpisodeQuery(failed=True, stray=False, owner=owner)
    failures = visit.history.episodes(query, limit=FRONT_FAILURES)
    runs = visit.history.runs(owner=owner, limit=FRONT_RUNS)
    # Attempts without the label `run`, as of programs that play single episodes.
    episodes = (
        () if runs.items else visit.history.episodes(EpisodeQuery(owner=owner), limit=FRONT_EPISODES).items
    )
    response = visit.render(
        "front.html",
        runs=runs,
        episodes=episodes,
        failures=failures.items,
    )
    response.headers["Vary"] = "Accept"
    return response


def live_events(site: Site) -> Callable[[Request], Awaitable[Response]]:
    """`/page/live`: what plays now, as server-sent events; with `?episode=ID` of that episode alone."""

    async def endpoint(request: Request) -> Response:
        viewer = site.sessions.viewer(request)
        if viewer is None or not viewer.may_watch:
            return Response("Present the key or a token first.", 401, media_type="text/plain")
        if site.live is None:
            return Response("There is no server here.", 404, media_type="text/plain")
        if site.live.streams >= MAX_STREAMS:
            return Response(f"{MAX_STREAMS} browsers look already.", 503, media_type="text/plain")
        query = LiveQuery(viewer.owner, request.query_params.get("episode"))
        return LiveResponse(site.live, query, lambda: site.sessions.viewer(request) is not None)

    return endpoint
