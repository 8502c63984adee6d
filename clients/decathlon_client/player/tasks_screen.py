"""The task list: filtered while typing, with the text of the highlighted task."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.message import Message
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from decathlon_client import ClientError, Task
from decathlon_client.player.rendering import sanitize
from decathlon_client.player.screens import PlayerScreen
from decathlon_client.player.session import SessionManager


class TasksScreen(PlayerScreen[None]):
    """Enter plays the highlighted task, also while the search is being typed."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "play", "Play", priority=True),
        Binding("down", "mark(1)", "Choose", key_display="↑↓", priority=True),
        Binding("up", "mark(-1)", show=False, priority=True),
        Binding("pagedown", "page(1)", "Text", key_display="PgUp/Dn", priority=True),
        Binding("pageup", "page(-1)", show=False, priority=True),
    ]

    class TaskChosen(Message):
        """The user wants to play a task."""

        def __init__(self, task: str) -> None:
            super().__init__()
            self.task = task

    def __init__(self, sessions: SessionManager) -> None:
        super().__init__()
        self._sessions = sessions
        self._tasks: list[Task] = []
        self._shown: list[Task] = []
        self._read_all = False
        self._play_when_read = False

    @property
    def shown(self) -> list[str]:
        """Ids of the tasks that match the search."""
        return [task.id for task in self._shown]

    def compose(self) -> ComposeResult:
        yield Static("decathlon-mcp   choose a task", classes="bar", markup=False)
        yield Input(placeholder="Search in id, split, servers and text", compact=True, id="search")
        with Horizontal():
            yield OptionList(id="tasks", compact=True, markup=False)
            with VerticalScroll(id="text", can_focus=False):
                yield Static("Reading the tasks …", id="prompt", markup=False)
        yield Footer(show_command_palette=False, compact=True)

    def on_mount(self) -> None:
        self.query_one("#tasks").can_focus = False
        self._read()

    @work
    async def _read(self) -> None:
        try:
            self._tasks = await self._sessions.tasks()
        except ClientError as error:
            self.query_one("#prompt", Static).update(Text(error.message, "bold red"))
            return
        self._read_all = True
        search = self.query_one("#search", Input)
        self._show(search.value)
        if self._play_when_read and search.value:
            self._play_highlighted()

    @on(Input.Changed, "#search")
    def _searched(self, event: Input.Changed) -> None:
        self._play_when_read = False
        self._show(event.value)

    def _show(self, words: str) -> None:
        terms = words.casefold().split()
        self._shown = [task for task in self._tasks if all(word in _searchable(task) for word in terms)]
        options = self.query_one("#tasks", OptionList)
        options.clear_options()
        options.add_options(Option(_task_line(task)) for task in self._shown)
        options.highlighted = 0 if self._shown else None
        if not self._shown and self._read_all:
            self.query_one("#prompt", Static).update(
                "No task matches." if self._tasks else "There are no tasks."
            )

    @on(OptionList.OptionHighlighted, "#tasks")
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_index < len(self._shown):
            self.query_one("#prompt", Static).update(_task_details(self._shown[event.option_index]))
            self.query_one("#text").scroll_home(animate=False)

    def action_play(self) -> None:
        # A binding with priority runs before the keys that wait for the search: the list would be that of a
        # shorter text, and another task would be played.
        search = self.query_one("#search", Input)
        search.call_later(search.action_submit)

    @on(Input.Submitted, "#search")
    @on(OptionList.OptionSelected, "#tasks")
    def _play_highlighted(self) -> None:
        if not self._read_all:
            self._play_when_read = True
            return
        at = self.query_one("#tasks", OptionList).highlighted
        if at is None:
            return
        task = self._shown[at]
        if task.runnable:
            self.post_message(self.TaskChosen(task.id))
        else:
            self.notify(
                sanitize("; ".join(task.missing)), title="Cannot run here", severity="error", markup=False
            )

    def action_mark(self, step: int) -> None:
        options = self.query_one("#tasks", OptionList)
        if step > 0:
            options.action_cursor_down()
        else:
            options.action_cursor_up()

    def action_page(self, step: int) -> None:
        text = self.query_one("#text")
        text.scroll_relative(y=step * max(1, text.size.height - 2), animate=False)


def _searchable(task: Task) -> str:
    return " ".join((task.id, task.suite, *task.splits, *task.servers, task.prompt or "")).casefold()


def _task_line(task: Task) -> Text:
    label = Text(task.id, no_wrap=True, overflow="ellipsis")
    return label if task.runnable else Text.assemble(("✗ ", "red"), (task.id, "dim"), no_wrap=True)


def _task_details(task: Task) -> Text:
    """Suite, needs and text of a task."""
    details = Text()
    details.append(f"{task.id}\n", "bold")
    tools = [*task.servers, *(f"local {name}" for name in task.local_tools)]
    facts = [f"suite {task.suite}", ", ".join(task.splits), ", ".join(tools), "network" * task.network]
    details.append(sanitize(" · ".join(fact for fact in facts if fact)) + "\n", "dim")
    if not task.runnable:
        details.append(sanitize(f"Cannot run here: {'; '.join(task.missing)}\n"), "bold red")
    details.append("\n" + sanitize(task.prompt or "").strip())
    return details
