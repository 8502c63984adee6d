"""Pages over a state folder, in this process and without a network."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from decathlon_mcp.http.authentication import AllowedHosts, Tokens
from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.page.access import (
    PAGE_KEY_FILE,
    PageKey,
    Secrets,
    Sessions,
    load_or_create_page_key,
)
from decathlon_mcp.plugins.page.live import LiveFeed
from decathlon_mcp.plugins.page.page import PageApp
from decathlon_mcp.plugins.page.site import Site

KEY = "0f" * 32
HOST = "decathlon.localhost:8765"
BASE = f"http://{HOST}"
OWN = {"Sec-Fetch-Site": "same-origin"}
HTML = {"Accept": "text/html,application/xhtml+xml;q=0.9,*/*;q=0.8"}


def page_over(
    state: Path,
    *,
    tokens: Tokens | None = None,
    live: LiveFeed | None = None,
    public_url: str | None = None,
) -> PageApp:
    accepted: Secrets = tokens or PageKey(load_or_create_page_key(state))
    site = Site(
        EpisodeHistory([state]), Sessions(accepted), live=live, folders=(str(state),), public_url=public_url
    )
    return PageApp(site, AllowedHosts().answers_to)


def browser(app: PageApp) -> httpx2.AsyncClient:
    """A client that keeps cookies and does not follow redirects."""
    transport = httpx2.ASGITransport(app)
    return httpx2.AsyncClient(transport=transport, base_url=BASE, headers={**HTML, **OWN})


async def sign_in(client: httpx2.AsyncClient, secret: str) -> httpx2.Response:
    return await client.post("/page/session", data={"secret": secret})


def with_key(state: Path) -> Path:
    """The folder, which has KEY as its page's key."""
    file = state / PAGE_KEY_FILE
    file.write_text(KEY)
    file.chmod(0o600)
    return state


@asynccontextmanager
async def signed_in(state: Path, **options: Any) -> AsyncGenerator[httpx2.AsyncClient]:
    """A browser whose user has presented the page's key."""
    async with browser(page_over(state, **options)) as client:
        await sign_in(client, load_or_create_page_key(state))
        yield client


def outline(page: str, names: Mapping[str, str]) -> list[str]:
    """What the tree has, a line for each episode, call and rest; each level is two spaces further in.

    `names`: what stands for public ids in the lines.
    """
    found = re.search(r'<div class="tree".*?</section>', page, re.DOTALL)
    if found is None:
        return []
    lines: list[str] = []
    opened: list[bool] = []
    for piece in re.split(r"(<ul[^>]*>|</ul>)", found[0].partition(">")[2]):
        if piece.startswith("<ul"):
            opened.append("level" in piece)
        elif piece == "</ul>":
            opened.pop()
        else:
            texts = (" ".join(re.sub(r"<[^>]*>", " ", row).split()) for row in re.split("</li>", piece))
            lines += ["  " * sum(opened) + text for text in texts if text]
    assert not opened
    return [re.sub(r"\b[0-9a-f]{16}\b", lambda match: names.get(match[0], match[0]), line) for line in lines]
