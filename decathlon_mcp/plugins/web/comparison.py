"""Compares a recording with the live web: which of its addresses answer as they did."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Literal

import httpx2

from decathlon_mcp import __version__
from decathlon_mcp.plugins.web.matching import REDACTED
from decathlon_mcp.plugins.web.recording import Exchange

AT_ONCE = 4
TIMEOUT_SECONDS = 30.0
"""How long a site may be silent."""
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
    # A redirect is a response of its own in a recording, and recorded bodies have no content encoding.
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    with (
        httpx2.Client(headers=headers, timeout=TIMEOUT_SECONDS) as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        asked = (first[name] for name in sorted(first))
        yield from pool.map(partial(_compare, client), asked)


def _compare(client: httpx2.Client, exchange: Exchange) -> Comparison:
    if exchange.method != "GET":
        return Comparison(exchange, "skipped", f"{exchange.method} is not repeated")
    if REDACTED in exchange.url:
        return Comparison(exchange, "skipped", "it needs credentials, which are not recorded")
    if exchange.status == 206:
        return Comparison(exchange, "skipped", "it is a part of a page")
    digest, size = hashlib.sha256(), 0
    try:
        with client.stream("GET", exchange.url) as response:
            for chunk in response.iter_raw(1 << 16):
                size += len(chunk)
                digest.update(chunk)
                if size > MAX_BYTES:
                    break
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
        return Comparison(exchange, "unreachable", str(error) or type(error).__name__)
    if response.status_code != exchange.status:
        return Comparison(exchange, "status", f"{response.status_code}, recorded {exchange.status}")
    if size > MAX_BYTES or digest.hexdigest() != exchange.body:
        return Comparison(exchange, "different", f"{size} bytes, recorded {exchange.size}")
    return Comparison(exchange, "same")
