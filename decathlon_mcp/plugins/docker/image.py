"""Images: finding them on the engine, the user of their containers, and unpacking them into folders."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from weakref import WeakKeyDictionary

from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests.exceptions import RequestException

from decathlon_mcp.archives.reading import BrokenArchiveError, first_file
from decathlon_mcp.archives.unpacking import unpack_root
from decathlon_mcp.errors import BadRequestError, DecathlonError, ImageError, ProviderUnavailableError
from decathlon_mcp.plugins.docker.engine import (
    REQUEST_SECONDS,
    Api,
    Engine,
    engine_message,
    get_archive,
    log_refusal,
    raise_api_error,
    regular_file,
)
from decathlon_mcp.sandboxes.host.image_folder import (
    CONFIG_FILE,
    CONFIG_VERSION,
    ROOT_FOLDER,
    SANDBOX_USER,
    ImageFolder,
)
from decathlon_mcp.sandboxes.host.mounts import GROUP, HOSTS, PASSWD, TABLE_BYTES, find_user
from decathlon_mcp.types import as_object

STARTER_IMAGE = "decathlon-test:latest"
"""Image of the starter suite and of the tests. It is in no registry."""
IMAGE_SECONDS = 2.0
"""A name gets another image when it is built again. Containers opened at once share an inspection."""
_MAX_KNOWN = 1000
_CHUNK_BYTES = 1 << 20
_UNFINISHED = f".{ROOT_FOLDER}"
_images: WeakKeyDictionary[Api, dict[str, tuple[float, Image]]] = WeakKeyDictionary()
_ids_by_digest: dict[str, tuple[int, int]] = {}


@dataclass(frozen=True, slots=True)
class Image:
    """An image on the engine. `user` is its Dockerfile's USER: a name or number, optionally with a group."""

    name: str
    digest: str
    user: str
    size_bytes: int
    environment: Mapping[str, str]
    working_folder: str

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
    variables = [str(item).partition("=") for item in cast("list[object]", config.get("Env") or [])]
    return Image(
        name,
        str(facts.get("Id")),
        str(config.get("User") or ""),
        int(facts.get("Size") or 0),
        {key: value for key, _, value in variables if key},
        str(config.get("WorkingDir") or ""),
    )


def missing_image_error(name: str) -> ImageError:
    return ImageError(f"image {name} is not on this engine; {install_hint(name)}", image=name)


def install_hint(name: str) -> str:
    """How to get an image onto the engine."""
    command = "tests/image/build" if name == STARTER_IMAGE else f"docker pull {name}"
    return f"get it with: {command}"


def user_ids(api: Api, image: Image, labels: Mapping[str, str]) -> tuple[int, int]:
    """The numeric user and group of the first process of an image's containers.

    `labels`: of the sandbox that is opened, so that no sweep removes what is looked into. Raises ImageError
    if the image's tables of users are no regular files, APIError.
    """
    # Once per image, since each look into a container takes the engine some 20 ms. Never from a container
    # that has run, whose processes may have changed the tables.
    ids = _ids_by_digest.get(image.digest)
    if ids is None:
        with unstarted_container(api, image, labels) as container:
            ids = _ids_by_digest[image.digest] = _find_ids(api, container, image)
    return ids


@contextmanager
def unstarted_container(api: Api, image: Image, labels: Mapping[str, str]) -> Generator[str]:
    """Id of a container of an image that is never started: the engine shows the files of containers only."""
    # A command is required, and there may be none in the image.
    config = {"Image": image.digest, "Cmd": ["none"], "Labels": dict(labels)}
    container = str(api.create_container_from_config(config, None)["Id"])
    try:
        yield container
    finally:
        with suppress(NotFound):  # somebody prunes what does not run
            api.remove_container(container, v=True, force=True)


def _find_ids(api: Api, container: str, image: Image) -> tuple[int, int]:
    # As the engine does when it starts the process: USER may be a name. For a name that is not there, the ids
    # do not matter: the engine refuses to start the container.
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


async def unpack_for_host(image: str, folder: Path) -> int:
    """`doctor --unpack`: write an image into a folder, and print how to use it.

    The folder must be empty or missing, and is empty after an error. Raises ImageError,
    ProviderUnavailableError, and BadRequestError for a folder that cannot be used.
    """
    engine = Engine()
    try:
        await engine.run(lambda api: _export(api, image, folder))
    finally:
        await engine.aclose()
    sys.stdout.write(
        f"{image} ({ImageFolder.read(folder).digest}) is unpacked in {folder}; use it with --provider host "
        f"--image {folder}\n"
    )
    return 0


def _export(api: Api, name: str, folder: Path) -> None:
    """Unpack what the engine exports of an image: a plain tar of its files."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise BadRequestError(f"{folder} is not empty: give an empty folder, or one that does not exist")
    except OSError as error:
        raise BadRequestError(f"{folder} cannot be used: {error.strerror}") from None
    image = find_image(api, name)
    try:
        with unstarted_container(api, image, {}) as container:
            url = f"{api.base_url}/v{api.api_version}/containers/{container}/export"
            with api.get(url, params={}, timeout=REQUEST_SECONDS, stream=True) as response:
                raise_api_error(response)
                _unpack(image, response.iter_content(_CHUNK_BYTES), folder)
    except APIError as error:
        raise ProviderUnavailableError(f"the engine refused: {engine_message(error)}") from error


def _unpack(image: Image, chunks: Iterator[bytes], folder: Path) -> None:
    owner = (SANDBOX_USER, SANDBOX_USER) if os.geteuid() == 0 else None
    new = folder / _UNFINISHED
    try:
        new.mkdir(mode=0o755)
        unpack_root(chunks, new, owner)
        _write_hosts(new, owner)
        new.rename(folder / ROOT_FOLDER)
        values = {
            "version": CONFIG_VERSION,
            "image": image.name,
            "digest": image.digest,
            "env": image.environment,
            "user": image.user,
            "workdir": image.working_folder,
        }
        # Last: without this file, the folder is no unpacked image.
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")
    except BaseException as error:
        for name in (_UNFINISHED, ROOT_FOLDER):
            shutil.rmtree(folder / name, ignore_errors=True)
        if isinstance(error, BadRequestError | OSError):
            raise ImageError(
                f"image {image.name} cannot be unpacked into {folder}: {error}", image=image.name
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
