"""`doctor --unpack`: an image of a Docker engine in a folder, for the provider `host`."""

from __future__ import annotations

import sys
from pathlib import Path

from decathlon_mcp.plugins.docker import unpacking
from decathlon_mcp.plugins.docker.engine import Engine


async def unpack_image(image: str, folder: Path) -> int:
    """Write the image into the folder, and print how to use it. Raises DecathlonError."""
    unpacked = await unpacking.unpack_image(Engine(), image, folder)
    sys.stdout.write(
        f"{image} ({unpacked.digest}) is unpacked in {folder}; use it with --provider host --image {folder}\n"
    )
    return 0
