"""The site that all pages share: the visitor, the templates, and a few threads in which pages are made.

A view is a plain function that gets a `Visit` and returns a response. It runs in a worker thread, because it
reads files and renders, so nothing of the server waits for it. A click on a heading sorts a table: the
heading is a link, so that it works without JavaScript.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlsplit

import anyio
import anyio.to_thread
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from decathlon_mcp.cli.options import DEFAULT_PORT
from decathlon_mcp.cli.output import shell_path, this_command
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.http.bodies import MemoryBudget
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.page.access import Sessions, Viewer, port_of
from decathlon_mcp.plugins.page.live import LiveEpisode, LiveFeed, LiveQuery, Snapshot
from decathlon_mcp.plugins.page.rendering import Assets, create_environment, query
from decathlon_mcp.settings import default_state

T = TypeVar("T")

MAX_THREADS = 4
"""Pages that are made at the same time. More would only take turns at Python's lock."""
MAX_FIELDS = 2_000
SHORT_FORM_BYTES = 16 << 10
"""Longest form of somebody who is not known yet. Longer forms are parsed in a thread: 4 MiB of escapes take
half a second."""
MAX_LONG_FORMS = 8
"""Long forms that are in memory at once, of which each of several tokens may have a part."""
LONG_FORM_SECONDS = 60.0
"""Longest time for a long form, from waiting for its turn on."""


@dataclass(frozen=True, slots=True)
class Visit:
    """One request of somebody who may send it."""

    site: Site
    request: Request
    viewer: Viewer
    snapshot: Snapshot | None
    live: tuple[LiveEpisode, ...]
    form: Mapping[str, str] = field(default_factory=dict[str, str])
    is_own: bool = False
    """Whether the viewer plays the episode in the address."""

    @property
    def history(self) -> EpisodeHistory:
        """What the state folders have."""
        return self.site.history

    @property
    def path(self) -> Mapping[str, Any]:
        """The parameters of the path."""
        return self.request.path_params

    def query(self, name: str) -> str:
        """One parameter of the address; empty if it is missing."""
        return self.request.query_params.get(name, "")

    def number(self, name: str, default: int) -> int:
        """One parameter that is a whole number from 1."""
        text = self.query(name)
        return int(text) if text.isascii() and text.isdecimal() and 0 < len(text) < 10 else default

    def render(self, template: str, status: int = 200, **values: Any) -> Response:
        """A page. Runs in the thread of the view."""
        return self.site.render(
            self.request,
            template,
            status,
            viewer=self.viewer,
            snapshot=self.snapshot,
            live=self.live,
            **values,
        )

    def redirect(self, path: str) -> Response:
        """The answer to a form: the page to look at next."""
        return RedirectResponse(self.site.href(path), 303)


Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]


class Site:
    """The pages of one server, or of `view`. `registry`: the server's; without it there is nothing to change.

    `folders`: names of the state folders, for people. `public_url`: by which people reach the page.
    """

    def __init__(
        self,
        history: EpisodeHistory,
        sessions: Sessions,
        *,
        live: LiveFeed | None = None,
        registry: EpisodeRegistry | None = None,
        folders: tuple[str, ...] = (),
        public_url: str | None = None,
    ) -> None:
        self.history = history
        self.sessions = sessions
        self.live = live
        self.registry = registry
        self.folders = folders
        self.public_url = public_url and public_url.rstrip("/")
        self.is_secure = (public_url or "").startswith("https:")
        self.assets = Assets()
        self._prefix = urlsplit(public_url or "").path.rstrip("/")
        self._templates = create_environment(self.assets, self.href)
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        self._long_forms = MemoryBudget(MAX_LONG_FORMS)

    def key_command(self, port: int, *, anywhere: bool = False) -> str:
        """The command that prints the page's address at a port, with the key. `anywhere`: in any folder."""
        words = [this_command(anywhere=anywhere), "view"]
        if self.folders and (state := Path(self.folders[0]).absolute()) != default_state():
            words.append(shell_path(state, anywhere=anywhere))
        words.append("--address")
        if port not in (0, DEFAULT_PORT):
            words.append(f"--port {port}")
        return " ".join(words)

    def href(self, path: str) -> str:
        """The address of a path, behind a proxy too."""
        return f"{self._prefix}{path}"

    def render(
        self, request: Request, template: str, status: int = 200, *, viewer: Viewer | None, **values: Any
    ) -> Response:
        """A page for a viewer, or for somebody who is not known yet."""
        content = self._templates.get_template(template).render(
            request=request,
            site=self,
            viewer=viewer,
            now=time.time(),
            public_url=self.public_url or _address(request),
            **values,
        )
        # Marks replace what UTF-8 cannot encode; what is left of it would be a fault of a template.
        return HTMLResponse(content.encode("utf-8", "replace"), status)

    def watching(self, view: Callable[[Visit], Response]) -> Endpoint:
        """An endpoint for viewers who may see what was played; the view runs in a worker thread."""
        return self.endpoint(partial(self.in_thread, view), watches=True)

    def endpoint(self, view: Callable[[Visit], Awaitable[Response]], *, watches: bool = False) -> Endpoint:
        """An endpoint for people who have presented their secret; errors become pages."""

        async def endpoint(request: Request) -> Response:
            viewer = self.sessions.viewer(request)
            if viewer is None:
                return await self.in_thread(self.ask_for_secret, request)
            if watches and not viewer.may_watch:
                if self.registry is not None and request.url.path == "/":
                    return RedirectResponse(self.href("/play"), 303)
                return await self.error(request, viewer, 403, "With this token you may play, and not watch.")
            snapshot, live = None, ()
            if self.live is not None:
                snapshot, live = self.live.snapshot(), self.live.visible(LiveQuery(viewer.owner))
            try:
                form = await self.read_form(request, viewer)
                return await view(Visit(self, request, viewer, snapshot, live, form))
            except HTTPException as error:
                return await self.error(request, viewer, error.status_code, error.detail)
            except DecathlonError as error:
                status = 400 if isinstance(error, BadRequestError) else 503
                return await self.error(request, viewer, status, error.message)

        return endpoint

    async def read_form(self, request: Request, viewer: Viewer) -> dict[str, str]:
        """The fields of the form that somebody who is known has sent; none of a request that is no POST.

        Raises BadRequestError, and HTTPException for a long form that takes too long.
        """
        if request.method != "POST":
            return {}
        if _is_short(request):
            return await read_short_form(request)
        with anyio.move_on_after(LONG_FORM_SECONDS):
            token = viewer.principal.share_key
            await self._long_forms.acquire(1, token)
            try:
                return await self.in_thread(_fields, await _body(request))
            finally:
                self._long_forms.release(1, token)
        raise HTTPException(503, "The form did not arrive in time: send it again.")

    async def in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run what reads files, renders, or takes long."""
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)

    async def error(self, request: Request, viewer: Viewer | None, status: int, message: str) -> Response:
        """A page that says what is wrong."""

        def render() -> Response:
            return self.render(request, "error.html", status, viewer=viewer, message=message)

        return await self.in_thread(render)

    def ask_for_secret(self, request: Request, *, wrong: bool = False, next_path: str = "") -> Response:
        """The page on which a person presents the key or a token."""
        here = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        # A browser that shows 401 as a page also writes it to its console, at every start with the key.
        asked = not wrong and request.headers.get("sec-fetch-mode") == "navigate"
        status = 200 if asked else 401
        next_path = next_path or here
        command = self.key_command(port_of(request), anywhere=True)
        facts = {"wrong": wrong, "next_path": next_path, "key_command": command}
        return self.render(request, "enter.html", status, viewer=None, **facts)


def _address(request: Request) -> str:
    """The server's address for programs, by which the request came."""
    url = request.base_url
    # Browsers take `decathlon.localhost` for this machine; name resolvers of programs often do not.
    if (url.hostname or "").endswith(".localhost"):
        url = url.replace(hostname="localhost")
    return str(url).rstrip("/")


async def read_short_form(request: Request) -> dict[str, str]:
    """The fields of a form of at most SHORT_FORM_BYTES. Raises BadRequestError, and HTTPException beyond."""
    if not _is_short(request):
        raise HTTPException(413, "The form is too long.")
    return _fields(await _body(request))


def _is_short(request: Request) -> bool:
    # The gate has found the length to be one.
    return int(request.headers.get("content-length", "0")) <= SHORT_FORM_BYTES


async def _body(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect:
        raise BadRequestError("the form did not arrive") from None


def _fields(body: bytes) -> dict[str, str]:
    """The fields of a form; of several with one name the last. Raises BadRequestError."""
    try:
        return dict(
            parse_qsl(body.decode("utf-8"), keep_blank_values=True, max_num_fields=MAX_FIELDS, separator="&")
        )
    except ValueError:
        raise BadRequestError("the form cannot be read") from None


@dataclass(frozen=True, slots=True)
class Sorting:
    """The order of a table, as the address names it: `sort=calls`, `sort=-calls` with the greatest first."""

    address: str
    """The page's, without a query."""
    parameters: Mapping[str, str | list[str]]
    """The other parameters of the query. A new order starts at the first page, so the cursor is left out."""
    columns: Mapping[str, str]
    """What can be sorted by, each with its order at the first click: with `-` the greatest first."""
    column: str
    descending: bool
    parameter: str = "sort"
    section: str = ""
    """Id of the section that the table is in, for a page that has several."""

    @classmethod
    def of(
        cls,
        visit: Visit,
        path: str,
        columns: Iterable[str],
        default: str,
        *,
        parameters: Mapping[str, str | list[str]],
        parameter: str = "sort",
        section: str = "",
    ) -> Sorting:
        """The order that a visit asks for. `columns`: as they are sorted at the first click.

        `default`: the order without the parameter, or with an unknown value of it.
        """
        known = {each.lstrip("-"): each for each in columns}
        wanted = visit.query(parameter)
        if wanted.lstrip("-") not in known or wanted.startswith("--"):
            wanted = default
        return cls(
            address=visit.site.href(path),
            parameters=parameters,
            columns=known,
            column=wanted.lstrip("-"),
            descending=wanted.startswith("-"),
            parameter=parameter,
            section=section,
        )

    @property
    def value(self) -> str:
        """What the address has for this order."""
        return f"-{self.column}" if self.descending else self.column

    def link(self, column: str) -> str:
        """The address that sorts by a column; for the sorted one, the other way round."""
        value = self.columns[column]
        if column == self.column:
            value = column if self.descending else f"-{column}"
        text = query({**self.parameters, self.parameter: value})
        return f"{self.address}?{text}{f'#{self.section}' if self.section else ''}"

    def sorted(self, rows: Iterable[T], keys: Mapping[str, Callable[[T], Any]]) -> list[T]:
        """The rows in this order. Rows whose key is None come last, and equal rows keep their order."""
        key = keys[self.column]
        keyed = [(key(row), row) for row in rows]
        known = [pair for pair in keyed if pair[0] is not None]
        known.sort(key=lambda pair: pair[0], reverse=self.descending)
        return [row for _, row in known] + [row for value, row in keyed if value is None]
