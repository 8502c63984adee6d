"""The page as an ASGI application: its routes, which requests are its own, sessions, and the first page."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.http.authentication import PAGE_HOST, AllowedHosts, Tokens
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.plugins.page import episodes, files, runs
from decathlon_mcp.plugins.page.access import (
    READING,
    SESSION_SECONDS,
    Gate,
    PageKey,
    Secrets,
    Sessions,
    cookie_name,
    load_or_create_page_key,
)
from decathlon_mcp.plugins.page.changes import RegistryControl
from decathlon_mcp.plugins.page.control import branch_episode, change_run, end_episode
from decathlon_mcp.plugins.page.episodes import compare_episodes
from decathlon_mcp.plugins.page.live import (
    MAX_OWN_STREAMS,
    MAX_STREAMS,
    LiveFeed,
    LiveQuery,
    LiveResponse,
    RegistryLive,
)
from decathlon_mcp.plugins.page.play.attempts import PlayPages
from decathlon_mcp.plugins.page.rendering import MEDIA_TYPES
from decathlon_mcp.plugins.page.site import Site, Visit, read_short_form
from decathlon_mcp.types import public_id

_OWN = ("/runs", "/e/", "/episodes", "/compare", "/play", "/page/")
"""Beginnings of the paths that are the page's for every request, unless `_MCP_ENDS` says otherwise."""
_NOT_WANTED = re.compile(rb"q=0(\.0*)?")
ASSET_SECONDS = 365 * 86_400
FRONT_RUNS = 12
FRONT_EPISODES = 10
FRONT_FAILURES = 10


def page_address(key: str, port: int, path: str = "/") -> str:
    """The address that opens the page of a server on this machine without asking for the key."""
    # Browsers do not send what is behind `#`, so that the key is in no log.
    return f"http://{PAGE_HOST}:{port}{path}#key={key}"


class PageApp:
    """The pages of a site.

    `routes`: of further pages. `answers_to`: whether to serve a `Host` header. `key`: the page's, without
    tokens.
    """

    def __init__(
        self,
        site: Site,
        answers_to: Callable[[str], bool],
        *,
        public_url: str | None = None,
        routes: Sequence[BaseRoute] = (),
        key: str | None = None,
    ) -> None:
        self._key = None if public_url else key
        self.site = site
        self._app = Starlette(
            routes=[
                Route("/", site.watching(front)),
                Route("/runs", site.watching(runs.runs)),
                Route("/runs/{run:path}", site.watching(runs.run)),
                Route("/episodes", site.watching(episodes.episodes)),
                Route("/compare", site.watching(runs.compare)),
                Route("/compare/episodes", site.watching(compare_episodes)),
                Route("/e/{id}", site.watching(episodes.episode)),
                Route("/e/{id}/calls", site.watching(episodes.calls)),
                Route("/e/{id}/find", site.watching(episodes.find)),
                Route("/e/{id}/reply/{seq:int}", site.watching(episodes.reply)),
                Route("/e/{id}/note/{number:int}", site.watching(episodes.note)),
                Route("/e/{id}/prompt", site.watching(episodes.prompt)),
                Route("/e/{id}/files", site.watching(files.files)),
                Route("/e/{id}/files/{number:int}", site.watching(files.download)),
                Route("/e/{id}/tools", site.watching(episodes.tools)),
                Route("/e/{id}/verdict.json", site.watching(episodes.verdict)),
                Route("/page/live", live_events(site)),
                Route("/page/end", site.watching(end_episode), methods=["POST"]),
                Route("/page/branch", site.watching(branch_episode), methods=["POST"]),
                Route("/page/run", site.watching(change_run), methods=["POST"]),
                Route("/page/session", self._enter, methods=["POST"]),
                Route("/page/leave", self._leave, methods=["POST"]),
                Route("/page/assets/{digest}/{name}", self._asset),
                Route("/mcp", self._from_mcp),
                Route("/tasks/{task}/mcp", self._from_mcp),
                Route("/episodes/{handle}/mcp", self._from_mcp),
                *routes,
            ],
            middleware=[Middleware(Gate, answers_to=answers_to, public_url=public_url)],
            exception_handlers={HTTPException: self._refuse},
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    def shown_address(self, url: str, *, to_person: bool, path: str = "/") -> str:
        """Where people look, on a server at this URL. `to_person`: with the key, which no log may have."""
        if self._key is None:
            return f"{url}{path}"
        port = int(url.rpartition(":")[2])
        if to_person:
            return page_address(self._key, port, path)
        return f"http://{PAGE_HOST}:{port}{path} (`decathlon-mcp view --address` prints it with its key)"

    def serves(self, scope: Scope) -> bool:
        """Whether a request is for a person: for one of the page's paths, or of a browser at another one."""
        if scope["type"] != "http":
            return False
        path: str = scope["path"]
        if path.startswith(_OWN) and path != "/episodes" and not path.endswith("/mcp"):
            return True
        if scope["method"] not in READING or not _wants_html(scope):
            return False
        return path in ("/", "/mcp", "/episodes") or (
            path.startswith(("/tasks/", "/episodes/")) and path.endswith("/mcp")
        )

    async def _enter(self, request: Request) -> Response:
        """Exchange the key or a token for a cookie."""
        form = await read_short_form(request)
        next_path = _own_path(form.get("next", ""))
        session = await self.site.sessions.open(form.get("secret", "").strip())
        if session is None:
            ask = self.site.ask_for_secret
            return await self.site.in_thread(lambda: ask(request, wrong=True, next_path=next_path))
        response = RedirectResponse(self.site.href(next_path), 303)
        response.set_cookie(
            cookie_name(request),
            session,
            max_age=int(SESSION_SECONDS),
            path="/",
            secure=self.site.is_secure,
            httponly=True,
            samesite="lax",
        )
        return response

    async def _leave(self, request: Request) -> Response:
        """End the session."""
        viewer = self.site.sessions.viewer(request)
        if viewer is not None:
            self.site.sessions.close(viewer)
        response = RedirectResponse(self.site.href("/"), 303)
        response.delete_cookie(cookie_name(request), path="/")
        return response

    async def _asset(self, request: Request) -> Response:
        assets = self.site.assets
        name, digest = request.path_params["name"], request.path_params["digest"]
        if digest != assets.digest or name not in assets.contents:
            raise HTTPException(404, "There is no such file.")
        media_type = MEDIA_TYPES[PurePosixPath(name).suffix]
        headers = {"cache-control": f"public, max-age={ASSET_SECONDS}, immutable"}
        return Response(assets.contents[name], media_type=media_type, headers=headers)

    async def _from_mcp(self, request: Request) -> Response:
        """Redirect a browser from an MCP address to the page of the same episode or task."""
        parameters = request.path_params
        path = "/"
        if "handle" in parameters:
            path = f"/e/{public_id(parameters['handle'])}"
        elif "task" in parameters:
            path = f"/episodes?task={quote(parameters['task'], safe='')}"
        return RedirectResponse(self.site.href(path), 303, headers={"Vary": "Accept"})

    async def _refuse(self, request: Request, error: Exception) -> Response:
        """The page of an address that there is not. Who is not known learns nothing about addresses."""
        assert isinstance(error, HTTPException)
        viewer = self.site.sessions.viewer(request)
        if viewer is None:
            return await self.site.in_thread(self.site.ask_for_secret, request)
        detail = "There is no such page." if error.status_code == 404 else error.detail
        return await self.site.error(request, viewer, error.status_code, detail)


def _wants_html(scope: Scope) -> bool:
    """Whether the `Accept` header names HTML, as browsers' do; programs do not, or ask for anything."""
    accept = b",".join(value for name, value in scope["headers"] if name == b"accept")
    ranges = (each.replace(b" ", b"").lower().partition(b";") for each in accept.split(b",", 32))
    return any(name == b"text/html" and not _NOT_WANTED.fullmatch(rest) for name, _, rest in ranges)


def _own_path(text: str) -> str:
    """A path of the page to go on with; the first page for anything else."""
    # `//HOST` and `/\HOST` lead to another host.
    is_path = text.startswith("/") and not text.startswith(("//", "/\\")) and text.isprintable()
    return text if is_path and text.isascii() else "/"


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
        owner, streams = viewer.owner, site.live.streams
        is_full = owner is not None and streams[owner] >= MAX_OWN_STREAMS
        if is_full or streams.total() >= MAX_STREAMS:
            return Response("Too many browsers look already.", 503, media_type="text/plain")
        query = LiveQuery(viewer.owner, request.query_params.get("episode"))
        return LiveResponse(site.live, query, lambda: site.sessions.viewer(request) is not None)

    return endpoint


def create_page(
    registry: EpisodeRegistry,
    state: Path,
    tokens: Tokens,
    hosts: AllowedHosts,
    public_url: str | None = None,
) -> PageApp:
    """The page of a server on a state folder.

    Raises SettingsError if the key of the page cannot be read or written.
    """
    key = None if tokens else load_or_create_page_key(state)
    accepted: Secrets = tokens if key is None else PageKey(key)
    site = Site(
        EpisodeHistory([state]),
        Sessions(accepted),
        live=LiveFeed(RegistryLive(registry)),
        control=RegistryControl(registry),
        folders=(str(state),),
        public_url=public_url,
    )
    site.can_play = True
    routes = PlayPages(site, registry).routes()
    return PageApp(site, hosts.answers_to, public_url=public_url, routes=routes, key=key)
