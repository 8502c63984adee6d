"""The page as an ASGI application: its routes, which requests are its own, sessions, and the first page."""

from __future__ import annotations

import re
import sys
import webbrowser
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Annotated
from urllib.parse import quote

from anyio import to_thread
from cyclopts import Parameter
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from decathlon_mcp.cli.options import DEFAULT_PORT, Flag, run_async
from decathlon_mcp.cli.usage import check_port
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.http.authentication import PAGE_HOST, AllowedHosts, Tokens
from decathlon_mcp.http.listening import listen
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import EpisodeQuery
from decathlon_mcp.plugins.page import episode_pages, left_files, runs
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
from decathlon_mcp.plugins.page.control import branch_episode, change_run, end_episode
from decathlon_mcp.plugins.page.episode_pages import compare_episodes
from decathlon_mcp.plugins.page.live import (
    MAX_OWN_STREAMS,
    MAX_STREAMS,
    LiveFeed,
    LiveQuery,
    LiveResponse,
    snapshot_of,
)
from decathlon_mcp.plugins.page.play_pages import PlayPages
from decathlon_mcp.plugins.page.rendering import MEDIA_TYPES
from decathlon_mcp.plugins.page.site import Site, Visit, read_short_form
from decathlon_mcp.settings import default_state
from decathlon_mcp.storage.lock import check_state_folder
from decathlon_mcp.storage.store import EpisodeRow
from decathlon_mcp.telemetry.logs import configure_logging
from decathlon_mcp.types import public_id

VIEW_PORT = 8766
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

    `answers_to`: whether to serve a `Host` header. `key`: the page's, without tokens.
    """

    def __init__(self, site: Site, answers_to: Callable[[str], bool], *, key: str | None = None) -> None:
        self._key = None if site.public_url else key
        self.site = site
        self._app = Starlette(
            routes=[
                Route("/", site.watching(front)),
                Route("/runs", site.watching(runs.runs)),
                Route("/runs/{run:path}", site.watching(runs.run)),
                Route("/episodes", site.watching(episode_pages.episodes)),
                Route("/compare", site.watching(runs.compare)),
                Route("/compare/episodes", site.watching(compare_episodes)),
                Route("/e/{id}", site.watching(episode_pages.episode)),
                Route("/e/{id}/calls", site.watching(episode_pages.calls)),
                Route("/e/{id}/find", site.watching(episode_pages.find)),
                Route("/e/{id}/reply/{seq:int}", site.watching(episode_pages.reply)),
                Route("/e/{id}/note/{number:int}", site.watching(episode_pages.note)),
                Route("/e/{id}/prompt", site.watching(episode_pages.prompt)),
                Route("/e/{id}/files", site.watching(left_files.files)),
                Route("/e/{id}/files/{number:int}", site.watching(left_files.download)),
                Route("/e/{id}/tools", site.watching(episode_pages.tools)),
                Route("/e/{id}/verdict.json", site.watching(episode_pages.verdict)),
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
                *(PlayPages(site, site.registry).routes() if site.registry is not None else ()),
            ],
            middleware=[Middleware(Gate, answers_to=answers_to, public_url=site.public_url)],
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
        command = self.site.key_command(port)
        return f"http://{PAGE_HOST}:{port}{path} (`{command}` prints the address with its key)"

    def serves(self, scope: Scope) -> bool:
        """Whether a request is for a person: for one of the page's paths, or of a browser at another path."""
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

    def unwritten(public_id: str) -> EpisodeRow | None:
        episode = next((each for each in registry.index if each.public_id == public_id), None)
        return None if episode is None else episode.records.unwritten(episode.state.phase)

    site = Site(
        EpisodeHistory([state], unwritten),
        Sessions(accepted),
        live=LiveFeed(partial(snapshot_of, registry), lambda: registry.shutdown.has_begun),
        registry=registry,
        folders=(str(state),),
        public_url=public_url,
    )
    return PageApp(site, hosts.answers_to, key=key)


def view(
    *states: Annotated[Path, Parameter(name="STATE", env_var="DECATHLON_STATE", show_env_var=False)],
    port: Annotated[int | None, Parameter(validator=check_port)] = None,
    open: Flag = False,  # noqa: A002
    address: Flag = False,
) -> int:
    """Show runs and episodes in a browser, without a server.

    Parameters
    ----------
    states
        State folders of servers, read as one. [the default one]
    port
        Port to listen on; 0 picks a free one. With `--address`, the server's port. [8766; the server's: 8765]
    open
        Open the page in this machine's browser.
    address
        Print the address of the page of a running server, with its key, and do nothing else.
    """
    folders = states or (default_state(),)
    for folder in folders:
        check_state_folder(folder, "STATE")
        if not folder.exists():
            raise SettingsError(f"no server has kept episodes in {folder}")
    return show_address(folders[0], port) if address else run_async(serve_view, folders, port, open)


def show_address(state: Path, port: int | None) -> int:
    """Print the address of the page that `serve` has on this folder.

    Raises SettingsError if the folder's key cannot be read or made.
    """
    key = load_or_create_page_key(state)
    sys.stdout.write(f"{page_address(key, DEFAULT_PORT if port is None else port)}\n")
    return 0


async def serve_view(states: Sequence[Path], port: int | None, opens: bool) -> int:
    """Serve the page until SIGTERM or SIGINT. Raises SettingsError."""
    configure_logging("warning", "text")
    key = load_or_create_page_key(states[0])
    history = EpisodeHistory(states)
    await to_thread.run_sync(history.run_names)  # raises SettingsError for a folder of another version
    site = Site(history, Sessions(PageKey(key)), folders=tuple(map(str, states)))
    with listen("127.0.0.1", VIEW_PORT if port is None else port) as listener:
        app = PageApp(site, AllowedHosts().answers_to, key=key)
        url = f"http://{PAGE_HOST}:{listener.getsockname()[1]}"

        def announce() -> None:
            # The key gives access to everything in the folders: a log must not have it.
            sys.stdout.write(f"{app.shown_address(url, to_person=sys.stdout.isatty())}\n")
            sys.stdout.flush()
            if opens:
                webbrowser.open(app.shown_address(url, to_person=True))

        async def nothing_to_drain() -> None:
            pass

        await serve_http(app, listener, drain=nothing_to_drain, on_ready=announce)
    return 0
