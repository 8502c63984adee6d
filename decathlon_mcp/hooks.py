"""Hooks: the parts that a plug-in can add to the server, and the search for plug-ins.

An episode can do without any plug-in. A plug-in hangs on the hooks that are the fields of `Plugin`. The core
imports none of them: this module finds them, and without the folder `decathlon_mcp/plugins` there are just
fewer. `decathlon_mcp.plugins.PLUGINS` lists them; an entry point of the group `decathlon_mcp.plugins` names a
`Plugin` of another distribution.

They are imported at every start, their parts only when they are used: so parts are named as
"module:attribute", and a module that has a `Plugin` imports nothing but this module.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from decathlon_mcp.errors import SettingsError

GROUP = "decathlon_mcp.plugins"
_FOLDER = "decathlon_mcp.plugins"


@dataclass(frozen=True, slots=True)
class Command:
    """A command of the command line. Its module is imported when the command is used."""

    part: str
    """A function, or an `App` of further commands."""
    summary: str
    """What the list of commands says: the first line of the function's docstring."""
    runs_program: bool = False
    """Whether it sees the delimiter `--` among its words: behind it is the command line of a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What one plug-in adds. A part is named as "module:attribute"."""

    name: str
    providers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Sandbox backends by the name that `--provider` takes; each part is a `ProviderPlugin`."""
    image_provider: str = ""
    """Which of its providers runs a suite with an image of its own, where none is set. The first plug-in that
    has one decides; without any, it is the core's."""
    kernels: Mapping[str, str] = field(default_factory=dict[str, str])
    """Kernels for the sandboxes of the provider `host` by the name that `--kernel` takes; each part is a
    `NamespaceSandbox`."""
    driver: Mapping[str, str] = field(default_factory=dict[str, str])
    """Modules of the driver, by the names that they have in `decathlon_sandbox` inside of a sandbox. Each is
    named as "package:file"."""
    commands: Mapping[str, Command] = field(default_factory=dict[str, Command])
    """Commands by their names; `episode verdict` is a further command of the `App` that is `episode`."""
    settings: str = ""
    """Its own settings: a model, `settings.PluginSettings`, in a module that is cheap to import."""
    services: str = ""
    """A function that makes a context of the `EpisodeResource` of a task's services. It gets the factory of
    its sandboxes, the task, the episode's public id and, by name, `start_seconds`, the `records` of the
    episode's sandboxes, and `reattaches`: the services run, in sandboxes that `records` has from a dead
    server. It raises SetUpError and SandboxLostError."""
    web: str = ""
    """A function that makes the `episodes.extensions.Web` of a server, of its settings; None without it."""
    readiness: Sequence[str] = ()
    """Async generators of findings on a server's suites, before it serves. They get its catalogue, its
    sandbox factories by the name of their suite, and the names of suites whose sandboxes can be opened."""
    findings: Sequence[str] = ()
    """Functions that yield the findings of `doctor` about settings, which they get. They block."""
    task_notes: Sequence[str] = ()
    """Functions that make a note on a task for `tasks --check`: a text and members of its JSON, or None. They
    get the settings, the suite and the task; they block, and may raise SettingsError."""
    page: str = ""
    """A function that makes what people see of a server (`http.application.Page`) from its registry, state
    folder, tokens, host names and public URL."""
    routes: Sequence[str] = ()
    """Functions that make a route of `serve` (Starlette's `Route`, with a name) from its registry, tokens,
    `BodyReader`, public URL and, by name, whether it `has_page`."""
    lobby_tools: Sequence[str] = ()
    """Tools of the lobby, classes of `protocol.lobby_tools.LobbyTool`. A tool with the name of another tool
    is a subclass of it, with more arguments, and stands in its place."""
    spans: str = ""
    """A function that makes a context of a server's `events.Spans`, of its settings; None without them."""
    listeners: Sequence[str] = ()
    """Functions that make an `events.Listener` of one server, of its settings and catalogue."""
    columns: Sequence[str] = ()
    """Functions that make columns of an episode's row, for lists, of its members that are written."""
    background: Sequence[str] = ()
    """Functions that make what a server runs beside its episodes, an asynchronous function, of its settings
    and its `Store`; None without it. After a failure it is run again."""
    sandbox_source: str = ""
    """A function that makes the `SandboxSource` of a server, of its settings and its `Admission`, or None."""
    pass_rates: str = ""
    """A function that makes the `catalogue.pass_rates.LiveRates` of a server, of its store."""
    episodes: Sequence[str] = ()
    """Functions that make `EpisodeHooks` of one server, of its settings, its `RegistryOptions` and its
    sandbox factories; None without any. The first is around all others."""
    profiles: Sequence[str] = ()
    """Packages with a folder `profiles`: `NAME.yaml` is the profile of a kind of suites, and
    `splits/NAME.yaml`, which need not be there, lists its splits."""
    releases: Mapping[str, str] = field(default_factory=dict[str, str])
    """Functions that make the `Release` of a checkout, by the name of its profile; they block."""
    suites: Sequence[str] = ()
    """Functions that make the `SuiteHooks` of a suite, which they get; None without any."""


CORE = Plugin(
    name="core",
    providers={"host": "decathlon_mcp.sandboxes.host.plugin:PROVIDER"},
    profiles=("decathlon_mcp.suites",),
)
"""What the core itself has of what plug-ins add."""


@cache
def plugins() -> tuple[Plugin, ...]:
    """The core's own parts and all plug-ins, this package's first.

    Raises SettingsError for a broken plug-in.
    """
    found = {plugin.name: plugin for plugin in (CORE, *_built_in())}
    for entry_point in entry_points(group=GROUP):
        try:
            plugin = entry_point.load()
        except Exception as error:  # whatever the module raises when it is imported
            raise broken(entry_point.value, error) from error
        if not isinstance(plugin, Plugin):
            raise SettingsError(f"{entry_point.value} is a {type(plugin).__name__}, and not a Plugin")
        # A package that is installed twice, as in a folder of sources, has the same entry point twice.
        if found.setdefault(plugin.name, plugin) != plugin:
            raise SettingsError(f"there are two plug-ins named {plugin.name}; uninstall one of them")
    return tuple(found.values())


def providers() -> dict[str, str]:
    """The part of each provider, by its name. Raises SettingsError, also for a name that is used twice."""
    return _by_name("providers", (plugin.providers for plugin in plugins()))


def own_provider() -> str:
    """The name of the core's own provider."""
    (name,) = CORE.providers
    return name


def image_provider() -> str | None:
    """The provider of suites with an image of their own, where none is set; None without such a plug-in.

    Raises SettingsError as `plugins`.
    """
    return next((plugin.image_provider for plugin in plugins() if plugin.image_provider), None)


def kernels() -> dict[str, str]:
    """The part of each kernel, by its name. Raises as `providers`."""
    return _by_name("kernels", (plugin.kernels for plugin in plugins()))


def _by_name(what: str, parts: Iterable[Mapping[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, part in (pair for each in parts for pair in each.items()):
        if found.setdefault(name, part) != part:
            both = " and ".join(sorted((found[name], part)))  # in any folder's order
            raise SettingsError(f"there are two {what} named {name}, {both}: uninstall one package")
    return found


def load(part: str) -> Any:
    """A part of a plug-in, by its "module:attribute"."""
    module, _, attribute = part.partition(":")
    return getattr(importlib.import_module(module), attribute)


def broken(name: str, error: Exception) -> SettingsError:
    """The error message for a plug-in whose module raises an error."""
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
    return SettingsError(f"the plug-in {name} cannot be loaded ({reason})")


def _built_in() -> Iterator[Plugin]:
    try:
        folder = importlib.import_module(_FOLDER)
    except ModuleNotFoundError as error:
        if error.name != _FOLDER:
            raise
        return
    yield from folder.PLUGINS
