"""The help of a command: short enough for a screen with `--help`, whole with `--help-all`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Annotated, get_type_hints

from cyclopts import App, Group, Parameter
from cyclopts.help import DefaultFormatter, HelpEntry, HelpPanel, InlineText
from rich.markdown import Markdown

from decathlon_mcp.cli.options import (
    BASIC_SETTINGS,
    COMMON_SETTINGS,
    EPILOGUE,
    MORE,
    RATE_FILTERS,
    settings_model,
)

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

SETTINGS = Group("Settings", sort_key=10)
"""The one heading of a command's settings in a short help."""
SERVERS = frozenset({"serve", "stdio", "serve-episode"})
"""Commands whose help lists the settings of a server."""
LISTED_BY_HELP_ALL = frozenset({MORE.name, RATE_FILTERS.name})
"""Headings that are left out of a short help."""
_SENTENCE = re.compile(r".+?(?<!e\.g)\.(?=\s|$)", re.DOTALL)


class ShortFormatter(DefaultFormatter):
    """Prints the first sentence about each option, and leaves some headings out."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        if str(panel.title) not in LISTED_BY_HELP_ALL:
            super().__call__(console, options, panel.copy(entries=[*map(_shortened, panel.entries)]))


def _shortened(entry: HelpEntry) -> HelpEntry:
    description = entry.description
    if not isinstance(description, InlineText) or not isinstance(description.primary_renderable, Markdown):
        return entry
    sentence = _SENTENCE.match(description.primary_renderable.markup)
    return entry if sentence is None else entry.copy(description=InlineText(Markdown(sentence[0])))


def prepare_help(app: App, words: Sequence[str], *, whole: bool) -> None:
    """Write the usage of the command that is called by `words`, and choose what its help lists.

    `whole`: list every option with its whole description.
    """
    chain, (*_, command), _ = app.parse_commands(words)
    if not chain or (function := command.default_command) is None:
        return
    command.help = None  # the whole docstring, and not only its first line
    if "settings" in get_type_hints(function):
        command.help_epilogue = EPILOGUE
        if not whole:
            command.help_epilogue = "`--help-all` lists every option, and says more about each."
            command.help_formatter = ShortFormatter()
            names = COMMON_SETTINGS if chain[0] in SERVERS else BASIC_SETTINGS
            _shorten_settings(command, function, names)
    # Cyclopts 5 shows every optional argument as `[ARGS]`.
    arguments: list[str] = []
    options = ["[OPTIONS]"]
    for argument in command.assemble_argument_collection(parse_docstring=False):
        label = argument.name
        if argument.index is None:
            if argument.required:
                options.insert(-1, f"{label} {argument.parameter.metavar or label.lstrip('-').upper()}")
            continue
        if argument.field_info.kind is argument.field_info.VAR_POSITIONAL:
            label += "..."
        arguments.append(label if argument.required else f"[{label}]")
    command.usage = " ".join(("Usage: decathlon-mcp", *chain, *arguments, *options))


def _shorten_settings(command: App, function: Callable[..., object], names: Collection[str]) -> None:
    """List no other settings in the help of a command and its function, and these under one heading."""
    listed = {
        argument.name.lstrip("-").replace("-", "_")
        for argument in command.assemble_argument_collection(parse_docstring=False)
        if argument.show
    }
    hints = get_type_hints(function, include_extras=True)
    common = settings_model("CommonOptions", listed.intersection(names), heading=SETTINGS)
    hints["settings"] = Annotated[common, Parameter(name="*")]
    function.__annotations__ = hints
