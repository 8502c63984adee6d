"""Providers by their names: what each says of itself, and its creation with the options of a server.

Each is a `ProviderPlugin` that `hooks.py` finds, whether it is the core's or a plug-in's, and of which the
code is imported when its name is used. Nothing else knows a provider by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.hooks import load, providers
from decathlon_mcp.sandboxes.base import Provider
from decathlon_mcp.sandboxes.bubblewrap.image_folder import UNPACK, is_image_folder
from decathlon_mcp.sandboxes.inventory import Inventory
from decathlon_mcp.settings import Settings
from decathlon_mcp.validation import find_problems

FOLDERS = "providers"
"""In the state folder: the folders of the plug-ins' providers, by name."""
ImageKind = Literal["none", "name", "folder"]


class NoOptions(BaseModel):
    """The options of a provider that takes none."""

    model_config = ConfigDict(extra="forbid")


Options = TypeVar("Options", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class ProviderContext(Generic[Options]):
    """What a server gives to a provider that it creates.

    `owner` is the label of its sandboxes. `folder`, for the provider's own files, is the same for all servers
    on one state folder; it may not exist yet. `options` has the values of `--provider-option`.
    """

    owner: str
    folder: Path
    options: Options
    settings: Settings

    @property
    def max_opening(self) -> int:
        """How many sandboxes may be opened at the same time."""
        return self.settings.max_opening


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What the sandboxes of a server have, as far as that is known before one is opened.

    `without_network`: why no sandbox has a network, if that is so: the end of a sentence. Tasks that need one
    cannot run. `shared_network`: what to do, if sandboxes with a network share this machine's, its loopback
    interface included; empty if they do not, and without isolation, where an agent needs no network to do
    anything here. `varying_root`: whether every sandbox has another root.
    """

    without_network: str = ""
    shared_network: str = ""
    varying_root: bool = False


def _plain_offer(context: ProviderContext[Any]) -> Offer:
    return Offer()


@dataclass(frozen=True, slots=True)
class ProviderPlugin:
    """What there is to know of a provider without creating it.

    `create` makes the provider of one server; it may raise SettingsError for an option's value. The
    provider's `name` is the one by which it was found.
    """

    create: Callable[[ProviderContext[Any]], Provider]
    options: type[BaseModel] = NoOptions
    """The options that it takes: a model whose fields have descriptions. Their values come as text."""
    image: ImageKind = "name"
    """What its sandboxes need: the name of an image, the folder of an unpacked one, or none, where they have
    this machine's programs."""
    inventory: Callable[[Path], AbstractAsyncContextManager[Inventory]] | None = None
    """Opens the list of what dead servers on a state folder have left. Raises ProviderUnavailableError, or
    SettingsError, if nobody can tell. Without it, the next server finds what they left, and `gc` does not."""
    is_remote: bool = True
    """Whether what they left is elsewhere than in the state folder; then `gc` asks only if a server on it has
    used the provider."""
    survives: bool = True
    """Whether sandboxes can outlive their server (`SandboxSpec.survives`). Otherwise `reopen` is never used,
    and a server with this provider ends its episodes when it ends, as with `--survive-seconds 0`."""
    reopen_seconds: int = 0
    """For how long, at least, a stream that was lost is opened again, whatever `--survive-seconds` says: for
    services whose streams break while the sandbox runs. Then every sandbox has `SandboxSpec.survives`."""
    snapshots: bool = False
    """Whether its sandboxes can be saved (`sandboxes.snapshots`)."""
    offer: Callable[[ProviderContext[Any]], Offer] = _plain_offer
    """Raises SettingsError and ProviderUnavailableError. Blocks for some 100 ms at most."""
    service_images: Callable[[frozenset[str]], frozenset[str]] | None = None
    """Which of these images of services it can run beside sandboxes; None if it runs no services."""
    begin: Callable[[ProviderContext[Any]], None] | None = None
    """Called when a server begins, before it opens anything. Raises SettingsError."""
    others: Callable[[ProviderContext[Any]], Sequence[Provider]] | None = None
    """Providers of the same name that servers with other settings had. They open nothing and are not entered:
    the server sweeps them too."""


def default_provider(image: str | None, *, is_starter: bool) -> str:
    """The provider of a suite if none is set. No engine can have an image that is a folder."""
    if is_starter:
        return "local"
    return "bubblewrap" if is_image_folder(image) else "docker"


def load_provider(name: str) -> ProviderPlugin:
    """The provider of that name. Raises SettingsError if there is none, or if it cannot be used."""
    parts = providers()
    if name not in parts:
        raise SettingsError(
            f"--provider {name}: there is no such provider, only {', '.join(sorted(parts))}; "
            "install the package that has it where decathlon-mcp is installed"
        )
    try:
        provider = load(parts[name])
    except Exception as error:  # whatever the module raises when it is imported
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise SettingsError(f"--provider {name}: {parts[name]} cannot be loaded ({reason})") from error
    if not isinstance(provider, ProviderPlugin):
        raise SettingsError(
            f"--provider {name}: {parts[name]} is a {type(provider).__name__}, and not a ProviderPlugin"
        )
    return provider


def parse_options(name: str, given: Sequence[str]) -> BaseModel:
    """The options given as NAME=VALUE. Raises SettingsError for one that the provider does not take."""
    model = load_provider(name).options
    values: dict[str, str] = {}
    for text in given:
        key, equals, value = text.partition("=")
        if not equals:
            raise SettingsError(f"--provider-option {text}: expected NAME=VALUE")
        if key not in model.model_fields:
            raise SettingsError(
                f"--provider-option {key}: the provider {name} takes {_described(model) or 'no options'}"
            )
        if key in values:
            raise SettingsError(f"--provider-option {key} is given twice")
        values[key] = value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        problems = find_problems(error, values, TypeAdapter(model))
    for problem in problems:
        if problem.field in model.model_fields and problem.field not in values:
            raise SettingsError(
                f"--provider {name} needs --provider-option {problem.field}=VALUE: "
                f"{model.model_fields[problem.field].description or 'an option'}"
            )
    raise SettingsError("; ".join(f"--provider-option {one.field}: {one.message}" for one in problems))


def _described(model: type[BaseModel]) -> str:
    options = [f"{name}: {field.description or 'an option'}" for name, field in model.model_fields.items()]
    return f"these options: {'; '.join(options)}" if options else ""


def context_of(name: str, owner: str, settings: Settings) -> ProviderContext[Any]:
    """What the provider of that name is created from. Raises SettingsError."""
    options = parse_options(name, settings.provider_option if name == settings.provider else ())
    return ProviderContext(owner, provider_folder(settings.state, name), options, settings)


def provider_folder(state: Path, name: str) -> Path:
    """The folder of a provider in a state folder."""
    return state / FOLDERS / name


def create_provider(name: str, owner: str, settings: Settings) -> Provider:
    """A provider that labels its sandboxes with `owner`. Raises SettingsError."""
    provider = load_provider(name).create(context_of(name, owner, settings))
    # A store of episodes knows a sandbox's provider by this name.
    if provider.name != name:
        raise SettingsError(
            f"--provider {name}: its provider is named {provider.name}, which must be the same"
        )
    return provider


def offer_of(name: str, settings: Settings) -> Offer:
    """What sandboxes of that provider have on a server with these settings. Raises as `offer`."""
    return load_provider(name).offer(context_of(name, "", settings))


def image_of(name: str, image: str | None, own: str | None) -> str | None:
    """The image of a provider's sandboxes: `image` as set, or the suite's `own`; None if it has none.

    Raises SettingsError if that is no image for this provider.
    """
    kind = load_provider(name).image
    if kind == "none":
        return None
    if kind == "name":
        if is_image_folder(image):
            raise SettingsError(
                f"--image {image} is a folder, and --provider {name} takes the name of an image"
            )
        return image or own
    if image is not None and not is_image_folder(image):
        raise SettingsError(f"--image {image} is no folder: {UNPACK}, a path with / or ./ before it")
    return image and str(Path(image).expanduser().absolute())


def saving_providers() -> str:
    """The options that choose a provider whose sandboxes can be saved: the end of a sentence."""
    return " or ".join(f"--provider {name}" for name in _saving()) or "another provider"


def _saving() -> Iterator[str]:
    for name in sorted(providers()):
        try:
            provider = load_provider(name)
        except SettingsError:
            continue  # of a package that is not complete
        if provider.snapshots:
            yield name
