"""Acceptance of requests: bearer tokens, host names that the server answers to, and origins of pages.

Each line of a token file is a name, the SHA-256 of a secret, and a role. The secrets are not stored.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import re
import secrets
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Self, cast, get_args

from decathlon_mcp.episodes.specification import Principal, Role
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.protocol.headers import Headers
from decathlon_mcp.protocol.messages import UNAUTHORIZED, McpError

_LINE = re.compile(r"(?P<name>[\w.@-]{1,64})\s+(?P<digest>[0-9a-fA-F]{64})\s+(?P<role>\w+)")
ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    digest: str
    role: Role


class Tokens:
    """The tokens that are accepted. Without any, every request is: only for servers on loopback."""

    kind = "token"

    def __init__(self, tokens: tuple[_Token, ...] = ()) -> None:
        self._tokens = tokens

    @classmethod
    def read(cls, file: Path | None) -> Tokens:
        """Read a token file. Raises SettingsError naming a line that is not NAME SHA256 ROLE."""
        if file is None:
            return cls()
        try:
            lines = file.read_text("utf-8").splitlines()
        except OSError as error:
            raise SettingsError(f"--tokens: {file}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise SettingsError(f"--tokens: {file}: not a text file (UTF-8)") from None
        tokens: list[_Token] = []
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match = _LINE.fullmatch(line.strip())
            if match is None or match["role"] not in ROLES:
                raise SettingsError(
                    f"{file}:{number}: expected NAME SHA256 ROLE, with one of the roles {', '.join(ROLES)}; "
                    "`decathlon-mcp token NAME` prints such a line"
                )
            tokens.append(_Token(match["name"], match["digest"].lower(), cast("Role", match["role"])))
        if not tokens:
            raise SettingsError(f"{file}: there is no token in it; `decathlon-mcp token NAME` prints a line")
        return cls(tuple(tokens))

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def require(self, authorization: str | None) -> Principal:
        """The principal that an `Authorization` header identifies. Raises McpError without a known token."""
        if not self._tokens:
            return Principal()
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode()).hexdigest()
        principal = self.principal_of(digest) if scheme.lower() == "bearer" else None
        if principal is None:
            problem = "a token is needed" if authorization is None else "this server has no such token"
            text = f"{problem}: send it as `Authorization: Bearer TOKEN`"
            raise McpError(UNAUTHORIZED, text, status=401)
        return principal

    def principal_of(self, digest: str) -> Principal | None:
        """Who has the secret with this SHA-256, in hexadecimal digits; None if it is not known."""
        # Every token is compared, in constant time, so that the time taken says nothing about the secrets.
        matches = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
        if not matches:
            return None
        alone = len({token.name for token in self._tokens}) == 1
        return Principal(token=matches[0].name, role=matches[0].role, alone=alone)


def new_token(name: str, role: Role) -> tuple[str, str]:
    """A new secret and its line for the token file."""
    secret = secrets.token_urlsafe(32)
    return secret, f"{name} {hashlib.sha256(secret.encode()).hexdigest()} {role}"


_AUTHORITY = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^][:/?#@,\s]+)(?::(?P<port>\d{0,5}))?")
_ORIGIN = re.compile(r"(?P<scheme>[a-zA-Z][a-zA-Z0-9+.-]*)://(?P<authority>.+)")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_JSON = "application/json"
_CHECKED_HEADERS = (b"host", b"origin", b"content-type")
MAX_KNOWN_CHECKS = 256
"""Combinations of headers whose check is remembered: a client's are always the same. Each has at most the 64
KiB of a request's head."""


@dataclass(frozen=True, slots=True)
class _Authority:
    """A host name in lower case, without a final dot, and its port; None if none is given."""

    name: str
    port: int | None

    @classmethod
    def read(cls, text: str) -> Self | None:
        """None if it is not `NAME`, `ADDRESS` or `[IPV6]`, each perhaps with `:PORT`."""
        match = _AUTHORITY.fullmatch(text)
        if match is None:
            return None
        name = match["name"].lower().removesuffix(".")
        port = int(match["port"]) if match["port"] else None
        if name.startswith("["):
            try:
                name = f"[{ipaddress.IPv6Address(name[1:-1])}]"
            except ValueError:
                return None
        return cls(name, port) if name and (port is None or port < 1 << 16) else None

    @property
    def is_address(self) -> bool:
        """Whether it is an IP address."""
        try:
            ipaddress.ip_address(self.name.strip("[]"))
        except ValueError:
            return False
        return True


def normalized_origin(text: str) -> str | None:
    """An origin as browsers send it (`SCHEME://NAME`, and a port that is not the scheme's own).

    None if it is no origin, as `null` is none: every page can have that.
    """
    match = _ORIGIN.fullmatch(text)
    authority = None if match is None else _Authority.read(match["authority"])
    if match is None or authority is None or authority.name == "*":
        return None
    scheme = match["scheme"].lower()
    has_port = authority.port is not None and authority.port != _DEFAULT_PORTS.get(scheme)
    return f"{scheme}://{authority.name}{f':{authority.port}' if has_port else ''}"


PAGE_HOST = "decathlon.localhost"
"""Name by which people reach the page on this machine. Browsers send the cookies of a name to all its ports:
without a name of its own, the page's cookies would reach programs on other ports of `localhost`."""


class Refused(NamedTuple):
    """Why a request is refused: a status, and a text for the client."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """Which requests may come from a page in a browser, and by which names clients may call the server.

    `names`: host names, on any port. `origins`: of pages, besides the server's own; each as
    `normalized_origin` returns it. `any_address`: whether an IP address is accepted for a name. A page that
    lets its own name lead to this machine (DNS rebinding) cannot send one.
    """

    names: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]", PAGE_HOST)
    origins: tuple[str, ...] = ()
    any_address: bool = False

    def refusal(self, method: str, headers: Headers) -> Refused | None:
        """Why a request with these headers must not be served; None if it may be.

        Without that, any page could make its visitor's browser send a request which needs no preflight, such
        as a POST of `text/plain`.
        """
        # A list of values is none that is accepted.
        values = [b"," if name in headers.repeated else headers.get(name) for name in _CHECKED_HEADERS]
        return _refusal(self, method, *values)

    def answers_to(self, host: str) -> bool:
        """Whether a client may call the server by this `Host` header."""
        authority = _Authority.read(host)
        if authority is None:
            return False
        known = (_Authority.read(name) for name in self.names)
        return (self.any_address and authority.is_address) or any(
            name is not None and name.name == authority.name and name.port in (None, authority.port)
            for name in known
        )

    def accepts(self, origin: str, host: _Authority) -> bool:
        """Whether a page of this origin may send requests: one of the server's own, or an allowed origin."""
        normalized = normalized_origin(origin)
        if normalized is None:
            return False
        # The scheme is the page's: behind a proxy with TLS the server does not know its own.
        port = "" if host.port is None else f":{host.port}"
        own = (normalized_origin(f"{scheme}://{host.name}{port}") for scheme in _DEFAULT_PORTS)
        return normalized in self.origins or normalized in own


@lru_cache(MAX_KNOWN_CHECKS)
def _refusal(
    hosts: AllowedHosts, method: str, host: bytes | None, origin: bytes | None, content_type: bytes | None
) -> Refused | None:
    authority = _Authority.read(_text(host))
    if authority is None or not hosts.answers_to(_text(host)):
        return Refused(421, "Invalid Host header: --allowed-host adds a name that clients may use")
    if origin is not None and not hosts.accepts(_text(origin), authority):
        return Refused(403, "Invalid Origin header: --allowed-origin adds an origin of pages")
    if method == "POST" and _text(content_type).partition(";")[0].strip().lower() != _JSON:
        return Refused(400, f"Invalid Content-Type header: {_JSON} is expected")
    return None


def _text(header: bytes | None) -> str:
    return (header or b"").decode("latin-1")
