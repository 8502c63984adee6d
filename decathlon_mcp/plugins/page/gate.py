"""What every request to the page must fulfil, and the headers that every response has."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
