"""`image`: images in folders, for the provider `host`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import anyio
from cyclopts import App, Parameter

image = App(
    name="image",
    help="Unpack an image of a Docker engine into a folder, for `--provider host`.",
    sort_key=8,
)


def add_commands(app: App) -> None:
    app.command(image)


@image.command
def unpack(
    name: Annotated[str, Parameter(metavar="IMAGE")],
    folder: Annotated[Path, Parameter(metavar="DIR")],
    /,
) -> int:
    """Write an image's files and configuration into a folder.

    The engine is needed for this only. Run as root, the files are given to a user that belongs to nobody, as
    which sandboxes then run; otherwise they are yours. Use the folder with `--image DIR`.

    Parameters
    ----------
    name
        An image on the engine.
    folder
        A folder that is empty or missing.
    """
    return anyio.run(_unpack, name, folder.absolute())


async def _unpack(name: str, folder: Path) -> int:
    from decathlon_mcp.plugins.docker.engine import Engine
    from decathlon_mcp.plugins.docker.unpacking import unpack_image

    unpacked = await unpack_image(Engine(), name, folder)
    sys.stdout.write(
        f"{name} ({unpacked.digest}) is unpacked in {folder}; use it with --provider host --image {folder}\n"
    )
    return 0
