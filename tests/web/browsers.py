"""A browser's recorded web: Toolathlon's servers `playwright_with_chunk` and `fetch`, with Debian's Chromium.

Not part of the normal test run, because its image has 2 GB. To run it:

    docker build --network host --tag decathlon-fidelity:latest tools/fidelity
    docker build --network host --tag decathlon-browser:latest tests/web/browser
    python -m pytest tests/web/browsers.py

Needs mitmdump and a Docker engine. The sites are stand-ins (`tests/web/browser/shop.py`), which are
switched off before anything is replayed. What they answer differs each time, so that equal replies come from
the recording.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.plugins.web.recording import FOLDER, Recording, find_recordings
from tests.probe.clients import Player, playing
from tests.probe.serving import Served, serving
from tests.web.browser.shop import PINNED, SHOP, STOCK, ShopHandler
from tests.web.running import needs_mitmdump
from tests.web.sites import Sites, sites

pytestmark = [pytest.mark.anyio, pytest.mark.docker, pytest.mark.slow, needs_mitmdump]

IMAGE = "decathlon-browser:latest"
SUITE = Path(__file__).parent / "browser/suite"
PLAY_SECONDS = 900
_BROWSER = "playwright_with_chunk__browser_"


@pytest.fixture
def browser_image(docker_engine: Any) -> str:
    assert docker_engine.images(name=IMAGE), f"there is no image {IMAGE}; see this module's docstring"
    return IMAGE


@asynccontextmanager
async def browsing(state: Path, image: str, mode: str, running: Sites | None) -> AsyncGenerator[Served]:
    settings: dict[str, Any] = {"suite": (str(SUITE),), "provider": "docker", "image": image, "web": mode}
    if running is not None:
        settings |= {"web_address": running.addresses, "web_authorities": running.authority}
    async with serving(state, **settings) as served:
        yield served


def unanswered(state: Path) -> list[str]:
    (path,) = find_recordings(state / FOLDER)
    with Recording(path) as recording:
        return [f"{request.method} {request.url}" for request in recording.unanswered()]


async def browse(player: Player, action: str, **arguments: Any) -> str:
    reply = await player.text(f"{_BROWSER}{action}", **arguments)
    assert "### Result\nError" not in reply, reply
    return reply


def without_numbers(reply: str) -> str:
    """A reply without the numbers that the server gives elements when it first sees them."""
    return re.sub(r" \[ref=\w+\]", "", reply)


async def click(player: Player, page: str, link: str) -> str:
    """Click a link of a page that is described by an earlier reply."""
    (ref,) = re.findall(rf'link "{link}"[^\n]*\[ref=(\w+)\]', page)
    return await browse(player, "click", element=link, ref=ref)


async def visit(player: Player) -> list[str]:
    """Visit the shop and download its list; returns what the agent has seen, the riddle last."""
    await browse(player, "navigate", url=f"http://{SHOP}/")
    shop = await browse(player, "wait_for", text="complete")
    downloaded = await click(player, shop, "List of teas")
    about = await click(player, shop, "About")
    fetched = [await player.text("fetch__fetch_txt", url=f"https://{SHOP}/about") for _ in range(2)]
    await browse(player, "navigate", url=f"https://{SHOP}/riddle")
    riddle = await browse(player, "wait_for", textGone="loading")
    return [*map(without_numbers, (shop, downloaded, about)), *fetched, riddle]


async def play(served: Served) -> tuple[list[str], dict[str, Any]]:
    """Play an episode; returns what the agent has seen, and the verdict."""
    async with playing(served, "buy-tea", "task") as player:
        seen = await visit(player)
        await player.call("claim_done")
        verdict = (await player.call("evaluate")).structured_content
    assert verdict["reward"] == 1.0, verdict
    return seen, verdict["web"]


@pytest.mark.timeout(PLAY_SECONDS)
async def test_what_a_browser_has_recorded_is_replayed_after_the_sites_are_gone(
    tmp_path: Path, browser_image: str
) -> None:
    state = tmp_path / "state"
    with sites(tmp_path, {(SHOP,): ShopHandler, (STOCK,): ShopHandler, (PINNED,): ShopHandler}) as running:
        async with browsing(state, browser_image, "record", running) as served:
            recorded, web = await play(served)
    shop, downloaded, about, *_, riddle = recorded
    assert web["missed"] == 0, unanswered(state)
    facts = ("time", "fraction", "other site", "pinned site", "worker")
    assert all(f'"{fact}: 200 ' in shop for fact in facts), shop
    assert f"URL: https://{SHOP}/about" in about, "the site has asked for HTTPS, and the link is not followed"
    assert ("Welcome back" in shop, "Downloaded file teas.csv" in downloaded) == (True, True)
    async with browsing(state, browser_image, "replay", None) as served:
        for _ in range(2):
            replayed, web = await play(served)
            assert replayed[:-1] == recorded[:-1], unanswered(state)
            # Its address has a random part, which only the proxy's explanation can answer.
            assert ("200 " in riddle, "504 This environment" in replayed[-1]) == (True, True)
            assert web["missed"] == 1, unanswered(state)
