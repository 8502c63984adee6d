"""Images: finding them on the engine, and the user that their containers run as."""

from __future__ import annotations

from dataclasses import dataclass

from docker.errors import APIError, ImageNotFound

from decathlon_mcp.archives.reading import first_file
from decathlon_mcp.errors import ImageError
from decathlon_mcp.sandboxes.docker.engine import Api, engine_message, get_archive
from decathlon_mcp.types import as_object

STARTER_IMAGE = "decathlon-test:latest"
"""Image of the starter suite and of the tests. It is in no registry."""
_TABLE_BYTES = 1 << 20
"""How much of /etc/passwd or /etc/group is read."""


@dataclass(frozen=True, slots=True)
class Image:
    """An image on the engine. `user` is its Dockerfile's USER: a name or number, optionally with a group."""

    name: str
    digest: str
    user: str
    size_bytes: int

    @property
    def runs_as_root(self) -> bool:
        return self.user.partition(":")[0] in ("", "0", "root")


def find_image(api: Api, name: str) -> Image:
    """Raises ImageError if the image is not on the engine."""
    try:
        facts = api.inspect_image(name)
    except ImageNotFound:
        raise missing_image_error(name) from None
    except APIError as error:
        raise ImageError(f"cannot inspect image {name}: {engine_message(error)}", image=name) from error
    config = as_object(facts.get("Config")) or {}
    return Image(name, str(facts.get("Id")), str(config.get("User") or ""), int(facts.get("Size") or 0))


def missing_image_error(name: str) -> ImageError:
    return ImageError(f"image {name} is not on this engine; {install_hint(name)}", image=name)


def install_hint(name: str) -> str:
    """How to get an image onto the engine."""
    command = "tests/image/build" if name == STARTER_IMAGE else f"docker pull {name}"
    return f"get it with: {command}"


def user_ids(api: Api, container: str, image: Image) -> tuple[int, int]:
    """The numeric user and group of a container's first process."""
    if image.runs_as_root and ":" not in image.user:
        return 0, 0
    user, _, group = image.user.partition(":")
    # Read from the container, as the engine does when it starts the process: USER may be a name.
    passwd = _rows(api, container, "/etc/passwd") if not (user.isdecimal() and group.isdecimal()) else []
    by_user = {row[column]: row for column in (2, 0) for row in passwd}
    row = by_user.get(user or "0", ["", "", "0", "0"])
    user_id = int(user) if user.isdecimal() else int(row[2])
    if not group:
        return user_id, int(row[3])
    if group.isdecimal():
        return user_id, int(group)
    groups = {row[0]: row for row in _rows(api, container, "/etc/group")}
    return user_id, int(groups.get(group, row)[2])


def _rows(api: Api, container: str, path: str) -> list[list[str]]:
    """Valid lines of /etc/passwd or /etc/group, split at colons; none if there is no such file."""
    try:
        text = first_file(get_archive(api, container, path), _TABLE_BYTES).decode("utf-8", "replace")
    except APIError:
        return []
    rows = [line.split(":") for line in text.splitlines()]
    return [
        row
        for row in rows
        if len(row) >= 4 and row[2].isdecimal() and (row[3].isdecimal() or path != "/etc/passwd")
    ]
