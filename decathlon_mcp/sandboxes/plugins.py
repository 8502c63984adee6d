"""Providers of other packages: found by entry points, created with options from the settings.

A package that registers a `ProviderPlugin` in the entry-point group `decathlon_mcp.providers` adds a provider
that `--provider NAME` selects, where NAME is the entry point's name. Its code is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from pathlib import Path

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.sandboxes.base import Provider
from decathlon_mcp.settings import BUILT_IN_PROVIDERS, PROVIDER_GROUP, provider_entry_points

BUNDLED: Mapping[str, str] = {
    "podman": "decathlon_mcp.sandboxes.podman:PLUGIN",
    "prime": "decathlon_mcp.sandboxes.prime.provider:PLUGIN",
}
"""Plugins of this package, by name. Not entry points, so that they work from a folder of sources too."""


@dataclass(frozen=True, slots=True)
class ProviderContext:
    """What a server gives to a provider that it creates.

    `owner` is the label of its sandboxes. `folder`, for the provider's own files, is the same for all servers
    on one state folder; it may not exist yet. `max_opening` bounds how many sandboxes are opened at the same
    time. `options` has the values of `--provider-option`; only declared ones.
    """

    owner: str
    folder: Path
    max_opening: int = 4
    options: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True)
class ProviderPlugin:
    """A provider that another package adds.

    `create` makes the provider of one server; it may raise SettingsError for an option's value. The
    provider's `name` is the entry point's. `options` describes the options that it takes, by name.
    """

    create: Callable[[ProviderContext], Provider]
    options: Mapping[str, str] = field(default_factory=dict[str, str])
    survives: bool = True
    """Whether sandboxes can outlive their server (`SandboxSpec.survives`). Otherwise `reopen` is never used,
    and a server with this provider ends its episodes when it ends, as with `--survive-seconds 0`."""
    reopen_seconds: int = 0
    """For how long, at least, a stream that was lost is opened again, whatever `--survive-seconds` says: for
    services whose streams break while the sandbox runs. Then every sandbox has `SandboxSpec.survives`."""
    without_network: str = ""
    """Why no sandbox has a network, if that is so: the end of a sentence. Tasks that need one cannot run."""


def load_plugin(name: str) -> ProviderPlugin:
    """The plugin of that name. Raises SettingsError if there is none, or if it cannot be used."""
    if name in BUNDLED:
        entry_point = EntryPoint(name, BUNDLED[name], PROVIDER_GROUP)
    else:
        found = [entry_point for entry_point in provider_entry_points() if entry_point.name == name]
        if not found:
            names = {
                *BUILT_IN_PROVIDERS,
                *BUNDLED,
                *(entry_point.name for entry_point in provider_entry_points()),
            }
            raise SettingsError(
                f"--provider {name}: there is no such provider, only {', '.join(sorted(names))}; "
                "install the package that has it where decathlon-mcp is installed"
            )
        # A package that is installed twice, as in a folder of sources, has the same entry point twice.
        if len({entry_point.value for entry_point in found}) > 1:
            values = ", ".join(sorted(entry_point.value for entry_point in found))
            raise SettingsError(f"--provider {name} is ambiguous: {values}; uninstall one of the packages")
        entry_point = found[0]
    try:
        plugin = entry_point.load()
    except Exception as error:  # whatever the module raises when it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise SettingsError(f"--provider {name}: {entry_point.value} cannot be loaded ({reason})") from error
    if not isinstance(plugin, ProviderPlugin):
        raise SettingsError(
            f"--provider {name}: {entry_point.value} is a {type(plugin).__name__}, and not a ProviderPlugin"
        )
    return plugin


def parse_options(name: str, plugin: ProviderPlugin, given: Sequence[str]) -> dict[str, str]:
    """The options given as NAME=VALUE. Raises SettingsError for one that the plugin does not take."""
    options: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"--provider-option {text}: expected NAME=VALUE")
        if key not in plugin.options:
            known = "; ".join(f"{option}: {what}" for option, what in plugin.options.items())
            raise SettingsError(
                f"--provider-option {key}: the provider {name} takes "
                + (f"these options: {known}" if known else "no options")
            )
        if key in options:
            raise SettingsError(f"--provider-option {key} is given twice")
        options[key] = value
    return options


def create_from_plugin(name: str, context: ProviderContext, given: Sequence[str]) -> Provider:
    """The provider of that name; `given` are its options as NAME=VALUE. Raises SettingsError."""
    plugin = load_plugin(name)
    options = parse_options(name, plugin, given)
    provider = plugin.create(ProviderContext(context.owner, context.folder, context.max_opening, options))
    # A store of episodes knows a sandbox's provider by this name.
    if provider.name != name:
        raise SettingsError(
            f"--provider {name}: its provider is named {provider.name}, which must be the same"
        )
    return provider
