"""The Textual application: task list and play screens over one `SessionManager`."""

from __future__ import annotations

import os
import sys
from typing import ClassVar

from textual.app import App
from textual.binding import Binding, BindingType
from textual.driver import Driver

from decathlon_client import Decathlon
from decathlon_client.player.play_screen import PlayScreen
from decathlon_client.player.session import PlaySession, SessionManager, ToolCall, open_sessions
from decathlon_client.player.tasks_screen import TasksScreen
from decathlon_client.shutdown import shutdown_on_signal

DARK, LIGHT = "textual-dark", "textual-light"


class PlayerApp(App[None]):
    """The player. `task` starts at once; without it the user picks one from the list."""

    TITLE = "decathlon-mcp"
    CSS_PATH = "player.tcss"
    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+l", "light", "Theme"),
        Binding("ctrl+c,ctrl+q", "leave", "Leave", key_display="^c"),
    ]

    def __init__(self, sessions: SessionManager, task: str | None = None) -> None:
        super().__init__()
        self._sessions = sessions
        self._first = task
        self._playing: PlayScreen | None = None
        if "TEXTUAL_THEME" not in os.environ:
            self.theme = LIGHT if _is_light(os.environ.get("COLORFGBG", "")) else DARK

    def get_driver_class(self) -> type[Driver]:
        """Textual's choice, except for a terminal of Unix."""
        if sys.platform == "win32" or "TEXTUAL_DRIVER" in os.environ:
            return super().get_driver_class()
        from decathlon_client.player.terminal import TerminalDriver

        return TerminalDriver

    def on_mount(self) -> None:
        self.push_screen(TasksScreen(self._sessions))
        if self._first is not None:
            self.play(self._first)

    def on_tasks_screen_task_chosen(self, event: TasksScreen.TaskChosen) -> None:
        self.play(event.task)

    def play(self, task: str) -> None:
        """Start an attempt on a screen of its own."""
        session = self._sessions.start(task, self._changed)
        self._playing = PlayScreen(session)
        self.push_screen(self._playing)

    def _changed(self, session: PlaySession, call: ToolCall | None) -> None:
        screen = self._playing
        if screen is not None and screen.session is session and screen.is_running:
            screen.post_message(PlayScreen.Changed(call))

    def action_light(self) -> None:
        self.theme = DARK if self.theme == LIGHT else LIGHT

    def action_leave(self) -> None:
        """Leave; asks first when an unclaimed attempt would be lost."""
        if self._playing is not None and self._playing.is_running and self._playing.asks_before_leaving:
            self._playing.ask_to_leave(self.exit)
        else:
            self.exit()


def _is_light(value: str) -> bool:
    """Whether COLORFGBG (`foreground;background`) names a light background: 7 or 15."""
    return value.rpartition(";")[2] in ("7", "15")


async def play_by_hand(d: Decathlon, task: str | None) -> int:
    """Play until the user leaves. Every episode is closed when this returns or raises.

    The status to exit with. Raises ClientError where the server cannot be reached or has no such task.
    """
    async with open_sessions(d) as sessions:
        if task is not None:
            await sessions.require(task)
        app = PlayerApp(sessions, task)
        async with shutdown_on_signal(app.exit) as departure:
            await app.run_async()
        return departure.status or app.return_code or 0
