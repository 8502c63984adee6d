"""The player driven by key presses, on a server in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import pytest
from decathlon_client import Decathlon
from decathlon_client.player.app import PlayerApp
from decathlon_client.player.form_screen import FormScreen
from decathlon_client.player.play_screen import PlayScreen
from decathlon_client.player.screens import EditScreen, VerdictScreen
from decathlon_client.player.session import Phase, PlaySession, SessionManager, open_sessions
from decathlon_client.player.tasks_screen import TasksScreen
from textual.app import App
from textual.events import Paste
from textual.pilot import Pilot
from textual.screen import Screen
from textual.widget import Widget
from textual.widgets import Footer, Static

from tests.probe.serving import SUITE

SMALL = (80, 24)
LARGE = (120, 40)
WAIT_SECONDS = 120.0
Shown = TypeVar("Shown", bound="Screen[Any]")


@pytest.fixture(scope="module")
async def sessions(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: object
) -> AsyncGenerator[SessionManager]:
    state = tmp_path_factory.mktemp("state")
    async with open_sessions(
        Decathlon.embedded([SUITE, "starter"], "host", state=state, isolation="none", drain_seconds=5)
    ) as sessions:
        yield sessions


@dataclass(frozen=True, slots=True)
class Ui:
    """Presses keys and reads what is visible on the screen."""

    app: App[None]
    pilot: Pilot[None]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Paste a text into the focused widget."""
        self.app.post_message(Paste(text))
        await self.pilot.pause()

    async def until(self, happened: Callable[[], object]) -> None:
        """Wait until the condition holds."""
        while not happened():
            await self.pilot.pause(0.02)

    async def screen(self, kind: type[Shown]) -> Shown:
        """Wait for a screen of this type on top."""
        await self.until(lambda: isinstance(self.app.screen, kind) and self.app.screen.is_mounted)
        assert isinstance(self.app.screen, kind)
        return self.app.screen

    async def start(self, task: str) -> PlayScreen:
        """Choose a task from the list and wait until it is open."""
        tasks = await self.screen(TasksScreen)
        await self.until(lambda: tasks.shown)
        await self.type(task)
        await self.until(lambda: tasks.shown == [task])
        await self.press("enter")
        return await self.wait_until_open()

    async def wait_until_open(self) -> PlayScreen:
        """Wait until the attempt is open, or has failed to open."""
        play = await self.screen(PlayScreen)
        await self.until(lambda: play.session.phase is not Phase.OPENING)
        return play

    async def open(self, tool: str) -> FormScreen:
        """Search for a tool and open its form."""
        await self.press("slash")
        await self.type(tool)
        await self.press("enter")
        return await self.screen(FormScreen)

    async def claim(self, answer: str) -> VerdictScreen:
        """Claim and wait for the verdict."""
        await self.press("c")
        await self.screen(EditScreen)
        await self.type(answer)
        await self.press("ctrl+r")
        return await self.screen(VerdictScreen)

    async def wait_for_calls(self, session: PlaySession, calls: int) -> None:
        """Wait until this many calls were made and all have ended."""
        await self.until(lambda: len(session.calls) == calls and not session.running)

    def text(self, selector: str = "Static") -> str:
        """Text of the visible widgets that match the selector."""
        found = [item for item in self.app.screen.query(selector).results(Static) if item.is_on_screen]
        return "\n".join(str(item.render()) for item in found)

    def footer(self) -> str:
        """Keys shown in the footer."""
        footer = self.app.screen.query_one(Footer)
        return " ".join(str(item.render()) for item in footer.children)

    def cut(self) -> list[Widget]:
        """Visible widgets that overflow the screen horizontally."""
        width = self.app.size.width
        return [
            item
            for item in self.app.screen.query("*")
            if item.is_on_screen and (item.region.right > width or item.region.x < 0)
        ]


@asynccontextmanager
async def running_player(
    sessions: SessionManager, *, size: tuple[int, int] = SMALL, task: str | None = None
) -> AsyncGenerator[Ui]:
    """The whole player. Open attempts end with `sessions`."""
    app = PlayerApp(sessions, task)
    with anyio.fail_after(WAIT_SECONDS):
        async with app.run_test(size=size) as pilot:
            yield Ui(app, pilot)
