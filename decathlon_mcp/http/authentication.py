"""Which requests are accepted: bearer tokens, and the host names that the server answers to.

Each line of a token file is a name, the SHA-256 of a secret, and a role. The secrets are not stored.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from decathlon_mcp.episodes.access import Principal, Role
from decathlon_mcp.errors import SettingsError

if TYPE_CHECKING:
    from mcp.server.transport_security import TransportSecuritySettings

_LINE = re.compile(r"(?P<name>[\w.@-]{1,64})\s+(?P<digest>[0-9a-fA-F]{64})\s+(?P<role>\w+)")


ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    digest: str
    role: Role


class Tokens:
    """The tokens that are accepted. Without any, every request is: only for servers on loopback."""

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

    def principal(self, authorization: str | None) -> Principal | None:
        """The principal that an `Authorization` header identifies; None if it has no known token."""
        if not self._tokens:
            return Principal()
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode()).hexdigest()
        # Every token is compared, in constant time, so that the time taken says nothing about the secrets.
        matches = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
        if scheme.lower() != "bearer" or not matches:
            return None
        alone = len({token.name for token in self._tokens}) == 1
        return Principal(token=matches[0].name, role=matches[0].role, alone=alone)


def new_token(name: str, role: Role) -> tuple[str, str]:
    """A new secret and its line for the token file."""
    secret = secrets.token_urlsafe(32)
    return secret, f"{name} {hashlib.sha256(secret.encode()).hexdigest()} {role}"


@dataclass(frozen=True, slots=True)
class AllowedHosts:
    """The host names that the server answers to. Requests with another Host or Origin are refused."""

    names: tuple[str, ...] = ("127.0.0.1", "localhost", "[::1]")

    @property
    def origin_pattern(self) -> str:
        """Regular expression for the origins of these names on any port, with http or https."""
        return rf"https?://(?:{'|'.join(map(re.escape, self.names))})(?::\d+)?"

    def security(self) -> TransportSecuritySettings:
        """The SDK's settings against DNS rebinding: these names on any port."""
        # Imported late: the SDK takes a second, and `decathlon-mcp token` and `doctor` need none of it.
        from mcp.server.transport_security import TransportSecuritySettings

        # Written out, because for a host other than localhost the SDK's default switches the check off.
        hosts = [pattern for name in self.names for pattern in (name, f"{name}:*")]
        origins = [f"{scheme}://{host}" for scheme in ("http", "https") for host in hosts]
        return TransportSecuritySettings(
            enable_dns_rebinding_protection=True, allowed_hosts=hosts, allowed_origins=origins
        )
