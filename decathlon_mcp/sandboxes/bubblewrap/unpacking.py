"""Unpacks an image of an engine into a folder, once; after that, no engine is needed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from decathlon_mcp.archives.unpacking import unpack_root
from decathlon_mcp.errors import BadRequestError, ImageError
from decathlon_mcp.sandboxes.bubblewrap.image_folder import (
    CONFIG_FILE,
    CONFIG_VERSION,
    ROOT_FOLDER,
    SANDBOX_USER,
    ImageFolder,
)
from decathlon_mcp.sandboxes.docker.engine import Api, Engine
from decathlon_mcp.sandboxes.docker.export import ImageConfig, export_image

HOSTS = "127.0.0.1\tlocalhost\n::1\tlocalhost\n"
_UNFINISHED = f".{ROOT_FOLDER}"


async def unpack_image(engine: Engine, name: str, folder: Path) -> ImageFolder:
    """Unpack an image into a folder that is empty or missing.

    After an error, the folder is empty. Raises ImageError, ProviderUnavailableError, and BadRequestError for
    a folder that cannot be used.
    """

    def unpack(config: ImageConfig, chunks: Iterator[bytes]) -> ImageFolder:
        _unpack(config, chunks, folder)
        return ImageFolder.read(folder)

    def export(api: Api) -> ImageFolder:
        _prepare(folder)
        return export_image(api, name, unpack)

    try:
        return await engine.run(export)
    finally:
        await engine.aclose()


def _prepare(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadRequestError(f"{folder} is not empty: give an empty folder, or one that does not exist")
    except OSError as error:
        raise BadRequestError(f"{folder} cannot be used: {error.strerror}") from None


def _unpack(config: ImageConfig, chunks: Iterator[bytes], folder: Path) -> None:
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
    file.write_text(HOSTS, "ascii")
    file.chmod(0o644)
    if owner is not None:
        os.chown(file, *owner)
