"""What an image says of itself, and what to do about one that is not there."""

from __future__ import annotations

import io
import tarfile
from dataclasses import dataclass

from docker.errors import APIError, ImageNotFound

from decathlon_mcp.errors import ImageError
from decathlon_mcp.sandboxes.docker.engine import Api, archive_of, said_by
from decathlon_mcp.types import as_object

STARTER_IMAGE = "decathlon-test:latest"
"""The starter suite's image: that of the tests. No registry has it."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image on the engine. `user` is its Dockerfile's USER: a name, a number, with or without a group."""

    name: str
    identity: str
    user: str
    size_bytes: int

    @property
    def is_roots(self) -> bool:
        return self.user.partition(":")[0] in ("", "0", "root")


def find_image(api: Api, name: str, *, pull: bool) -> Image:
    """Raises ImageError for one that is not on the engine, or cannot be pulled where that is asked for."""
    try:
        try:
            found = api.inspect_image(name)
        except ImageNotFound:
            if not pull:
                raise missing(name) from None
            api.pull(name)
            found = api.inspect_image(name)
    except APIError as error:
        raise ImageError(
            f"there is no image {name}, and it cannot be pulled: {said_by(error)}", image=name
        ) from error
    config = as_object(found.get("Config")) or {}
    return Image(name, str(found.get("Id")), str(config.get("User") or ""), int(found.get("Size") or 0))


def missing(name: str) -> ImageError:
    return ImageError(f"there is no image {name} on this Docker engine; {how_to_get(name)}", image=name)


def how_to_get(name: str) -> str:
    command = "tests/image/build" if name == STARTER_IMAGE else f"docker pull {name}"
    return f"get it with: {command}"


def numbers_of(api: Api, container: str, image: Image) -> tuple[int, int]:
    """The user and the group that a container's first process runs as, in numbers."""
    if image.is_roots and ":" not in image.user:
        return 0, 0
    user, _, group = image.user.partition(":")
    passwd = _table(api, container, "/etc/passwd") if not (user.isdecimal() and group.isdecimal()) else []
    by_user = {row[at]: row for at in (2, 0) for row in passwd}
    known = by_user.get(user or "0", ["", "", "0", "0"])
    user_number = int(user) if user.isdecimal() else int(known[2])
    if not group:
        return user_number, int(known[3])
    if group.isdecimal():
        return user_number, int(group)
    groups = {row[0]: row for row in _table(api, container, "/etc/group")}
    return user_number, int(groups.get(group, known)[2])


def _table(api: Api, container: str, path: str) -> list[list[str]]:
    """A file of lines with fields between colons; no rows where there is none."""
    try:
        packed = b"".join(archive_of(api, container, path))
    except APIError:
        return []
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        file = tar.extractfile(tar.getmembers()[0])
        text = file.read(1 << 20).decode("utf-8", "replace") if file else ""
    rows = [line.split(":") for line in text.splitlines()]
    return [
        row
        for row in rows
        if len(row) >= 4 and row[2].isdecimal() and (row[3].isdecimal() or path != "/etc/passwd")
    ]
