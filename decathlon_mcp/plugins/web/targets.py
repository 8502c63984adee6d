"""Which addresses the proxy connects to: public ones, and those that an operator has named.

A sandbox has no network, and the proxy runs on the server's machine: it must not lead to what listens there,
or in the networks around it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from contextlib import suppress
from urllib.parse import urlsplit

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
