"""Draws docs/images/play.svg: the player during a real attempt at a bundled task, after two tool calls.

    .venv/bin/python docs/images/play.py

The picture loads nothing from the network. Requires the extras server, starter and play.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path

import anyio
from decathlon_client import Decathlon
from decathlon_client.player.app import PlayerApp
from decathlon_client.player.play_screen import PlayScreen
from decathlon_client.player.session import Phase, open_sessions
from textual.events import Paste
from textual.pilot import Pilot

OUTPUT = Path(__file__).with_name("play.svg")
SIZE = (110, 30)
TIMEOUT_SECONDS = 120.0
REMOTE_FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)


async def wait_until(pilot: Pilot[None], condition: Callable[[], object]) -> None:
    with anyio.fail_after(TIMEOUT_SECONDS):
        while not condition():
            await pilot.pause(0.05)
    await pilot.pause(0.2)


async def call(pilot: Pilot[None], tool: str, *values: str) -> None:
    """Choose a tool, fill in its form and send it."""
    await pilot.press("slash")
    pilot.app.post_message(Paste(tool))
    await pilot.pause(0.2)
    await pilot.press("enter")
    await pilot.pause(0.5)
    for value in values:
        pilot.app.post_message(Paste(value))
        await pilot.pause(0.2)
        await pilot.press("tab")
    await pilot.press("ctrl+r")
    await pilot.pause(0.5)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="play-") as state:
        async with open_sessions(Decathlon.embedded(state=state)) as sessions:
            app = PlayerApp(sessions, "tune-reactor")
            async with app.run_test(size=SIZE) as pilot:
                await wait_until(pilot, lambda: isinstance(app.screen, PlayScreen))
                assert isinstance(app.screen, PlayScreen)
                session = app.screen.session
                await wait_until(pilot, lambda: session.phase is Phase.PLAYING)
                await call(pilot, "describe")
                await wait_until(pilot, lambda: len(session.calls) == 1 and not session.running)
                await pilot.press("slash", "escape")
                await call(pilot, "simul", "warm", "60", "4")
                await wait_until(pilot, lambda: (session.calls[-1].progress or (0, None, None))[0] >= 4)
                await pilot.press("slash", "escape")
                picture = app.export_screenshot(title="decathlon-mcp play")
    OUTPUT.write_text(REMOTE_FONTS.sub("", picture), "utf-8")


if __name__ == "__main__":
    anyio.run(main)
