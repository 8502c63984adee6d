"""Makes the pictures of the page in docs/images: python docs/images/page.py

Plays the bundled tasks from their scripts in two runs on a server of its own, one of which leaves out some
calls, and a search with branches, and photographs pages with the system's Chromium. Takes a few minutes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from decathlon_client import ClientError, Decathlon, Episode
from decathlon_client.script import Step, play_script
from playwright.async_api import async_playwright

sys.path.insert(0, str(Path(__file__).parents[2]))

from decathlon_mcp.cli.console import ScriptConsole
from decathlon_mcp.starter import oracle, oracle_ids
from tests.page.conftest import ARGUMENTS, CHROMIUM

IMAGES = Path(__file__).parent
RUNS = {"baseline": 2, "with-notes": 0}
"""How many of the last calls a run leaves out in every second attempt."""
ATTEMPTS = 2
SEARCH: Mapping[str, Any] = {
    "temperature=57": {},
    "temperature=58": {"catalyst=3": {}, "catalyst=5": {"temperature=56": {}, "temperature=59": {}}},
    "temperature=59": {},
    "temperature=60": {"catalyst=4": {}, "catalyst=5": {}},
    "temperature=62": {},
}
"""What each branch of a search tries, and the branches of that one."""
WIDTH, HEIGHT = 1200, 760


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        state, ready = Path(folder) / "state", Path(folder) / "ready"
        arguments = [
            "serve",
            "--port",
            "0",
            "--state",
            str(state),
            "--ready-file",
            str(ready),
            "--suite",
            "starter",
            "--keep",
            "workspace",
        ]
        async with await anyio.open_process(
            [sys.executable, "-m", "decathlon_mcp.cli", *arguments], stdout=None, stderr=None
        ) as server:
            while not ready.exists():  # noqa: ASYNC110  (another process writes it)
                await anyio.sleep(0.2)
            try:
                await play_and_photograph(ready.read_text().strip(), state)
            finally:
                server.terminate()


async def play_and_photograph(url: str, state: Path) -> None:
    async with Decathlon(url) as d:
        for run, left_out in RUNS.items():
            for attempt in range(ATTEMPTS):
                for task in oracle_ids():
                    steps = oracle(task)
                    if attempt % 2:
                        steps = steps[: len(steps) - left_out]
                    await play(d, task, steps, {"run": run, "attempt": str(attempt + 1)})
        async with d.episode("tune-reactor", labels={"run": "search"}) as episode:
            await play_script(episode, oracle("tune-reactor")[:2], ScriptConsole())
            await search(d, episode, 2, SEARCH, {"catalyst": 4})
            await episode.evaluate()
        async with d.episode("tune-reactor", labels={"run": "playing"}):
            key = (state / "page-key").read_text().strip()
            await photograph(url.replace("127.0.0.1", "decathlon.localhost"), key)


async def play(d: Decathlon, task: str, steps: Sequence[Step], labels: dict[str, str]) -> None:
    try:
        async with d.episode(task, labels=labels) as episode:
            usage = {"input_tokens": 1234, "output_tokens": 80, "cost_usd": 0.0048}
            await episode.note("I look at the **files** first.", usage=usage)
            await play_script(episode, steps, ScriptConsole())
            await episode.evaluate()
    except ClientError as error:
        print(f"{task}: {error}", file=sys.stderr)  # noqa: T201


async def search(
    d: Decathlon, episode: Episode, calls: int, tree: Mapping[str, Any], recipe: Mapping[str, int]
) -> None:
    """Branch from an episode after its last call, and from the branches."""
    for change, below in tree.items():
        name, _, value = change.partition("=")
        tried = {**recipe, name: int(value)}
        async with d.branch(episode, at=calls, labels={name: value}) as branch:
            await branch.call("lab__run_simulation", {"name": f"run-{calls}", **tried})
            if tried == {"temperature": 60, "catalyst": 4} and not below:
                await play_script(branch, oracle("tune-reactor")[2:], ScriptConsole())
            await search(d, branch, calls + 1, below, tried)
            await branch.evaluate()


async def photograph(url: str, key: str) -> None:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        page = await browser.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        await page.goto(f"{url}/#key={key}")
        await page.wait_for_selector("nav")
        await page.wait_for_timeout(1_500)  # an event
        await page.screenshot(path=IMAGES / "page-overview.png")
        await page.goto(f"{url}/runs/baseline")
        await page.screenshot(path=IMAGES / "page-run.png")
        failed = page.locator(".cell.failed").first
        await failed.click()
        await page.screenshot(path=IMAGES / "page-episode.png")
        await page.goto(f"{url}/compare?run=baseline&run=with-notes")
        await page.screenshot(path=IMAGES / "page-compare.png")
        await page.goto(f"{url}/episodes?show=branches&label=catalyst%3D4")
        await page.locator(".list tbody a").first.click()
        await page.locator("section:has(.tree)").screenshot(path=IMAGES / "page-tree.png")
        await browser.close()


if __name__ == "__main__":
    anyio.run(main)
