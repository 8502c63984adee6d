"""Providers by their names: their descriptions, and their creation with the options of a server.

Each is a `ProviderPlugin` that `hooks.py` finds, whether it is the core's or a plug-in's, and of which the
code is imported when its name is used. Nothing else knows a provider by its name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.hooks import image_provider, kernels, load, own_provider, providers
from decathlon_mcp.sandboxes.base import Provider
from decathlon_mcp.settings import Settings
from decathlon_mcp.validation import did_you_mean, find_problems

FOLDERS = "providers"
"""In the state folder: the folders of the plug-ins' providers, by name."""


class Inventory(Protocol):
    """What servers that may have died have left of one provider, for a command that opens no sandbox."""

    @property
    def name(self) -> str:
        """The provider's name."""
        ...

    async def sandboxes(self, owner: str) -> dict[str, bool]:
        """The sandboxes labelled with `owner`: whether the first process of each is alive, by name.

        Raises ProviderUnavailableError.
        """
        ...

    async def owners(self) -> set[str]:
        """The owners of what is in the state folder. Raises ProviderUnavailableError."""
        ...

    async def remove(self, owner: str) -> None:
        """Remove the sandboxes labelled with `owner`. Raises ProviderUnavailableError if some are left."""
        ...


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
    anything here. `varying_root`: whether every sandbox has another root. `has_own_zone`: whether the time
    zone is not this machine's.
    """

    without_network: str = ""
    shared_network: str = ""
    varying_root: bool = False
    has_own_zone: bool = True


def _plain_offer(context: ProviderContext[Any], image: str | None) -> Offer:
    return Offer()


def is_image_folder(image: str | None) -> bool:
    """Whether the setting `--image` names a folder: no name of an image on an engine begins like this."""
    return image is not None and image.startswith(("/", ".", "~"))


def _image_by_name(settings: Settings, own: str | None, is_starter: bool) -> str | None:
    """The name of an image: as set, or the suite's own."""
    if is_image_folder(settings.image):
        raise SettingsError(
            f"--image {settings.image} is a folder, and --provider {settings.provider} takes the name of an "
            "image"
        )
    return settings.image or own


@dataclass(frozen=True, slots=True)
class ProviderPlugin:
    """What there is to know of a provider without creating it."""

    create: Callable[[ProviderContext[Any]], Provider]
    """Makes the provider of one server, named as it was found. Raises SettingsError for an option's value."""
    options: type[BaseModel] = NoOptions
    """The options that it takes: a model whose fields have descriptions. Their values come as text."""
    image: Callable[[Settings, str | None, bool], str | None] = _image_by_name
    """The image of a suite's sandboxes, from the suite's own and whether it is a starter suite; None if they
    have this machine's files, or if it is not set. Raises SettingsError for an image that is not for the
    provider.
    """
    has_kernels: bool = False
    """Whether it takes the setting `--kernel`."""
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
    offer: Callable[[ProviderContext[Any], str | None], Offer] = _plain_offer
    """What sandboxes of this image, or without an image, have. Raises SettingsError and
    ProviderUnavailableError. Blocks for some 100 ms at most."""
    service_images: Callable[[frozenset[str]], frozenset[str]] | None = None
    """Which of these images of services it can run beside sandboxes; None if it runs no services."""
    begin: Callable[[ProviderContext[Any]], None] | None = None
    """Called when a server begins, before it opens anything. Raises SettingsError."""


def default_provider(settings: Settings, *, is_starter: bool) -> str:
    """The provider of a suite if none is set. No engine can have an image that is a folder."""
    is_here = is_starter or settings.kernel is not None or is_image_folder(settings.image)
    return own_provider() if is_here else image_provider() or own_provider()


def another_provider() -> str:
    """The option for a sandbox that the core's own provider cannot open: the end of a sentence."""
    name = image_provider()
    return f"--provider {name}" if name else "another provider (--provider)"


def load_provider(name: str) -> ProviderPlugin:
    """The provider of that name. Raises SettingsError if there is none, or if it cannot be used."""
    parts = providers()
    if name not in parts:
        raise SettingsError(
            f"--provider {name}: there is no such provider, only {', '.join(sorted(parts))}"
            f"{did_you_mean(name, parts) or '; install its package where decathlon-mcp is installed'}"
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
    """The options given as NAME=VALUE. Raises SettingsError for an option that the provider does not take."""
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
    # One that lacks something would fail in the middle of an episode.
    parts = sorted(part for part in vars(Provider) if not part.startswith("_"))
    if missing := [part for part in parts if not hasattr(provider, part)]:
        raise SettingsError(
            f"--provider {name}: its provider lacks {', '.join(missing)}: see `Provider` in "
            "decathlon_mcp.sandboxes.base"
        )
    return provider


def offer_of(name: str, settings: Settings, image: str | None) -> Offer:
    """What sandboxes of that provider and image have on a server with these settings. Raises as `offer`."""
    return load_provider(name).offer(context_of(name, "", settings), image)


def saving_options() -> str:
    """The options that choose sandboxes that can be saved: the end of a sentence."""
    names = [name for name, part in kernels().items() if load(part).can_be_saved]
    return " or ".join(f"--provider {own_provider()} --kernel {name}" for name in names) or "another provider"
