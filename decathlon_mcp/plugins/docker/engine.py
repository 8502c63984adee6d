"""The connection to one Docker engine.

The engine is found by DOCKER_HOST, as the `docker` command finds it (contexts are not read), over a unix
socket or plain TCP, unless an address is given.
"""

# TLS and ssh are refused: their attached streams have no descriptor of their own that could be duplicated.

from __future__ import annotations

import base64
import json
import logging
import os
import socket
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast
from urllib.parse import urlsplit

import anyio
import docker
from anyio import CapacityLimiter, to_thread
from docker.errors import APIError, DockerException, create_api_error_from_http_exception
from docker.utils import kwargs_from_env, version_gte
from requests import Response
from requests.exceptions import HTTPError, RequestException, Timeout

from decathlon_mcp.errors import ProviderUnavailableError
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_object

CONNECT_SECONDS = 2.0
"""`Provider.open` reports a missing engine within 3 s."""
REQUEST_SECONDS = 60.0
"""How long an engine may be silent within a request: it answers late while hundreds of containers end."""
RESTART_SECONDS = 60.0
"""How long an engine may take to restart, for sandboxes that survive."""
KEEPING_API_VERSION = "1.44"
"""Docker's API from 25.0.0 on."""
THREADS = 32
POOL_SIZE = 2 * THREADS
"""HTTP connections kept open. With fewer than threads, the SDK closes connections after use."""

_CHUNK_BYTES = 1 << 18
_PATH_STAT_HEADER = "X-Docker-Container-Path-Stat"
# Of Go's os.FileMode: folder, link, device, pipe, socket, character device, irregular.
FOLDER_BIT = 1 << 31
_FILE_TYPE_BITS = FOLDER_BIT | 1 << 27 | 1 << 26 | 1 << 25 | 1 << 24 | 1 << 21 | 1 << 19
_DEFAULT_HOST = "unix:///var/run/docker.sock"
_T = TypeVar("_T")

_log = logging.getLogger(__name__)
# At level `debug`, it logs each look at its configuration.
logging.getLogger("docker").setLevel(logging.WARNING)


class Api(Protocol):
    """The part of `docker.APIClient` that is used, with types."""

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
    def create_container_from_config(self, config: JsonObject, name: str | None) -> JsonObject: ...
    def attach_socket(self, container: str, params: Mapping[str, int]) -> Any: ...
    def start(self, container: str) -> None: ...
    def pause(self, container: str) -> None: ...
    def stats(self, container: str, *, stream: bool, one_shot: bool) -> JsonObject: ...
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
    """Result of `docker.APIClient.events`: an iterator that another thread may close."""

    def __iter__(self) -> Iterator[JsonObject]: ...
    def close(self) -> None: ...


def engine_address() -> str:
    """The engine's address, in the form of DOCKER_HOST."""
    return os.environ.get("DOCKER_HOST") or _DEFAULT_HOST


def get_archive(api: Api, container: str, path: str) -> Generator[bytes]:
    """A tar of a path in a container, in chunks. Raises APIError before the first chunk."""
    # Not the SDK's own `get_archive`: when its generator is closed early it keeps the connection, and until
    # the engine notices, the container cannot be removed.
    with api.get(
        _archive_url(api, container), params={"path": path}, timeout=REQUEST_SECONDS, stream=True
    ) as response:
        raise_api_error(response)
        yield from response.iter_content(_CHUNK_BYTES)


def check_readable(api: Api, container: str) -> None:
    """Raise APIError if the engine cannot read the files of a container at all, or if it is gone."""
    # The root folder is the one path that nothing inside can change. The beginning of its archive tells more
    # than its status, for which the engine starts no process.
    with closing(get_archive(api, container, "/")) as chunks:
        next(chunks, b"")


def regular_file(api: Api, container: str, path: str) -> str | None:
    """Path of the regular file that a path in a container leads to, without symbolic links.

    None if nothing is there. Raises ValueError if something else than a regular file is.
    """
    path, mode = followed(api, container, path)
    if mode is not None and mode & _FILE_TYPE_BITS:
        raise ValueError(f"{path} is no regular file")
    return None if mode is None else path


def followed(api: Api, container: str, path: str) -> tuple[str, int | None]:
    """Where a path in a container leads to, without symbolic links, and the mode of what is there.

    The mode is Go's `os.FileMode`: see FOLDER_BIT. It is None if nothing is there, or the container is gone.
    """
    # The engine follows the links, within the container's own root.
    stat = _path_stat(api, container, path)
    if stat and stat.get("linkTarget"):
        path = str(stat["linkTarget"])
        stat = _path_stat(api, container, path)
    mode = None if stat is None else stat.get("mode")
    return path, mode if mode is None or isinstance(mode, int) else -1


def _path_stat(api: Api, container: str, path: str) -> JsonObject | None:
    response = api.head(_archive_url(api, container), params={"path": path}, timeout=REQUEST_SECONDS)
    if not response.ok:
        return None
    try:
        return as_object(json.loads(base64.b64decode(response.headers.get(_PATH_STAT_HEADER, ""))))
    except ValueError:
        return None


def put_archive(api: Api, container: str, path: str, data: bytes | Iterator[bytes]) -> None:
    """Unpack a tar into a folder of a container; never replaces a file by a folder or the reverse.

    Raises APIError.
    """
    params = {"path": path, "noOverwriteDirNonDir": "1"}
    raise_api_error(api.put(_archive_url(api, container), params=params, timeout=REQUEST_SECONDS, data=data))


def _archive_url(api: Api, container: str) -> str:
    return f"{api.base_url}/v{api.api_version}/containers/{container}/archive"


def live_restore_keeps_auto_remove(api: Api) -> bool:
    """Whether this engine, started again with live-restore, keeps running containers with `AutoRemove`."""
    # moby #46857, in all engines from 25.0.0 on. Before, such containers were removed.
    return version_gte(api.api_version, KEEPING_API_VERSION)


def raise_api_error(response: Response) -> None:
    """Raise APIError if the response is an error."""
    try:
        response.raise_for_status()
    except HTTPError as error:
        create_api_error_from_http_exception(error)


@dataclass(frozen=True, slots=True)
class NoAnswerTexts:
    """The texts of the error if no engine answers."""

    message: str
    """The error's first words, before the engine's address."""
    cure: str
    """What to do."""
    cure_if_refused: str
    """What to do if this user may not open the engine's socket."""


NO_DOCKER = NoAnswerTexts(
    "no Docker engine answers at",
    "start one (on Debian: apt-get install docker.io), or set DOCKER_HOST to its address",
    "this user may not use it: join the group docker, or run as root",
)


class Engine:
    """Sends requests to one engine. Connects at the first request, and tries again after a failure.

    `address` as in DOCKER_HOST, which is the default. `api_version` is asked from the engine unless it is
    given. `no_answer`: the texts of the error if no engine answers.
    """

    def __init__(
        self, address: str | None = None, *, api_version: str = "auto", no_answer: NoAnswerTexts = NO_DOCKER
    ) -> None:
        self.address = address or engine_address()
        self._api_version = api_version
        self._no_answer = no_answer
        self._threads = CapacityLimiter(THREADS)
        self._connecting = anyio.Lock()
        self._api: Api | None = None
        self._failure: ProviderUnavailableError | None = None
        self._failed_at = 0.0
        self.connected = anyio.Event()
        """Set at the first successful connection."""

    async def api(self) -> Api:
        """The connected API. Raises ProviderUnavailableError within 3 s, however many callers wait."""
        asked_at = anyio.current_time()
        async with self._connecting:
            if self._api is None:
                # Callers that waited for a failed attempt share its result; they do not try one by one.
                if self._failure is not None and self._failed_at > asked_at:
                    raise ProviderUnavailableError(self._failure.message, **self._failure.data)
                try:
                    self._api = await self._connect()
                except ProviderUnavailableError as error:
                    self._failure, self._failed_at = error, anyio.current_time()
                    raise
                self.connected.set()
            return self._api

    async def run(
        self, call: Callable[[Api], _T], *, abandon: bool = False, limiter: CapacityLimiter | None = None
    ) -> _T:
        """Make `call` in a thread. With `abandon`, cancellation does not wait for it to return.

        `limiter` replaces the limit on threads that all other calls share.
        Raises APIError if the engine refuses, ProviderUnavailableError if it does not answer.
        """
        api = await self.api()

        def request() -> _T:
            try:
                self.try_to_connect()
            except OSError as error:
                raise self._unavailable(error) from error
            return call(api)

        try:
            return await to_thread.run_sync(
                request, limiter=limiter or self._threads, abandon_on_cancel=abandon
            )
        except APIError:
            raise
        except (RequestException, DockerException, ConnectionRefusedError, FileNotFoundError) as error:
            raise self._unavailable(error) from error

    async def wait_for_restart(self, error: ProviderUnavailableError, deadline: float) -> None:
        """Wait until an engine answers again that had answered before `error`.

        Raises `error` if the engine has refused, or at the `deadline` by the event loop's clock.
        """
        while not isinstance(error.__cause__, APIError) and anyio.current_time() < deadline:
            with suppress(OSError):
                return await to_thread.run_sync(self.try_to_connect, limiter=self._threads)
            await anyio.sleep(0.2)
        raise error

    async def aclose(self) -> None:
        if self._api is not None:
            await to_thread.run_sync(self._api.close)
            self._api = None

    async def _connect(self) -> Api:
        with anyio.move_on_after(CONNECT_SECONDS):
            try:
                return await to_thread.run_sync(self.new_api, limiter=self._threads, abandon_on_cancel=True)
            except (DockerException, OSError, ValueError) as error:
                raise self._unavailable(error) from error
        raise self._unavailable(TimeoutError(f"no answer within {CONNECT_SECONDS:g} s"))

    def new_api(self) -> Api:
        """A connection of its own, made in this thread. Raises what `docker` raises, OSError, ValueError."""
        options = cast(
            "dict[str, Any]", kwargs_from_env(environment={**os.environ, "DOCKER_HOST": self.address})
        )
        if options.get("tls") or self.address.startswith(("ssh:", "https:", "npipe:")):
            cure = "run the server on the engine's machine, or forward its socket"
            raise ProviderUnavailableError(
                f"Docker engines over TLS or ssh ({self.address}) are not supported, only unix sockets and "
                f"plain TCP; {cure}",
                where=self.address,
                cure=cure,
            )
        self.try_to_connect()
        client = docker.APIClient(**options, version=self._api_version, timeout=2, max_pool_size=POOL_SIZE)
        api = cast("Api", client)
        api.timeout = REQUEST_SECONDS
        return api

    def try_to_connect(self) -> None:
        """Connect to the engine and disconnect, which takes some 50 µs on this machine. Raises OSError."""
        # The SDK (docker 7.2) leaks its socket when it cannot connect, so this is tried before each request.
        if self.address.startswith("unix://"):
            with socket.socket(socket.AF_UNIX) as trial:
                trial.settimeout(2)
                trial.connect(self.address.removeprefix("unix://"))
            return
        where = urlsplit(self.address)
        if where.hostname is not None and where.port is not None:
            socket.create_connection((where.hostname, where.port), timeout=2).close()

    def _unavailable(self, error: Exception) -> ProviderUnavailableError:
        cause = _system_error(error)
        is_refused = isinstance(cause, PermissionError)
        cure = self._no_answer.cure_if_refused if is_refused else self._no_answer.cure
        reason = getattr(cause, "strerror", None)
        if reason is None and isinstance(cause, TimeoutError | Timeout):
            reason = "no answer in time"
        if reason is None:
            # What the HTTP library says may repeat what the engine has sent.
            _log.warning("The engine did not answer as expected", extra=fields(why=_line(str(cause))))
            reason = type(cause).__name__
        return ProviderUnavailableError(
            f"{self._no_answer.message} {self.address} ({reason}); {cure}",
            where=self.address,
            cure=cure,
        )


def engine_message(error: APIError) -> str:
    """The engine's own message, on one line. It may name paths of the engine's machine: not for clients."""
    explanation = cast("object", error.explanation)
    return _line(str(explanation or error))


def log_refusal(error: APIError) -> None:
    """Log the engine's own message, since clients only get a sentence of ours."""
    _log.warning(
        "The engine refused a request", extra=fields(status=error.status_code, why=engine_message(error))
    )


def refusal(
    error: APIError, what: str = "the engine refused a request", cure: str = ""
) -> ProviderUnavailableError:
    """The error for clients if the engine refuses. `what` happened; its reason is in the log only."""
    log_refusal(error)
    advice = f"; {cure}" if cure else ""
    return ProviderUnavailableError(
        f"{what} (status {error.status_code}; the server's log has its reason){advice}"
    )


def _line(text: str) -> str:
    return " ".join(text.split())[:1000]


def _system_error(error: BaseException) -> BaseException:
    """The operating system's error below the layers of the HTTP library, else `error`."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.errno is not None:
            return inner
        inner = inner.__cause__ or inner.__context__
    return error
