"""One Docker engine: its API in threads of its own, and what to say when it does not answer.

It is found by DOCKER_HOST as the `docker` command finds it (contexts are not read), over a unix socket or
plain TCP. TLS and ssh are refused: their attached streams have no descriptor that could be handed on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar, cast

import anyio
import docker
from anyio import CapacityLimiter, to_thread
from docker.errors import APIError, DockerException, create_api_error_from_http_exception
from docker.utils import kwargs_from_env
from requests import Response
from requests.exceptions import HTTPError, RequestException

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.types import JsonObject

CONNECT_SECONDS = 2.0
REQUEST_SECONDS = 60.0
THREADS = 32
POOL_SIZE = 2 * THREADS
"""Connections kept: above the number of threads, or the SDK throws some away after each use."""

_CHUNK_BYTES = 1 << 18
_DEFAULT_HOST = "unix:///var/run/docker.sock"
_T = TypeVar("_T")


class Api(Protocol):
    """What is used of `docker.APIClient`, with types."""

    timeout: float
    base_url: str

    @property
    def api_version(self) -> str: ...
    def close(self) -> None: ...
    def version(self) -> JsonObject: ...
    def info(self) -> JsonObject: ...
    def inspect_container(self, container: str) -> JsonObject: ...
    def inspect_image(self, image: str) -> JsonObject: ...
    def inspect_network(self, net_id: str) -> JsonObject: ...
    def networks(self, names: Sequence[str], *, filters: Mapping[str, Any]) -> list[JsonObject]: ...
    def create_network(
        self, name: str, *, driver: str, options: Mapping[str, str], labels: Mapping[str, str]
    ) -> JsonObject: ...
    def remove_network(self, net_id: str) -> None: ...
    def pull(self, repository: str) -> str: ...
    def create_container_from_config(self, config: JsonObject, name: str) -> JsonObject: ...
    def attach_socket(self, container: str, params: Mapping[str, int]) -> Any: ...
    def start(self, container: str) -> None: ...
    def pause(self, container: str) -> None: ...
    def wait(self, container: str, timeout: float, condition: str) -> JsonObject: ...
    def remove_container(self, container: str, *, v: bool, force: bool) -> None: ...
    def containers(self, *, all: bool, filters: Mapping[str, Any]) -> list[JsonObject]: ...  # noqa: A002
    def put(
        self, url: str, *, params: Mapping[str, str], timeout: float, data: bytes | Iterator[bytes]
    ) -> Response: ...
    def get(self, url: str, *, params: Mapping[str, str], timeout: float, stream: bool) -> Response: ...
    def head(self, url: str, *, params: Mapping[str, str], timeout: float) -> Response: ...
    def events(self, *, filters: Mapping[str, Any], decode: bool) -> EventStream: ...


class EventStream(Protocol):
    """What `docker.APIClient.events` gives: an iterator that another thread may close."""

    def __iter__(self) -> Iterator[JsonObject]: ...
    def close(self) -> None: ...


def archive_of(api: Api, container: str, path: str) -> Generator[bytes]:
    """What is at a path, as a tar in chunks. Closed early, it lets go of the engine at once: the SDK's own
    `get_archive` does not, and until it does the container cannot be removed.

    Raises APIError before the first chunk.
    """
    with api.get(
        _archive_url(api, container), params={"path": path}, timeout=REQUEST_SECONDS, stream=True
    ) as response:
        raise_for(response)
        yield from response.iter_content(_CHUNK_BYTES)


def is_folder(api: Api, container: str, path: str) -> bool:
    """Is there a folder, or a link to one, at a path? False too where the container is gone."""
    url = _archive_url(api, container)
    return api.head(url, params={"path": f"{path}/."}, timeout=REQUEST_SECONDS).ok


def put_archive(api: Api, container: str, path: str, data: bytes | Iterator[bytes]) -> None:
    """Unpack a tar into the folder at a path; no folder takes the place of a file, nor a file of a folder.

    Raises APIError.
    """
    params = {"path": path, "noOverwriteDirNonDir": "1"}
    raise_for(api.put(_archive_url(api, container), params=params, timeout=REQUEST_SECONDS, data=data))


def _archive_url(api: Api, container: str) -> str:
    return f"{api.base_url}/v{api.api_version}/containers/{container}/archive"


def raise_for(response: Response) -> None:
    try:
        response.raise_for_status()
    except HTTPError as error:
        create_api_error_from_http_exception(error)


class Engine:
    """Asks one engine. Connects when first asked, and anew when asked again after that failed."""

    def __init__(self) -> None:
        self.where = os.environ.get("DOCKER_HOST") or _DEFAULT_HOST
        self._threads = CapacityLimiter(THREADS)
        self._connecting = anyio.Lock()
        self._api: Api | None = None
        self._failures: list[ProviderUnavailableError] = []
        self.connected = anyio.Event()
        """Set once it has answered."""

    async def api(self) -> Api:
        """The engine's API. Raises ProviderUnavailableError within 3 s, however many ask at once."""
        before = len(self._failures)
        async with self._connecting:
            if self._api is None:
                if len(self._failures) > before:
                    raise ProviderUnavailableError(self._failures[-1].message, **self._failures[-1].data)
                try:
                    self._api = await self._connect()
                except ProviderUnavailableError as error:
                    self._failures.append(error)
                    raise
                self.connected.set()
            return self._api

    async def run(self, call: Callable[[Api], _T], *, abandon: bool = False) -> _T:
        """The result of `call`, made in a thread; once begun, it is waited for unless it may be abandoned.

        Raises what the SDK raises where the engine said no (APIError), else ProviderUnavailableError.
        """
        api = await self.api()
        try:
            return await to_thread.run_sync(call, api, limiter=self._threads, abandon_on_cancel=abandon)
        except APIError:
            raise
        except (RequestException, DockerException) as error:
            raise self._unavailable(error) from error

    async def aclose(self) -> None:
        if self._api is not None:
            await to_thread.run_sync(self._api.close)
            self._api = None

    async def _connect(self) -> Api:
        with anyio.move_on_after(CONNECT_SECONDS):
            try:
                return await to_thread.run_sync(self._new_api, limiter=self._threads, abandon_on_cancel=True)
            except (DockerException, OSError, ValueError) as error:
                raise self._unavailable(error) from error
        raise self._unavailable(TimeoutError(f"nothing within {CONNECT_SECONDS:g} s"))

    def _new_api(self) -> Api:
        how = cast("dict[str, Any]", kwargs_from_env())
        if how.get("tls") or self.where.startswith(("ssh:", "https:", "npipe:")):
            cure = "run the server on the engine's machine, or forward its socket"
            raise ProviderUnavailableError(
                f"engines are reached over unix sockets and plain TCP, not over TLS or ssh as {self.where} "
                f"is; {cure}",
                where=self.where,
                cure=cure,
            )
        if self.where.startswith("unix://"):
            _try_socket(self.where.removeprefix("unix://"))
        api = cast("Api", docker.APIClient(**how, version="auto", timeout=2, max_pool_size=POOL_SIZE))
        api.timeout = REQUEST_SECONDS
        return api

    def _unavailable(self, error: Exception) -> ProviderUnavailableError:
        reason = _root_of(error)
        cure = "start one (on Debian: apt-get install docker.io), or say where it is with DOCKER_HOST"
        if isinstance(reason, PermissionError):
            cure = "this user may not use it: join the group docker, or run as root"
        said = getattr(reason, "strerror", None) or str(reason)
        return ProviderUnavailableError(
            f"no Docker engine answers at {self.where} ({' '.join(said.split())[:300]}); {cure}",
            where=self.where,
            cure=cure,
        )


def _try_socket(path: str) -> None:
    """The SDK leaves its socket open when it cannot connect it. Raises OSError."""
    with socket.socket(socket.AF_UNIX) as trial:
        trial.settimeout(2)
        trial.connect(path)


def said_by(error: APIError) -> str:
    """The engine's own words, on one line."""
    explanation = cast("object", error.explanation)
    return " ".join(str(explanation or error).split())[:1000]


def _root_of(error: BaseException) -> BaseException:
    """The system's own error that lies below the layers of the HTTP library, else `error`."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            return inner
        inner = inner.__cause__ or inner.__context__
    return error
