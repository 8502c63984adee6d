"""The player with a pilot's hands on it, at a table in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import pytest
from decathlon_client import Decathlon
from decathlon_client.player.app import PlayerApp
from decathlon_client.player.attempt import Attempt, Phase, Table, open_table
from decathlon_client.player.form_screen import FormScreen
from decathlon_client.player.play_screen import PlayScreen
from decathlon_client.player.tasks_screen import TasksScreen
from decathlon_client.player.text_screens import EditScreen
from decathlon_client.player.verdict_screen import VerdictScreen
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
async def table(tmp_path_factory: pytest.TempPathFactory, anyio_backend: object) -> AsyncGenerator[Table]:
    state = tmp_path_factory.mktemp("state")
    async with open_table(
        Decathlon.embedded([SUITE, "starter"], "local", state=state, drain_seconds=5)
    ) as table:
        yield table


@dataclass(frozen=True, slots=True)
class Hands:
    """Presses keys, and sees what a person would see."""

    app: App[None]
    pilot: Pilot[None]

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Write a text into what has the focus, as a terminal does that pastes it."""
        self.app.post_message(Paste(text))
        await self.pilot.pause()

    async def until(self, happened: Callable[[], object]) -> None:
        """Wait for it."""
        while not happened():
            await self.pilot.pause(0.02)

    async def screen(self, kind: type[Shown]) -> Shown:
        """The screen on top, once it is of this kind."""
        await self.until(lambda: isinstance(self.app.screen, kind) and self.app.screen.is_mounted)
        assert isinstance(self.app.screen, kind)
        return self.app.screen

    async def start(self, task: str) -> PlayScreen:
        """Pick a task from the list, and wait until it can be played."""
        menu = await self.screen(TasksScreen)
        await self.until(lambda: menu.shown)
        await self.type(task)
        await self.until(lambda: menu.shown == [task])
        await self.press("enter")
        return await self.seated()

    async def seated(self) -> PlayScreen:
        """The attempt, once it can be played, or never will be."""
        play = await self.screen(PlayScreen)
        await self.until(lambda: play.attempt.phase is not Phase.OPENING)
        return play

    async def open(self, tool: str) -> FormScreen:
        """A tool's form, found by its name."""
        await self.press("slash")
        await self.type(tool)
        await self.press("enter", "enter")
        return await self.screen(FormScreen)

    async def claim(self, answer: str) -> VerdictScreen:
        """Claim, and wait for the verdict."""
        await self.press("c")
        await self.screen(EditScreen)
        await self.type(answer)
        await self.press("ctrl+r")
        return await self.screen(VerdictScreen)

    async def answered(self, attempt: Attempt, calls: int) -> None:
        """So many calls were made, and each came to its end."""
        await self.until(lambda: len(attempt.calls) == calls and not attempt.running)

    def text(self, selector: str = "Static") -> str:
        """What stands on the screen, in the widgets of this kind that can be seen."""
        found = [each for each in self.app.screen.query(selector).results(Static) if each.is_on_screen]
        return "\n".join(str(each.render()) for each in found)

    def foot(self) -> str:
        """The keys at the foot."""
        footer = self.app.screen.query_one(Footer)
        return " ".join(str(each.render()) for each in footer.children)

    def cut(self) -> list[Widget]:
        """Widgets that reach out of the screen at its right, or out of the foot."""
        width = self.app.size.width
        return [
            each
            for each in self.app.screen.query("*")
            if each.is_on_screen and (each.region.right > width or each.region.x < 0)
        ]


@asynccontextmanager
async def playing(
    table: Table, *, size: tuple[int, int] = SMALL, task: str | None = None
) -> AsyncGenerator[Hands]:
    """The whole player. Attempts that are left end with the table."""
    app = PlayerApp(table, task)
    with anyio.fail_after(WAIT_SECONDS):
        async with app.run_test(size=size) as pilot:
            yield Hands(app, pilot)
