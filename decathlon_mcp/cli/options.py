"""Settings as command-line flags, environment variables and `decathlon.toml`, in that order of precedence.

The file uses the names of the settings model (`max_sandboxes = 8`) and of `serve`'s own options.

Compared 2026-11-28 with the command line of pydantic-settings 2.16.3 over the same models, and not taken: its
argparse suggests no similar option, its errors do not say whether a flag, a variable or the file had the
value, a variable with several values must be JSON, the help has no headings within a model, no shell
completes it, and importing it takes four times as long. What is here is what cyclopts lacks: the file, and
which settings a command's help lists.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Awaitable, Callable, Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import anyio
from cyclopts import App, ArgumentCollection, CycloptsError, Group, Parameter
from cyclopts.config import Dict, Env
from pydantic import BaseModel, Field, create_model

from decathlon_mcp.catalogue.draws import TaskFilter
from decathlon_mcp.cli.usage import check_label_texts, check_names, check_not_empty, check_port
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.hooks import CORE, providers
from decathlon_mcp.settings import PathSetting, PluginSettings, Settings, plugin_settings
from decathlon_mcp.validation import did_you_mean

PREFIX = "DECATHLON_"
DEFAULT_FILE = Path("decathlon.toml")
DEFAULT_HOST, DEFAULT_PORT = "127.0.0.1", 8765
"""Where `serve` listens by default."""
SERVE_NAMES = ("host", "port", "public_url", "allowed_host", "allowed_origin", "ready_file")
"""Options of `serve` alone; the file and the variables may set them too."""
CLIENT_NAMES = ("url", "token")
"""Variables that only commands which connect to a server read."""

DELIMITER = "--"
"""Between the words of `run` and the command line of a program."""

Flag = Annotated[bool, Parameter(negative=(), show_default=False)]
EPILOGUE = (
    "Settings can also be environment variables (DECATHLON_MAX_SANDBOXES=8) or lines of decathlon.toml "
    "(max_sandboxes = 8). Flags take precedence over variables, and variables over the file."
)
"""For commands that take settings."""
ADDRESS = Group("Address", sort_key=1)
MORE = Group("More", sort_key=4)
"""Options that few people set. Only `--help-all` lists them, and the filters by pass rate."""
PLAYER_SECONDS = 3600.0
"""Limit on an attempt of an agent's program: between Toolathlon's runners' limits, 2,400 and 5,400 s."""

Host = Annotated[str, Parameter(group=ADDRESS, validator=check_not_empty)]
Port = Annotated[int, Parameter(group=ADDRESS, validator=check_port)]
HostNames = Annotated[
    tuple[str, ...], Parameter(group=ADDRESS, negative=(), show_default=False, validator=check_names)
]
Handles = Annotated[Flag, Parameter(help="Print whole handles. Each gives access to its episode.")]

StateFolder = Annotated[
    Path | None, Parameter(metavar="DIR", help="The servers' state folder. [the default one]")
]

SECTIONS: dict[str, tuple[str, ...]] = {
    "Tasks": ("suite", "names", "language", "results", "reward"),
    "Sandboxes": (
        *("provider", "provider_option", "kernel", "isolation", "image", "network", "servers"),
        *("merge_pages", "memory_mib", "cpus", "pids", "workspace_mib"),
    ),
    "Limits": (*("max_calls", "max_sandboxes", "max_opening", "max_queue", "max_body_mib", "min_free_mib"),),
    "Time limits (seconds)": (
        *("idle_seconds", "first_use_seconds", "grace_seconds", "episode_seconds", "servers_seconds"),
        *("set_up_seconds", "evaluation_seconds", "drain_seconds", "survive_seconds"),
    ),
    "Files and logs": (*("config", "state", "hand_over", "tokens", "log_level", "log_format"),),
}
"""The settings of the core, by the heading of the help, where settings of plug-ins follow."""
COMMON_SETTINGS = (
    *("suite", "names", "language"),
    *("provider", "isolation", "image", "network", "web"),
    *("max_calls", "max_sandboxes", "idle_seconds", "episode_seconds"),
    *("config", "state", "tokens", "keep"),
)
"""The settings that people set: twenty with `serve`'s address. Settings of plug-ins may be missing."""
BASIC_SETTINGS = ("suite", "provider", "image", "network", "max_sandboxes", "state")
"""The settings that people set for a command that runs no server for clients."""
UNITS = {
    "seconds": "SECONDS",
    "mib": "MIB",
    "suite": "PATH",
    "image": "IMAGE",
    "provider": "NAME",
    "option": "NAME=VALUE",
}
"""Metavars of settings, by the last word of the name."""

_Model = TypeVar("_Model", bound=BaseModel)


class _WithFile(Settings):
    config: PathSetting | None = Field(
        None, description="Settings file. [decathlon.toml in this folder, if it exists]"
    )


def _plugin_settings() -> tuple[type[PluginSettings], ...]:
    """The settings of plug-ins; none if one is broken, as every command says."""
    try:
        return plugin_settings()
    except SettingsError:
        return ()


def settings_model(
    name: str, shown: Collection[str] = (), *, like: str = "", heading: Group | None = None
) -> type[_WithFile]:
    """The settings of a command, each with its heading in the help, which lists settings in `shown`, or all.

    `like`: the command whose choice of plug-ins' settings is listed too. `heading`: one for all settings.
    What is not listed works as well.
    """
    sections, listed, parts = dict(SECTIONS), {*shown}, _plugin_settings()
    for part in parts:
        sections[part.section] = (*sections[part.section], *part.model_fields)
        listed.update(part.listed_by.get(like, ()))
    groups = {
        name: Group(section, sort_key=number)
        for number, (section, names) in enumerate(sections.items(), 10)
        for name in names
    }
    # The fields of the last base come first.
    model = cast("type[_WithFile]", create_model(name, __base__=(*reversed(parts), _WithFile)))

    def parameter(key: str) -> Parameter:
        return Parameter(
            group=heading or groups[key],
            negative=(),
            env_var_split=_split,
            show=not shown or key in listed,
            show_default=shown_default,
            metavar=UNITS.get(key.rpartition("_")[2]),
        )

    return _options(model, name, parameter)


def _options(model: type[_Model], name: str, parameter: Callable[[str], Parameter]) -> type[_Model]:
    """A model whose fields are options of a command, with the `parameter` of each name."""
    fields: dict[str, Any] = {}
    for key, field in model.model_fields.items():
        kind = _provider_type() if key == "provider" else field.annotation
        fields[key] = (Annotated[(kind, *field.metadata, parameter(key))], field)
    return create_model(name, __base__=model, **fields)


def _provider_type() -> Any:
    """The names of the providers there are, for the help and for completion; any other is refused later."""
    try:
        names = sorted(providers())
    except SettingsError:  # a plug-in is broken, as every use of a provider says
        names = sorted(CORE.providers)
    return Literal[tuple(names)] | str | None


def _split(kind: object, value: str, **_: object) -> list[str]:
    """Split the variable of a setting with several values, such as `DECATHLON_SUITE`, as PATH is split."""
    return value.split(os.pathsep) if kind == tuple[str, ...] else [value]


def shown_default(value: object) -> str | None:
    """A default as a user would type it; None for a default that the help leaves out."""
    if isinstance(value, tuple):
        return " ".join(str(item) for item in cast("tuple[object, ...]", value)) or None
    if isinstance(value, Path) and value.is_relative_to(Path.home()):
        return f"~/{value.relative_to(Path.home())}"
    if value is None or value is False:
        return None
    return f"{value:g}" if isinstance(value, float) else str(value)


FILTERS, RATE_FILTERS = Group("Filters", sort_key=3), Group("Filters by pass rate", sort_key=4)
METAVARS = {"split": "NAME", "needs": "WORD", "without": "WORD", "search": "TEXT"}
"""Metavars of the filters that need no pass rates."""

Labels = Annotated[
    tuple[str, ...],
    Parameter(
        name="--label",
        metavar="NAME=VALUE",
        negative=(),
        env_var=(),
        show_default=False,
        validator=check_label_texts,
        help="A label of the episode, such as `run=a`; reports show it. Can be repeated.",
    ),
]

LabelFilter = Annotated[Labels, Parameter(help="List every episode with this label. Can be repeated.")]
FilterOptions = _options(
    TaskFilter,
    "FilterOptions",
    lambda key: Parameter(
        group=FILTERS if key in METAVARS else RATE_FILTERS,
        negative=(),
        show_default=False,
        metavar=METAVARS.get(key),
        consume_multiple=False,
    ),
)
Filters = Annotated[FilterOptions, Parameter(name="*")]
NO_FILTERS = FilterOptions.model_validate({})

SANDBOX_SETTINGS = ("suite", "provider", "provider_option", "kernel", "isolation", "image", "state", "config")
"""Settings of every command that opens sandboxes."""

ServerOptions = settings_model("ServerOptions")
PlayOptions = settings_model("PlayOptions", SANDBOX_SETTINGS)

ServerSettings = Annotated[ServerOptions, Parameter(name="*")]
PlaySettings = Annotated[PlayOptions, Parameter(name="*")]
"""The types of the commands' `settings`."""

SERVER_DEFAULTS = ServerOptions.model_validate({})
PLAY_DEFAULTS = PlayOptions.model_validate({})


def _known_names() -> set[str]:
    return {*ServerOptions.model_fields, *SERVE_NAMES}


def _from_variables(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Set what flags left unset, from environment variables."""
    # `DECATHLON_URL` is for the client, which reads it. An entry of `install` does not depend on it, and in
    # `recordings prune` it would be a pattern.
    used = ArgumentCollection([argument for argument in arguments if "--url" not in argument.names])
    Env(PREFIX, command=False, show=False)(app, commands, used)


def _from_file(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Set what flags and variables left unset, from the file. Raises CycloptsError."""
    config = next((argument for argument in arguments if "--config" in argument.names), None)
    if config is None:
        return
    given_path = config.tokens[0].value if config.tokens else None
    path = Path(given_path) if given_path else DEFAULT_FILE
    if given_path is None and not path.is_file():
        return
    values = _read_file(path)
    # The file is shared by all commands, and each takes only some of the settings.
    accepted = {name.lstrip("-").replace("-", "_") for argument in arguments for name in argument.names}
    used = {name: value for name, value in values.items() if name in accepted and name != "config"}
    Dict(used, source=str(path), use_commands_as_keys=False)(app, commands, arguments)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CycloptsError(msg=f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CycloptsError(msg=f"{path}: not a text file (UTF-8)") from None
    except tomllib.TOMLDecodeError as error:
        raise CycloptsError(msg=f"{path}: not TOML: {error}") from None
    for name, value in values.items():
        if isinstance(value, dict) and name not in _known_names():
            raise CycloptsError(msg=f"{path}: settings have no sections: remove the line [{name}]")
        if name not in _known_names():
            hint = did_you_mean(name, sorted(_known_names()))
            raise CycloptsError(msg=f"{path}: there is no setting {name!r}{hint}")
        if isinstance(value, dict):
            raise CycloptsError(msg=f"{path}: {name}: a value was expected, not a table")
    return values


def unknown_variables(options: Collection[str] = ()) -> dict[str, str]:
    """The environment variables that start like a setting but are not one, sorted; each with the similar one.

    `options`: further options that variables can set. The similar one is empty if there is none.
    """
    known = {name.upper().replace("-", "_") for name in (*_known_names(), *CLIENT_NAMES, *options)}
    names = sorted(name.removeprefix(PREFIX) for name in os.environ if name.startswith(PREFIX))
    # Compared without the prefix, which would make all of them similar.
    return {
        PREFIX + name: "".join(
            PREFIX + near for near in difflib.get_close_matches(name, known, n=1, cutoff=0.7)
        )
        for name in names
        if name not in known
    }


def describe_unknown_variables(unknown: Mapping[str, str]) -> str:
    """One line about variables that are set, but are not settings."""
    return ", ".join(f"{name} (did you mean {near}?)" if near else name for name, near in unknown.items())


SOURCES = (_from_variables, _from_file)
"""Where cyclopts takes values from after the flags, in this order."""


def names_server(url: str | None, settings: Settings) -> bool:
    """Whether to connect to a server: at `url`, or at `DECATHLON_URL` if no suite is named."""
    return url is not None or ("DECATHLON_URL" in os.environ and "suite" not in settings.model_fields_set)


def run_async(command: Callable[..., Awaitable[int]], *arguments: Any) -> int:
    """Run a command in an event loop; uvloop if it is installed."""
    try:
        import uvloop as _  # noqa: F401
    except ModuleNotFoundError:
        return anyio.run(command, *arguments)
    return anyio.run(command, *arguments, backend_options={"use_uvloop": True})
