"""Compares a recording with the live web: which of its addresses answer as they did."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Literal, cast

from decathlon_mcp import __version__
from decathlon_mcp.web.matching import REDACTED
from decathlon_mcp.web.recording import Exchange

AT_ONCE = 4
TIMEOUT_SECONDS = 30.0
MAX_BYTES = 64 << 20
"""Longer responses are not read to their end, and count as different."""
USER_AGENT = f"decathlon-mcp/{__version__}"

Difference = Literal["same", "different", "status", "unreachable", "skipped"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One exchange and the live web. `detail`: what differs, or why it was skipped."""

    exchange: Exchange
    difference: Difference
    detail: str = ""


def compare(exchanges: Sequence[Exchange]) -> Iterator[Comparison]:
    """Ask the sites again, a few at once; the results are in the order of the addresses. Blocks.

    Only the first response to each GET is compared. Requests with credentials are skipped, since the
    recording has none, and so are those that may change something.
    """
    first = {(exchange.url, exchange.method): exchange for exchange in reversed(exchanges)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield from pool.map(_compare, (first[name] for name in sorted(first)))


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A redirect is a response of its own in a recording."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> None:
        return None


def _compare(exchange: Exchange) -> Comparison:
    if exchange.method != "GET":
        return Comparison(exchange, "skipped", f"{exchange.method} is not repeated")
    if REDACTED in exchange.url:
        return Comparison(exchange, "skipped", "it needs credentials, which are not recorded")
    if exchange.status == 206:
        return Comparison(exchange, "skipped", "it is a part of a page")
    request = urllib.request.Request(exchange.url, headers={"User-Agent": USER_AGENT})
    opener = urllib.request.build_opener(_NoRedirects)
    try:
        try:
            response = cast("IO[bytes]", opener.open(request, timeout=TIMEOUT_SECONDS))
        except urllib.error.HTTPError as error:  # any status but 2xx
            response = cast("IO[bytes]", error)
        with response:
            status = int(getattr(response, "status", 0))
            digest, size = _digest(response)
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        return Comparison(exchange, "unreachable", str(error) or type(error).__name__)
    if status != exchange.status:
        return Comparison(exchange, "status", f"{status}, recorded {exchange.status}")
    if size > MAX_BYTES or digest != exchange.body:
        return Comparison(exchange, "different", f"{size} bytes, recorded {exchange.size}")
    return Comparison(exchange, "same")


def _digest(body: IO[bytes]) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while (chunk := body.read(1 << 16)) and size <= MAX_BYTES:
        size += len(chunk)
        digest.update(chunk)
    return digest.hexdigest(), size
