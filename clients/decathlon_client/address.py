"""Which server a client uses and the token that it sends: its arguments, or else environment variables."""

from __future__ import annotations

import os
from urllib.parse import urlsplit

URL_VARIABLE = "DECATHLON_URL"
TOKEN_VARIABLE = "DECATHLON_TOKEN"
DEFAULT_URL = "http://127.0.0.1:8765"
"""Where `decathlon-mcp serve` listens by default."""


def server_url(url: str | None, *, is_root: bool = False) -> str:
    """`url`, or else the one in `DECATHLON_URL`, or else the default address of `serve`.

    Raises ValueError if it is not an HTTP URL, and with `is_root` also if it is that of a task or an episode.
    """
    source = "url"
    if url is None:
        source, url = URL_VARIABLE, os.environ.get(URL_VARIABLE, DEFAULT_URL)
    if not is_http_url(url) or (is_root and ("/tasks/" in url or "/episodes/" in url)):
        raise ValueError(f"{source}: not the address of a server, such as {DEFAULT_URL}: {url!r}")
    return url


def is_http_url(text: str) -> bool:
    """Whether a text is an address with `http` or `https` and a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def server_token(token: str | None) -> str:
    """`token`, or else the one in `DECATHLON_TOKEN`; empty for none.

    Raises ValueError if no header can carry it; the message does not contain it.
    """
    source = "token"
    if token is None:
        source, token = TOKEN_VARIABLE, os.environ.get(TOKEN_VARIABLE, "")
        if token.startswith("${"):  # a template variable that a desktop program had no value for
            return ""
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise ValueError(f"{source}: not a token: it has a space, a line break or a character beyond ASCII")
    return token


def authorization(token: str) -> dict[str, str]:
    """The headers that carry a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


DIRECT = {f"all://{host}": None for host in ("localhost", "127.0.0.1", "[::1]")}
"""`mounts` of an HTTP client: no proxy of the environment (`HTTP_PROXY`) is asked for this machine."""
