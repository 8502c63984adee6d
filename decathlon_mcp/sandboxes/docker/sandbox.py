"""One sandbox that is a container: files by the engine's archives, the cause of its end by its events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import TypeVar

import anyio
from docker.errors import APIError, NotFound

from decathlon_mcp.archives.archive import folders, owned
from decathlon_mcp.archives.packing import nothing, save
from decathlon_mcp.errors import BadRequestError, ProviderUnavailableError, SandboxLostError
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.sandboxes.docker.container import Container
from decathlon_mcp.sandboxes.docker.engine import Api, Engine, archive_of, is_folder, put_archive, said_by
from decathlon_mcp.sandboxes.docker.events import ContainerExit
from decathlon_mcp.sandboxes.docker.stream import AttachedStream

CAUSE_SECONDS = 2.0
FREEZE_AGAIN_SECONDS = (0.05, 0.2, 0.5, 1.0, 2.0)
"""A busy kernel (cgroup v1) may not get to stop all processes in the time that runc gives it."""
_SCRATCH = PurePosixPath("/tmp")
_CONFLICT = 409
_NO_FOLDER = ("not a directory", "too many links", "too many levels of symbolic links")
"""What an engine says of a path at which there is none."""
_T = TypeVar("_T")


class DockerSandbox:
    """See `base.Sandbox`."""

    def __init__(
        self, engine: Engine, container: Container, stream: AttachedStream, container_exit: ContainerExit
    ) -> None:
        self._engine = engine
        self._container = container
        self._fate = container_exit
        self._gone = False
        self.stream = stream

    @property
    def spec(self) -> SandboxSpec:
        return self._container.spec

    @property
    def root(self) -> PurePosixPath:
        return self.spec.root

    @property
    def log_tail(self) -> str:
        return str(self.stream.tail)

    @property
    def out_of_memory(self) -> bool:
        return self._fate.out_of_memory

    @property
    def image_digest(self) -> str | None:
        return self._container.image_digest

    async def put(self, folder: PurePosixPath, archive: Path | bytes) -> None:
        _check(folder)
        user, group = self._container.user

        def put(api: Api) -> None:
            identity = self._container.identity
            try:
                _make(api, identity, folder, user, group)
                put_archive(api, identity, str(folder), self._while_open(owned(archive, user, group)))
            except APIError as error:
                # "not a directory", "cannot overwrite non-directory ... with directory", and the reverse
                if "directory" not in said_by(error):
                    raise
                raise BadRequestError(f"cannot unpack into {folder}: {said_by(error)}") from error

        await self._ask(put)

    async def get(self, folder: PurePosixPath, archive: Path, limit_bytes: int) -> None:
        _check(folder)

        def get(api: Api) -> None:
            identity = self._container.identity
            try:
                # With the dot, members are named from the folder on; a link in its place is followed, inside.
                with closing(archive_of(api, identity, f"{folder}/.")) as chunks:
                    save(self._while_open(chunks), archive, limit_bytes)
            except APIError as error:
                if not isinstance(error, NotFound) and not any(
                    fault in said_by(error) for fault in _NO_FOLDER
                ):
                    raise
                api.inspect_container(identity)  # a sandbox that is gone must not pass for an empty folder
                save(nothing(), archive, limit_bytes)

        await self._ask(get)

    async def pause(self) -> None:
        def pause(api: Api) -> bool:
            try:
                api.pause(self._container.identity)
            except APIError as error:
                if "unable to freeze" in said_by(error):
                    return False
                if error.status_code != _CONFLICT or "already paused" not in said_by(error):
                    raise
            return True

        for seconds in FREEZE_AGAIN_SECONDS:
            if await self._ask(pause):
                return
            await anyio.sleep(seconds)
        raise ProviderUnavailableError("the engine could not stop what runs in a sandbox")

    async def cause_of_end(self) -> str | None:
        if self.stream.line.ended.is_set():
            with anyio.move_on_after(CAUSE_SECONDS):
                await self._fate.ended.wait()
        return self._fate.cause

    def close(self) -> None:
        """From now on it is gone."""
        self._gone = True

    def _while_open(self, chunks: Iterable[bytes]) -> Iterator[bytes]:
        """A transfer that goes on behind a sandbox's end would hold up the container's removal."""
        for chunk in chunks:
            if self._gone:
                raise SandboxLostError("the sandbox was closed")
            yield chunk

    async def _ask(self, call: Callable[[Api], _T]) -> _T:
        if self._gone:
            raise SandboxLostError("the sandbox has been closed")
        try:
            return await self._engine.run(call, abandon=True)
        except APIError as error:
            said = said_by(error)
            if isinstance(error, NotFound) or self._fate.ended.is_set() or "is not running" in said:
                cause = self._fate.cause
                raise SandboxLostError(
                    f"the sandbox is gone{f' ({cause})' if cause else ''}: {said}", cause=cause
                ) from error
            raise ProviderUnavailableError(f"the engine refused: {said}") from error


def _check(folder: PurePosixPath) -> None:
    if not folder.is_absolute() or ".." in folder.parts or folder.is_relative_to(_SCRATCH):
        # An archive does not see into a mounted /tmp: it would land beneath it, unseen.
        raise BadRequestError(f"files go in and out of folders by an absolute path not below /tmp: {folder}")


def _make(api: Api, identity: str, folder: PurePosixPath, user: int, group: int) -> None:
    """Make a folder with its parents, where it is missing."""
    names: list[str] = []
    existing = folder
    while existing.name and not is_folder(api, identity, str(existing)):
        names.insert(0, existing.name)
        existing = existing.parent
    if names:
        chain = ["/".join(names[: count + 1]) for count in range(len(names))]
        put_archive(api, identity, str(existing), folders(chain, user, group))
