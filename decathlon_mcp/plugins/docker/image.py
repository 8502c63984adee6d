"""Images: finding them on the engine, and the user that their containers run as."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from docker.errors import APIError, DockerException, ImageNotFound
from requests.exceptions import RequestException

from decathlon_mcp.archives.reading import BrokenArchiveError, first_file
from decathlon_mcp.errors import DecathlonError, ImageError
from decathlon_mcp.plugins.docker.engine import Api, Engine, get_archive, log_refusal, regular_file
from decathlon_mcp.sandboxes.host.mounts import GROUP, PASSWD, TABLE_BYTES, find_user
from decathlon_mcp.types import as_object

STARTER_IMAGE = "decathlon-test:latest"
"""Image of the starter suite and of the tests. It is in no registry."""
IMAGE_SECONDS = 2.0
"""A name gets another image when it is built again. Containers opened at once share an inspection."""
_MAX_KNOWN = 1000
_images: WeakKeyDictionary[Api, dict[str, tuple[float, Image]]] = WeakKeyDictionary()
_ids_by_digest: dict[str, tuple[int, int]] = {}


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
    """The image of that name, as it was at most `IMAGE_SECONDS` ago.

    Raises ImageError if the image is not on the engine.
    """
    known = _images.setdefault(api, {})
    found = known.get(name)
    if found is None or found[0] < time.monotonic() - IMAGE_SECONDS:
        image = _inspect(api, name)
        if len(known) >= _MAX_KNOWN:
            known.clear()
        found = known[name] = (time.monotonic(), image)
    return found[1]


def images_on_engine(names: Iterable[str]) -> frozenset[str]:
    """The images that the engine has, of these; none if no engine answers. Blocks, for some 2 s at most."""
    try:
        with closing(Engine().new_api()) as api:
            return frozenset(name for name in names if _is_there(api, name))
    except (DecathlonError, DockerException, RequestException, OSError, ValueError):
        return frozenset()


def _is_there(api: Api, name: str) -> bool:
    try:
        _inspect(api, name)
    except ImageError:
        return False
    return True


def forget_image(api: Api, name: str) -> None:
    """Inspect the image again when it is needed next."""
    _images.get(api, {}).pop(name, None)


def _inspect(api: Api, name: str) -> Image:
    try:
        facts = api.inspect_image(name)
    except ImageNotFound:
        raise missing_image_error(name) from None
    except APIError as error:
        log_refusal(error)
        raise ImageError(
            f"the engine cannot inspect image {name}; the server's log has its reason", image=name
        ) from error
    config = as_object(facts.get("Config")) or {}
    return Image(name, str(facts.get("Id")), str(config.get("User") or ""), int(facts.get("Size") or 0))


def missing_image_error(name: str) -> ImageError:
    return ImageError(f"image {name} is not on this engine; {install_hint(name)}", image=name)


def install_hint(name: str) -> str:
    """How to get an image onto the engine."""
    command = "tests/image/build" if name == STARTER_IMAGE else f"docker pull {name}"
    return f"get it with: {command}"


def user_ids(api: Api, container: str, image: Image) -> tuple[int, int]:
    """The numeric user and group of a container's first process.

    Raises ImageError if the image's tables of users are no regular files.
    """
    # Once per image, since each look into a container takes the engine some 20 ms.
    ids = _ids_by_digest.get(image.digest)
    if ids is None:
        ids = _ids_by_digest[image.digest] = _find_ids(api, container, image)
    return ids


def _find_ids(api: Api, container: str, image: Image) -> tuple[int, int]:
    # Read from the container, as the engine does when it starts the process: USER may be a name. For a name
    # that is not there, the ids do not matter: the engine refuses to start the container.
    passwd, group = (_table(api, container, path, image) for path in (PASSWD, GROUP))
    if image.runs_as_root and ":" not in image.user:
        return 0, 0
    found = find_user(image.user, _content(api, container, passwd), _content(api, container, group))
    return found.user, found.group


def _table(api: Api, container: str, path: str, image: Image) -> str | None:
    """Where /etc/passwd or /etc/group is; None if there is none."""
    # The engine opens both when it starts a container. A pipe there blocks it, and after that every request
    # that concerns all containers.
    try:
        return regular_file(api, container, path)
    except ValueError as error:
        raise ImageError(f"image {image.name} cannot be started: {error}", image=image.name) from None


def _content(api: Api, container: str, table: str | None) -> bytes:
    """The beginning of a table; empty if there is none."""
    if table is None:
        return b""
    try:
        with closing(get_archive(api, container, table)) as chunks:
            return first_file(chunks, TABLE_BYTES)
    except (APIError, BrokenArchiveError):
        return b""
