"""The application: its screens over one table, dark or light, left by Ctrl-C."""

from __future__ import annotations

import os
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType

from decathlon_client import Decathlon
from decathlon_client.player.attempt import Attempt, Call, Table, open_table
from decathlon_client.player.play_screen import PlayScreen
from decathlon_client.player.tasks_screen import TasksScreen
from decathlon_client.shutdown import departing

DARK, LIGHT = "textual-dark", "textual-light"


class PlayerApp(App[None]):
    """Plays at a table. `task`: begun at once; without one it is picked from the list."""

    TITLE = "decathlon-mcp"
    CSS_PATH = "player.tcss"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+l", "light", "Theme"),
        Binding("ctrl+c,ctrl+q", "leave", "Leave", key_display="^c"),
    ]

    def __init__(self, table: Table, task: str | None = None) -> None:
        super().__init__()
        self._table = table
        self._first = task
        self._playing: PlayScreen | None = None
        if "TEXTUAL_THEME" not in os.environ:
            self.theme = LIGHT if _is_light(os.environ.get("COLORFGBG", "")) else DARK

    def on_mount(self) -> None:
        self.push_screen(TasksScreen(self._table))
        if self._first is not None:
            self.play(self._first)

    def play(self, task: str) -> None:
        """Begin an attempt, on a screen of its own."""
        attempt = self._table.sit(task, self._changed)
        self._playing = PlayScreen(attempt)
        self.push_screen(self._playing)

    def _changed(self, attempt: Attempt, call: Call | None) -> None:
        screen = self._playing
        if screen is not None and screen.attempt is attempt and screen.is_running:
            screen.post_message(PlayScreen.Changed(call))

    def action_light(self) -> None:
        self.theme = DARK if self.theme == LIGHT else LIGHT

    def action_leave(self) -> None:
        """Asks once where an attempt would be lost."""
        if self._playing is not None and self._playing.is_running and self._playing.asks_before_leaving:
            self._playing.ask_to_leave(self.exit)
        else:
            self.exit()


def _is_light(told: str) -> bool:
    """What terminals that set COLORFGBG say: `foreground;background`, 7 and 15 are light."""
    return told.rpartition(";")[2] in ("7", "15")


async def play_by_hand(d: Decathlon, task: str | None) -> int:
    """Play until whoever plays leaves. Every episode is closed when this returns or raises.

    The status to exit with. Raises ClientError where the server cannot be reached or has no such task.
    """
    async with open_table(d) as table:
        if task is not None:
            await table.require(task)
        app = PlayerApp(table, task)
        async with departing(app.exit) as departure:
            await app.run_async()
        return departure.status or app.return_code or 0
