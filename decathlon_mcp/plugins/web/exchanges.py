"""Values that pass between the server, the addon, its sessions and the recordings.

Server and addon send each other JSON objects, one a line. The server writes to the addon's stdin, the addon
to its stdout. The first line from the server is a `Configuration`, the first one from the addon a `Ready`.
From then on the server sends requests, and the addon answers each with its `id`, not always in their order:

    {"id": N, "do": "open", ...}                             a `SessionSpec`
    {"id": N, "do": "connect", "session": ID, "port": N}     the session's next connection comes from there
    {"id": N, "do": "counts", "episode": ID}                 -> {"id": N, ...}: `EpisodeCounts`
    {"id": N, "do": "close", "episode": ID}                  as `counts`, and ends the episode's sessions

The proxy connects to public addresses and to named ones (`public_address`, `named_address`): it runs on the
server's machine, and must not lead to what listens there, or in the networks around it.

An answer is `{"id": N, ...}`, or `{"id": N, "error": STR}`. The addon ends with its stdin.
"""

from __future__ import annotations

import ipaddress
import operator
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from typing import Literal
from urllib.parse import urlsplit

Mode = Literal["record", "replay", "replay-or-record"]
Part = Literal["preprocess", "agent", "grader"]
"""Whose requests: each part of a recording answers its own sandbox only."""

MEBIBYTE = 1 << 20
MAX_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Headers:
    """HTTP headers in their order; a name can occur more than once."""

    items: tuple[tuple[str, str], ...] = ()

    def get(self, name: str) -> str:
        """The first value of a header, empty if there is none. Names are compared without case."""
        return next((value for key, value in self.items if key.lower() == name.lower()), "")


@dataclass(frozen=True, slots=True)
class WebRequest:
    """One request as the proxy received it; `url` names the site that it is sent to."""

    method: str
    url: str
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class WebResponse:
    """One response. What is recorded has no content encoding."""

    status: int
    reason: str = ""
    headers: Headers = field(default_factory=Headers)
    body: bytes = b""


@dataclass(frozen=True, slots=True)
class Counts:
    """How the requests of an episode were answered.

    `replayed`: from the recording. `recorded`: by the site, and stored. `passed`: by the site, and not
    stored, because the response was too large, a stream, or a temporary failure. `missed`: by an error,
    because the recording has no answer, or the site could not be reached.
    """

    replayed: int = 0
    recorded: int = 0
    passed: int = 0
    missed: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*map(operator.add, astuple(self), astuple(other)))

    @property
    def requests(self) -> int:
        """Their number."""
        return sum(astuple(self))


def decoded_body(body: bytes, encoding: str, max_bytes: int) -> bytes | None:
    """A body without its content encoding; None if it is longer than the limit, or cannot be decoded."""
    encoding = encoding.strip().lower()
    if not body or encoding in ("", "identity"):
        return body if len(body) <= max_bytes else None
    if encoding not in ("gzip", "x-gzip", "deflate"):
        return None
    # `deflate` should have zlib's header, but is sent without it too.
    raw_deflate = encoding == "deflate" and body[0] & 0x0F != zlib.DEFLATED
    decoded = b""
    try:
        while body:
            decoder = zlib.decompressobj(-zlib.MAX_WBITS if raw_deflate else zlib.MAX_WBITS | 32)
            decoded += decoder.decompress(body, max_bytes - len(decoded) + 1)
            if len(decoded) > max_bytes or not decoder.eof:
                return None
            body = decoder.unused_data.lstrip(b"\0")
    except zlib.error:
        return None
    return decoded


Listener = Literal["proxy", "http", "https"]


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the addon has to know of the server's settings."""

    addresses: Addresses
    max_response_bytes: int
    max_recording_bytes: int
    request_seconds: float = 120.0
    """How long a sandbox may take to send a request, and how long it may send nothing on a connection."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Where the proxy listens: for clients with a proxy setting, and for those that were led there by name.

    `authority` is the certificate of its authority (PEM).
    """

    listeners: Mapping[Listener, tuple[str, int]]
    authority: str


@dataclass(frozen=True, slots=True)
class SessionSpec:
    """One sandbox of an episode. `recording`: path of a file that exists."""

    session: str
    episode: str
    part: Part
    mode: Mode
    recording: str


@dataclass(frozen=True, slots=True)
class EpisodeCounts:
    """`problem`: why something was not recorded, empty if nothing failed.

    `missed`: the most frequent requests without an answer, `METHOD URL`, and how often each was made.
    """

    counts: Counts
    problem: str = ""
    missed: Mapping[str, int] = field(default_factory=dict[str, int])


Addresses = Mapping[str, tuple[str, int | None]]
"""Addresses that an operator has named, by host. A host with a port is for requests to that port."""

BLOCKED_PORTS = frozenset({22, 23, 25, 110, 143, 465, 587, 993, 995})
"""Ports of services that are not web sites; HTTP sent to a mail server can send mail."""
MAX_SHOWN = 200

_AUTHORITY = re.compile(r"(?P<host>\[[0-9A-Fa-f:.]+\]|[^\[\]:]*)(?::\d*)?")
_NAME = re.compile(r"[0-9a-z_-]+(?:\.[0-9a-z_-]+)*")


class RefusedTargetError(Exception):
    """The proxy does not connect there; the message says why and what to do."""


def named_address(addresses: Addresses, host: str, port: int) -> tuple[str, int] | None:
    """The address that an operator has named for a host, None if there is none."""
    name = host.lower().rstrip(".")
    found = addresses.get(f"{name}:{port}") or addresses.get(name)
    return None if found is None else (found[0], found[1] or port)


def host_name(authority: str) -> str:
    """The host of `HOST[:PORT]` as two of them are compared: ASCII in lower case, without a final dot.

    An IPv6 address has no brackets. Raises RefusedTargetError for what is no name and no address: a resolver
    may accept more characters than that, and an address with them would be read as that of another host.
    """
    match = _AUTHORITY.fullmatch(authority)
    host = "" if match is None else match["host"].rstrip(".")
    with suppress(ValueError):
        if host.startswith("["):
            return str(ipaddress.IPv6Address(host[1:-1]))
        host = host.encode("idna").decode("ascii").lower()
        if _NAME.fullmatch(host):
            return host
    raise RefusedTargetError(f"{authority[:MAX_SHOWN]!r} is not the name of a host")


def check_port(port: int) -> None:
    """Raises RefusedTargetError for the port of a service that is not a web site."""
    if port in BLOCKED_PORTS:
        raise RefusedTargetError(f"port {port} is not that of a web site")


def public_address(host: str, addresses: list[str]) -> str:
    """The first of a host's addresses, all of which have to be public. Raises RefusedTargetError."""
    # All of them: a name with one private address is an attempt to reach it.
    for address in addresses:
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
            found = found.ipv4_mapped
        if not found.is_global or found.is_multicast:
            raise RefusedTargetError(
                f"{host} has the address {address}, which is not public: if sandboxes may reach it, start "
                f"the server with --web-address {host}={address}"
            )
    if not addresses:
        raise RefusedTargetError(f"{host} has no address")
    return addresses[0]


def parse_addresses(texts: tuple[str, ...]) -> Addresses:
    """Read `HOST=ADDRESS`. Both can have a port; an IPv6 address then is in brackets.

    Raises ValueError with a sentence for any other text.
    """
    parsed: dict[str, tuple[str, int | None]] = {}
    for text in texts:
        host, _, target = text.partition("=")
        bracketed = target if target.startswith("[") or target.count(":") < 2 else f"[{target}]"
        address, port = "", 0
        with suppress(ValueError):
            parts = urlsplit(f"//{bracketed}")
            address, port = str(ipaddress.ip_address(parts.hostname or "")), parts.port
        if not host or not address or port == 0:
            raise ValueError(f"--web-address {text}: expected HOST=ADDRESS, both with an optional :PORT")
        parsed[host.lower().rstrip(".")] = address, port
    return parsed
