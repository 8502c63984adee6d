"""Access to the page: conditions for every request, and viewers, known by a secret that they present once.

What a finished episode holds contains answers and rewards, so the page is never open to everyone. A server
with tokens accepts them; without tokens it has a key in its state folder. A link and an event stream send no
header, so the secret is exchanged for a cookie. Sessions live in memory: they end with the server, after
`SESSION_SECONDS`, and when their token is removed.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Protocol
from urllib.parse import urlsplit

import anyio
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from decathlon_mcp.episodes.episode import Principal
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.storage.keys import create_secret, read_secret

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
SANDBOXED = "sandbox; default-src 'none'; frame-ancestors 'none'"
"""Policy of a response that is a sandbox's own bytes."""
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    # With `no-referrer` browsers send forms with `Origin: null`, by which `_is_own` cannot know them where
    # `Sec-Fetch-Site` is missing: over plain HTTP beyond this machine. Other sites learn nothing either way.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""Headers of a response that sets none of its own with the same name."""
MAX_FORM_BYTES = 4 << 20
"""Longest body of a form."""
READING = frozenset({"GET", "HEAD"})
PAGE_KEY_FILE = "page-key"
PAGE_KEY_BYTES = 32
SESSION_SECONDS = 12 * 3600.0
MAX_SESSIONS = 100
"""Sessions of one key or token; beyond, its oldest ends, and nobody else's."""
WRONG_SECONDS = 1.0
"""Each wrong secret is answered after this time, one after the other."""
MAX_WRONG = 32
"""Wrong secrets whose answers wait; one more is refused at once."""
MAX_SECRET_CHARACTERS = 512


class Gate:
    """ASGI middleware: refuses requests of foreign pages, and gives every response its headers.

    `answers_to`: whether the server answers to a `Host` header. `public_url`: by which people reach it, if
    that is not what `Host` says.
    """

    def __init__(self, app: ASGIApp, answers_to: Callable[[str], bool], public_url: str | None) -> None:
        self._app = app
        self._answers_to = answers_to
        self._origin = None if public_url is None else _origin_of(public_url)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        headers = Headers(scope=scope)
        app: ASGIApp = self._app
        # A page that lets its own name lead to this machine (DNS rebinding) has another one.
        if not self._answers_to(", ".join(headers.getlist("host"))):
            app = PlainTextResponse(
                "Invalid Host header: --allowed-host adds a name for this server", status_code=421
            )
        elif scope["method"] not in READING and not self._is_own(headers):
            app = PlainTextResponse("This request was sent by another page", status_code=403)
        elif not _is_short(headers):
            app = PlainTextResponse("The form is too long", status_code=413)
        await app(scope, receive, send_with_headers)

    def _is_own(self, headers: Headers) -> bool:
        """Whether a request that changes something was sent by this page.

        Ports of one host are one site for `SameSite`, so that the cookie alone says nothing.
        """
        site = headers.get("sec-fetch-site")
        if site is not None:
            return site == "same-origin"
        # Browsers leave that header out at an http address that is not this machine's.
        own_origin = self._origin or f"http://{headers.get('host', '')}"
        return headers.get("origin") == own_origin


def _is_short(headers: Headers) -> bool:
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers:
        return False  # browsers send forms with their length
    return length.isdecimal() and int(length) <= MAX_FORM_BYTES


def _origin_of(url: str) -> str:
    """The origin of a URL, as browsers send it."""
    parts = urlsplit(url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    port = "" if parts.port in (None, default) else f":{parts.port}"
    host = parts.hostname or ""
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}{port}"


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks at the page. `session`: digest of the session's id."""

    principal: Principal
    session: str = ""

    @property
    def sees_all(self) -> bool:
        """Whether this is the holder of the key, or an administrator."""
        return self.principal.token is None or self.principal.role == "admin"

    @property
    def may_watch(self) -> bool:
        """Whether the viewer may see what was played. A player may only play: results contain answers."""
        return self.principal.token is None or self.principal.controls

    @property
    def owner(self) -> str | None:
        """The token whose episodes are seen; None for all."""
        return None if self.sees_all else self.principal.token

    def may_see(self, owner: str | None) -> bool:
        """Whether the viewer may see an episode of that token."""
        return self.may_watch and (self.sees_all or owner == self.principal.token)


class Secrets(Protocol):
    """The secrets by which people are known; each is compared by its SHA-256."""

    @property
    def kind(self) -> str:
        """What a person is asked for: `key` or `token`."""
        ...

    def principal_of(self, digest: str) -> Principal | None:
        """Who has the secret with this digest (64 hexadecimal digits)."""
        ...


class PageKey:
    """The only secret of a server without tokens; its holder sees everything."""

    kind = "key"

    def __init__(self, key: str) -> None:
        self._digest = digest_of(key)

    def principal_of(self, digest: str) -> Principal | None:
        return Principal() if hmac.compare_digest(digest, self._digest) else None


@dataclass(frozen=True, slots=True)
class _Session:
    secret: str
    """Digest of the secret that was presented."""
    ends_at: float


class Sessions:
    """The sessions of all browsers. `clock`: a monotonic time in seconds."""

    def __init__(self, accepted: Secrets, clock: Callable[[], float] = monotonic) -> None:
        self._accepted = accepted
        self._clock = clock
        self._by_digest: dict[str, _Session] = {}
        self._wrong = anyio.Lock()

    @property
    def kind(self) -> str:
        """What a person is asked for: `key` or `token`."""
        return self._accepted.kind

    async def open(self, secret: str) -> str | None:
        """The id of a new session; None if the secret is wrong. Only then does it take time."""
        secret_digest = digest_of(secret[:MAX_SECRET_CHARACTERS])
        if self._accepted.principal_of(secret_digest) is None:
            if self._wrong.statistics().tasks_waiting < MAX_WRONG:
                async with self._wrong:
                    await anyio.sleep(WRONG_SECONDS)
            return None
        now = self._clock()
        for digest in [each for each, session in self._by_digest.items() if session.ends_at <= now]:
            del self._by_digest[digest]
        own = [digest for digest, session in self._by_digest.items() if session.secret == secret_digest]
        for digest in own[: max(0, len(own) + 1 - MAX_SESSIONS)]:
            del self._by_digest[digest]
        session_id = secrets.token_urlsafe(32)
        self._by_digest[digest_of(session_id)] = _Session(secret_digest, now + SESSION_SECONDS)
        return session_id

    def viewer(self, request: HTTPConnection) -> Viewer | None:
        """Who sent a request; None without a session."""
        session_id = request.cookies.get(cookie_name(request))
        if session_id is None:
            return None
        digest = digest_of(session_id)
        session = self._by_digest.get(digest)
        if session is None or session.ends_at <= self._clock():
            return None
        principal = self._accepted.principal_of(session.secret)
        return None if principal is None else Viewer(principal, digest)

    def close(self, viewer: Viewer) -> None:
        """End a session."""
        self._by_digest.pop(viewer.session, None)


def port_of(request: HTTPConnection) -> int:
    """The port at which the server listens; 0 if it is not known."""
    _, port = request.scope.get("server") or ("", 0)
    return port or 0


def cookie_name(request: HTTPConnection) -> str:
    """Name of the cookie. Browsers send the cookies of one host to all its ports, so it has the port's."""
    return f"decathlon-{port_of(request)}"


def digest_of(secret: str) -> str:
    """SHA-256 of a secret, in hexadecimal digits."""
    return sha256(secret.encode("utf-8", "replace")).hexdigest()


def load_or_create_page_key(state: Path) -> str:
    """The key of this state folder's page, made first if there is none: 64 hexadecimal digits.

    It opens the page of a server without tokens. Raises SettingsError if the file cannot be read or written,
    or has something else.
    """
    file = state / PAGE_KEY_FILE
    if not file.exists():
        create_secret(file, f"{secrets.token_hex(PAGE_KEY_BYTES)}\n".encode())
    key = read_secret(file).decode("ascii", "replace").strip()
    if not re.fullmatch(rf"[0-9a-f]{{{2 * PAGE_KEY_BYTES}}}", key):
        raise SettingsError(f"{file} is not the key of a page: remove it to have a new one created")
    return key
