"""Unpacks an image of an engine into a folder, once; after that, no engine is needed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from docker.errors import APIError

from decathlon_mcp.archives.unpacking import unpack_root
from decathlon_mcp.errors import BadRequestError, ImageError, ProviderUnavailableError
from decathlon_mcp.plugins.docker.container import remove_container
from decathlon_mcp.plugins.docker.engine import (
    REQUEST_SECONDS,
    Api,
    Engine,
    engine_message,
    raise_api_error,
)
from decathlon_mcp.plugins.docker.image import find_image
from decathlon_mcp.sandboxes.host.image_folder import (
    CONFIG_FILE,
    CONFIG_VERSION,
    ROOT_FOLDER,
    SANDBOX_USER,
    ImageFolder,
)
from decathlon_mcp.sandboxes.host.mounts import HOSTS
from decathlon_mcp.types import as_object

_CHUNK_BYTES = 1 << 20
_UNFINISHED = f".{ROOT_FOLDER}"


@dataclass(frozen=True, slots=True)
class _ImageConfig:
    """What an image's configuration says about its processes. `user` is its USER, see `image.Image`."""

    name: str
    digest: str
    environment: dict[str, str]
    user: str
    working_folder: str


async def unpack_image(engine: Engine, name: str, folder: Path) -> ImageFolder:
    """Unpack an image into a folder that is empty or missing.

    After an error, the folder is empty. Raises ImageError, ProviderUnavailableError, and BadRequestError for
    a folder that cannot be used.
    """
    try:
        await engine.run(lambda api: _export(api, name, folder))
        return ImageFolder.read(folder)
    finally:
        await engine.aclose()


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadRequestError(f"{folder} is not empty: give an empty folder, or one that does not exist")
    except OSError as error:
        raise BadRequestError(f"{folder} cannot be used: {error.strerror}") from None


def _export(api: Api, name: str, folder: Path) -> None:
    """Unpack what the engine exports of an image: a plain tar of its files.

    The engine exports containers only, so one is created, never started, and removed.
    """
    _prepare(folder)
    image = find_image(api, name)
    try:
        config = as_object(api.inspect_image(image.digest).get("Config")) or {}
        variables = [str(item).partition("=") for item in cast("list[object]", config.get("Env") or [])]
        described = _ImageConfig(
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
                _unpack(described, response.iter_content(_CHUNK_BYTES), folder)
        finally:
            remove_container(api, container)
    except APIError as error:
        raise ProviderUnavailableError(f"the engine refused: {engine_message(error)}") from error


def _unpack(config: _ImageConfig, chunks: Iterator[bytes], folder: Path) -> None:
    owner = (SANDBOX_USER, SANDBOX_USER) if os.geteuid() == 0 else None
    new = folder / _UNFINISHED
    try:
        new.mkdir(mode=0o755)
        unpack_root(chunks, new, owner)
        _write_hosts(new, owner)
        new.rename(folder / ROOT_FOLDER)
        values = {
            "version": CONFIG_VERSION,
            "image": config.name,
            "digest": config.digest,
            "env": config.environment,
            "user": config.user,
            "workdir": config.working_folder,
        }
        # Last: without this file, the folder is no unpacked image.
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")
    except BaseException as error:
        for name in (_UNFINISHED, ROOT_FOLDER):
            shutil.rmtree(folder / name, ignore_errors=True)
        if isinstance(error, BadRequestError | OSError):
            raise ImageError(
                f"image {config.name} cannot be unpacked into {folder}: {error}", image=config.name
            ) from error
        raise


def _write_hosts(root: Path, owner: tuple[int, int] | None) -> None:
    """Write /etc/hosts, which is empty in an exported container, so that no sandbox needs one of its own."""
    file, etc = root / "etc" / "hosts", root / "etc"
    if etc.is_symlink() or not etc.is_dir() or file.is_symlink() or (file.exists() and not file.is_file()):
        return
    file.unlink(missing_ok=True)
    file.write_bytes(HOSTS)
    file.chmod(0o644)
    if owner is not None:
        os.chown(file, *owner)


async def unpack_for_host(image: str, folder: Path) -> int:
    """`doctor --unpack`: write an image into a folder, and print how to use it. Raises DecathlonError."""
    unpacked = await unpack_image(Engine(), image, folder)
    sys.stdout.write(
        f"{image} ({unpacked.digest}) is unpacked in {folder}; use it with --provider host --image {folder}\n"
    )
    return 0
