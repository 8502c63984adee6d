"""Endpoints of models, which a program in namespaces can reach besides its episode."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import IPv4Address, ip_address
from typing import cast
from urllib.parse import urlsplit

import anyio
from anyio.abc import SocketListener, SocketStream

from decathlon_mcp.background import background_tasks
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.tunnels import relay
from decathlon_mcp.telemetry.logs import fields

log = logging.getLogger("decathlon.agents")

BASE_URL_ENDING = "_BASE_URL"
"""Of the names of variables from which SDKs read a model's address."""
KNOWN_URLS = {
    "claude": "https://api.anthropic.com",
    "codex": "https://api.openai.com",
    "gemini": "https://generativelanguage.googleapis.com",
}
"""Where programs find their model without such a variable."""
MAX_ENDPOINTS = 16
DIAL_SECONDS = 20.0
"""As for connections out of a sandbox."""
MAX_CONNECTIONS = 64
"""Of a program to one endpoint, at once. More wait in the listener's queue."""
NO_MODEL = "none"
ACCEPT_SECONDS = 0.5
"""Time until the next attempt to accept a connection, if one has failed."""
OWN_FAULTS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
"""Errors of a connection that a program can cause by making many: they say nothing about the endpoint."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint. `inside`: the address that leads to it in the namespaces, where the name has it too."""

    host: str
    port: int
    inside: str


def read_endpoints(urls: Sequence[str], program: str, environment: Mapping[str, str]) -> list[Endpoint]:
    """The endpoints of these URLs; without any, of the program's variables, or else of a known program.

    The only URL `none` is for a program without a model. Raises BadRequestError for a URL that cannot be
    reached from the namespaces, and without any URL.
    """
    if tuple(urls) == (NO_MODEL,):
        return []
    set_urls = [value for name, value in environment.items() if name.endswith(BASE_URL_ENDING) and value]
    chosen = urls or set_urls or ([KNOWN_URLS[program]] if program in KNOWN_URLS else [])
    if not chosen:
        raise BadRequestError(
            f"the program can reach no model: name its address with --model-url, or in a variable that ends "
            f"in {BASE_URL_ENDING}; --model-url {NO_MODEL} is for a program without a model"
        )
    places = dict.fromkeys(map(_read_url, chosen))
    if len(places) > MAX_ENDPOINTS:
        raise BadRequestError(f"a program can reach at most {MAX_ENDPOINTS} addresses, not {len(places)}")
    names = {host for host, _ in places if not _is_address(host)}
    # Each name has an address of its own, so that two of them can have the same port.
    inside = {name: str(IPv4Address("127.0.1.0") + number) for number, name in enumerate(sorted(names), 1)}
    inside["localhost"] = "127.0.0.1"
    return [Endpoint(host, port, inside.get(host, host)) for host, port in places]


def _read_url(url: str) -> tuple[str, int]:
    with suppress(ValueError):
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.hostname and ":" not in parts.hostname:
            return parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
    raise BadRequestError(
        f"--model-url {url}: expected http or https with a host name or an IPv4 address, such as "
        "https://models.example.org"
    )


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return ip_address(host).version == 4
    return False


def hosts_file(endpoints: Iterable[Endpoint]) -> bytes:
    """The content of /etc/hosts by which the names lead to the addresses inside."""
    lines = ["127.0.0.1\tlocalhost", "::1\tlocalhost"]
    lines += sorted({f"{each.inside}\t{each.host}" for each in endpoints if each.host != each.inside})
    return "".join(f"{line}\n" for line in dict.fromkeys(lines)).encode()


@dataclass(slots=True)
class Reached:
    """Which endpoints a program could connect to in one attempt, and why it could not to others."""

    _connected: set[Endpoint] = field(default_factory=set[Endpoint])
    _failed: dict[Endpoint, str] = field(default_factory=dict[Endpoint, str])

    @property
    def why_not(self) -> str:
        """Why an endpoint took no connection of the attempt; empty if each that was tried took one."""
        # A program that floods an endpoint which lives cannot say that there was none.
        return "; ".join(why for endpoint, why in self._failed.items() if endpoint not in self._connected)

    def add(self, endpoint: Endpoint, error: Exception | None = None) -> None:
        """Note a connection, or the error in its place."""
        if error is None:
            self._connected.add(endpoint)
        elif not OWN_FAULTS & set(_numbers(error)):
            why = str(error) or f"no answer within {DIAL_SECONDS:g} s"
            self._failed.setdefault(endpoint, f"{endpoint.host}:{endpoint.port}: {why}")


async def relay_connections(listener: socket.socket, endpoint: Endpoint, reached: Reached) -> None:
    """Connect what connects to the listener with the endpoint, MAX_CONNECTIONS at once, until cancelled."""
    places = anyio.Semaphore(MAX_CONNECTIONS)

    async def handle(client: SocketStream) -> None:
        async with client:
            try:
                with anyio.fail_after(DIAL_SECONDS):
                    target = await anyio.connect_tcp(endpoint.host, endpoint.port)
            except (OSError, TimeoutError) as error:
                # The program sees a closed connection.
                why = fields(host=endpoint.host, port=endpoint.port, why=str(error))
                log.warning("a program's model cannot be reached", extra=why)
                reached.add(endpoint, error)
            else:
                reached.add(endpoint)
                await relay(client, target)
        places.release()

    async with await SocketListener.from_socket(listener) as accepting, background_tasks() as tasks:
        while True:
            # Before a connection is accepted: waiting connections must not take the server's descriptors.
            await places.acquire()
            try:
                client = await accepting.accept()
            except OSError as error:
                # The server has none left. The error would end the attempt without a verdict.
                log.warning("a program's connection cannot be accepted", extra=fields(why=str(error)))
                places.release()
                await anyio.sleep(ACCEPT_SECONDS)
            else:
                tasks.start_soon(handle, client)


def _numbers(error: BaseException | None) -> Iterator[int]:
    """The numbers of the errors of an attempt to connect, which tries each address of a name."""
    while error is not None:
        if isinstance(error, BaseExceptionGroup):
            for each in cast("BaseExceptionGroup[BaseException]", error).exceptions:
                yield from _numbers(each)
        elif isinstance(error, OSError) and error.errno is not None:
            yield error.errno
        error = error.__cause__


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Variables for programs that reach nothing but the endpoints, and these without a proxy."""
    return {name: value for name, value in environment.items() if not name.lower().endswith("_proxy")}
