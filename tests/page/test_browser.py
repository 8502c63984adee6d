"""The page in Chromium: light, dark and narrow, what moves, the keyboard, without JavaScript."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request, expect

from decathlon_mcp.types import public_id
from tests.conformance.suites import node
from tests.docs.pages import REPOSITORY
from tests.history.stored_episodes import NOW, Call, Note, append
from tests.page.conftest import PACKAGES
from tests.page.sites import KEY
from tests.page.watching import (
    LIVE_HANDLE,
    LONG_HANDLE,
    OTHER_HANDLE,
    SHORT_HANDLE,
    Watched,
    live_episode,
)

pytestmark = pytest.mark.slow

ASSETS = REPOSITORY / "decathlon_mcp" / "plugins" / "page" / "assets"
MAX_SCRIPT_LINES = 400
SHORT, OTHER, LONG, LIVE = map(public_id, (SHORT_HANDLE, OTHER_HANDLE, LONG_HANDLE, LIVE_HANDLE))
PAGES = {
    "front": "/",
    "runs": "/runs",
    "run": "/runs/sft-0042",
    "episodes": "/episodes",
    "episode": f"/e/{SHORT}",
    "tree": f"/e/{public_id('e1' * 24)}",
    "compare": "/compare?run=baseline&run=sft-0042",
    "side-by-side": f"/compare/episodes?a={OTHER}&b={SHORT}",
}
SHIFTS = """
window.shifts = [];
const observer = new PerformanceObserver((list) => {
  for (const { value, sources } of list.getEntries())
    window.shifts.push([value, ...sources.map(({ node }) => node?.outerHTML ?? node?.textContent)]);
});
observer.observe({ type: "layout-shift" });
window.forgetShifts = () => { observer.takeRecords(); window.shifts = []; };
"""
"""Records what moves. A slow machine may draw a page before all of it is there; that has to be forgotten."""


@contextmanager
def person(
    chromium: Browser, watched: Watched, scheme: Literal["light", "dark"] = "light", width: int = 1280
) -> Generator[Page]:
    """A page in a browser whose user has presented the key; errors and requests to other hosts fail."""
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    problems: list[str] = []

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(message.text)

    def on_request(request: Request) -> None:
        if not request.url.startswith((watched.url, "data:image/")):
            problems.append(request.url)

    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", on_console)
    page.on("request", on_request)
    page.goto(f"{watched.url}/#key={KEY}")
    page.wait_for_selector("nav")
    yield page
    context.close()
    assert problems == []


def test_the_scripts_are_few_and_their_types_fit(node_modules: Path) -> None:
    assert len(list(ASSETS.glob("*.js"))) > 5
    assert sum(len(file.read_text().splitlines()) for file in ASSETS.glob("*.js")) <= MAX_SCRIPT_LINES
    command = [node(), node_modules / "typescript" / "bin" / "tsc", "-p", PACKAGES / "tsconfig.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout, done.returncode) == ("", 0)


@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_every_page_is_accessible_and_fits(
    chromium: Browser, watched: Watched, node_modules: Path, scheme: Literal["light", "dark"], width: int
) -> None:
    axe = (node_modules / "axe-core" / "axe.min.js").read_text("utf-8")
    kept = REPOSITORY / "build" / "screenshots"
    with person(chromium, watched, scheme, width) as page:
        for name, path in PAGES.items():
            page.goto(watched.url + path)
            page.screenshot(path=kept / f"{name}-{scheme}-{width}.png", full_page=True)
            assert page.evaluate("document.documentElement.scrollWidth") <= width, name
            page.evaluate(axe)
            found: list[Any] = page.evaluate("axe.run().then(({violations}) => violations)")
            serious = [
                (each["id"], node["html"]) for each in found if each["impact"] in ("serious", "critical")
                for node in each["nodes"][:3]
            ]  # fmt: skip
            assert serious == [], name


def test_nothing_moves_while_events_come_until_one_asks(chromium: Browser, watched: Watched) -> None:
    server, before = watched.server, watched.server.episodes
    with person(chromium, watched) as page:
        page.add_init_script(SHIFTS)
        page.goto(watched.url)
        rows = page.locator("#rows tbody tr")
        expect(page.locator("#stream")).to_have_text("live")
        page.evaluate("window.forgetShifts()")
        ids = rows.evaluate_all("rows => rows.map(row => row.dataset.id)")
        # One is over, one has called a tool, two are new.
        server.episodes = (live_episode(1, calls=123_456), live_episode(2), live_episode(7), live_episode(8))
        expect(page.locator("#rows")).to_contain_text("123456")
        assert rows.evaluate_all("rows => rows.map(row => row.dataset.id)") == ids
        assert "ended" in page.locator(f"[data-id='{0:016x}']").inner_text()
        assert page.evaluate("window.shifts") == []
        page.get_by_role("button", name="Show 2 new").click()
        expect(rows).to_have_count(4)
        assert "ended" not in page.locator("#rows").inner_text()
    server.episodes = before


def test_new_calls_of_a_live_episode_come_without_a_reload_when_one_asks(
    chromium: Browser, watched: Watched
) -> None:
    def playing(calls: int, replies: int) -> None:
        row = live_episode(1, calls, replies=replies, public_id=LIVE)
        watched.server.episodes = (live_episode(2), row)

    before = watched.server.episodes
    playing(2, 1)
    with person(chromium, watched) as page:
        page.add_init_script(SHIFTS)
        page.goto(f"{watched.url}/e/{LIVE}")
        expect(page.locator("#stream")).to_have_text("live")
        expect(page.locator("#fresh")).not_to_be_visible()
        page.evaluate("window.forgetShifts()")
        assert page.locator(".call.pending").evaluate_all("calls => calls.map(call => call.id)") == ["c2"]
        # The reply that was missing, and two more calls.
        reply = {"content": [{"type": "text", "text": "it is there"}]}
        line = {"event": "reply", "time": NOW, "seq": 2, "failed": False, "seconds": 9.0, "result": reply}
        with (watched.state / "episodes" / LIVE_HANDLE / "trajectory.jsonl").open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        playing(2, 2)
        expect(page.get_by_role("button", name="Show new replies")).to_be_visible()
        append(watched.state, LIVE_HANDLE, [Note("Again."), Call(reply="third"), Call(reply="4th")], before=2)
        playing(4, 4)
        button = page.get_by_role("button", name="Show 2 new calls")
        expect(button).to_be_visible()
        expect(page.locator("[data-count=calls]")).to_have_text("4")
        assert page.locator(".call").count() == 2
        assert page.evaluate("window.shifts") == []
        button.click()
        expect(page.locator("#c4")).to_be_in_viewport()
        expect(page.locator(".call.pending")).to_have_count(0)
        expect(page.locator("#c2")).to_contain_text("it is there")
        notes = page.locator(".model-note :is(.prose, .words)").all_inner_texts()
        assert notes == ["Next.", "It takes long.", "Again."]
        expect(page.locator("#fresh")).not_to_be_visible()
        watched.server.episodes = (live_episode(2),)
        page.get_by_role("link", name="Show how it ended").click()
        expect(page.locator("#c4")).to_contain_text("4th")
        assert page.locator("#playing, #fresh").count() == 0
    watched.server.episodes = before


def test_the_key_disappears_from_the_address(chromium: Browser, watched: Watched) -> None:
    with person(chromium, watched) as page:
        assert page.url == f"{watched.url}/"
        page.get_by_role("button", name="Sign out").click()
        page.get_by_label("Key").wait_for()
        assert page.locator("nav").count() == 0


def test_it_works_without_javascript(chromium: Browser, watched: Watched) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(f"{watched.url}/e/{LONG}?call=1500")
    page.get_by_label("Key").fill("0f" * 32)
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator("#c1500")).to_be_visible()
    page.get_by_role("link", name="Calls 1501 to 1600").click()
    expect(page.locator("#c1501")).to_be_visible()
    page.get_by_role("searchbox").fill("part-2222.csv")
    page.get_by_role("button", name="Search").click()
    expect(page.locator("#c2223")).to_be_visible()
    context.close()


def test_calls_of_a_long_episode_come_when_they_are_near(chromium: Browser, watched: Watched) -> None:
    def in_view(page: Page, seq: int) -> bool:
        return page.evaluate(
            "id => { const r = document.getElementById(id)?.getBoundingClientRect();"
            " return !!r && r.bottom > 0 && r.top < innerHeight; }",
            f"c{seq}",
        )

    with person(chromium, watched) as page:
        page.goto(f"{watched.url}/e/{LONG}?call=1500")
        assert in_view(page, 1500)
        page.wait_for_selector("#c1501")
        assert in_view(page, 1500)
        page.evaluate("document.getElementById('b2901').scrollIntoView()")
        page.wait_for_selector("#c2950")
        # What is far away is removed again.
        expect(page.locator("#c1500")).to_have_count(0)
