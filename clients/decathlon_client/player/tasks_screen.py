"""The menu: every task there is, searched as one types, its text beside."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import on, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.widgets import Footer, Input, OptionList, Static
from textual.widgets.option_list import Option

from decathlon_client import ClientError, Task
from decathlon_client.player.attempt import Table
from decathlon_client.player.page import Page
from decathlon_client.player.saying import clean


class TasksScreen(Page[None]):
    """Enter plays what is marked."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "play", "Play", priority=True),
        Binding("down", "mark(1)", "Choose", key_display="↑↓", priority=True),
        Binding("up", "mark(-1)", show=False, priority=True),
        Binding("pagedown", "page(1)", "Text", key_display="PgUp/Dn", priority=True),
        Binding("pageup", "page(-1)", show=False, priority=True),
    ]

    def __init__(self, table: Table) -> None:
        super().__init__()
        self._table = table
        self._tasks: list[Task] = []
        self._shown: list[Task] = []

    @property
    def shown(self) -> list[str]:
        """The ids that fit what is searched for."""
        return [task.id for task in self._shown]

    def compose(self) -> ComposeResult:
        yield Static("decathlon-mcp   what shall be played?", classes="bar", markup=False)
        yield Input(placeholder="Search: words of its id, splits, servers or text", compact=True, id="search")
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
            self._tasks = await self._table.menu()
        except ClientError as error:
            self.query_one("#prompt", Static).update(Text(error.message, "bold red"))
            return
        self._show("")

    @on(Input.Changed, "#search")
    def _searched(self, event: Input.Changed) -> None:
        self._show(event.value)

    def _show(self, words: str) -> None:
        asked = words.casefold().split()
        self._shown = [task for task in self._tasks if all(word in _searchable(task) for word in asked)]
        options = self.query_one("#tasks", OptionList)
        options.clear_options()
        options.add_options(Option(_line(task)) for task in self._shown)
        options.highlighted = 0 if self._shown else None
        if not self._shown:
            self.query_one("#prompt", Static).update(
                "No task has these words." if self._tasks else "There are no tasks."
            )

    @on(OptionList.OptionHighlighted, "#tasks")
    def _marked(self, event: OptionList.OptionHighlighted) -> None:
        if event.option_index < len(self._shown):
            self.query_one("#prompt", Static).update(_about(self._shown[event.option_index]))
            self.query_one("#text").scroll_home(animate=False)

    @on(OptionList.OptionSelected, "#tasks")
    def action_play(self) -> None:
        at = self.query_one("#tasks", OptionList).highlighted
        if at is None:
            return
        task = self._shown[at]
        if task.runnable:
            self.player.play(task.id)
        else:
            self.notify(
                clean("; ".join(task.missing)), title="Cannot run here", severity="error", markup=False
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


def _line(task: Task) -> Text:
    told = Text(task.id, no_wrap=True, overflow="ellipsis")
    return told if task.runnable else Text.assemble(("✗ ", "red"), (task.id, "dim"), no_wrap=True)


def _about(task: Task) -> Text:
    """Where it is from, what it needs, its text."""
    told = Text()
    told.append(f"{task.id}\n", "bold")
    tools = [*task.servers, *(f"local {name}" for name in task.local_tools)]
    facts = [f"suite {task.suite}", ", ".join(task.splits), ", ".join(tools), "network" * task.network]
    told.append(clean(" · ".join(fact for fact in facts if fact)) + "\n", "dim")
    if not task.runnable:
        told.append(clean(f"Cannot run here: {'; '.join(task.missing)}\n"), "bold red")
    told.append("\n" + clean(task.prompt or "").strip())
    return told
