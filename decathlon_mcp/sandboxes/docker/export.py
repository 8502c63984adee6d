"""The contents of an image as one archive, for providers that use no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar, cast

from docker.errors import APIError

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.sandboxes.docker.container import remove_container
from decathlon_mcp.sandboxes.docker.engine import (
    REQUEST_SECONDS,
    Api,
    engine_message,
    raise_api_error,
)
from decathlon_mcp.sandboxes.docker.image import find_image
from decathlon_mcp.types import as_object

_CHUNK_BYTES = 1 << 20
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class ImageConfig:
    """What an image's configuration says about its processes. `user` is its USER, see `image.Image`."""

    name: str
    digest: str
    environment: dict[str, str]
    user: str
    working_folder: str


def export_image(api: Api, name: str, use: Callable[[ImageConfig, Iterator[bytes]], _T]) -> _T:
    """Give `use` the image's configuration, and its files as a plain tar in chunks; returns what it returns.

    The engine exports containers only, so one is created, never started, and removed. Raises ImageError,
    ProviderUnavailableError.
    """
    image = find_image(api, name)
    try:
        config = as_object(api.inspect_image(image.digest).get("Config")) or {}
        variables = [str(item).partition("=") for item in cast("list[object]", config.get("Env") or [])]
        described = ImageConfig(
            name,
            image.digest,
            {key: value for key, _, value in variables if key},
            image.user,
            str(config.get("WorkingDir") or ""),
        )
        # A command is required, and there may be none in the image.
        created = api.create_container_from_config({"Image": image.digest, "Cmd": ["none"]}, None)
        container = str(created["Id"])
        try:
            url = f"{api.base_url}/v{api.api_version}/containers/{container}/export"
            with api.get(url, params={}, timeout=REQUEST_SECONDS, stream=True) as response:
                raise_api_error(response)
                return use(described, response.iter_content(_CHUNK_BYTES))
        finally:
            remove_container(api, container)
    except APIError as error:
        raise ProviderUnavailableError(f"the engine refused: {engine_message(error)}") from error
