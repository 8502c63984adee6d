"""Tokens: a file with a name, the SHA-256 of a secret and a role on each line; the secret is nowhere."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from decathlon_mcp.episodes.access import Principal, Role
from decathlon_mcp.errors import SettingsError

_LINE = re.compile(r"(?P<name>[\w.@-]{1,64})\s+(?P<digest>[0-9a-fA-F]{64})\s+(?P<role>\w+)")


@dataclass(frozen=True, slots=True)
class _Token:
    name: str
    digest: str
    role: Role


class Tokens:
    """Who may come in. Without any, everybody may: that is for loopback."""

    def __init__(self, tokens: tuple[_Token, ...] = ()) -> None:
        self._tokens = tokens

    @classmethod
    def read(cls, file: Path | None) -> Tokens:
        """Raises SettingsError naming the line that is not of the form NAME SHA256 ROLE."""
        if file is None:
            return cls()
        try:
            lines = file.read_text("utf-8").splitlines()
        except OSError as error:
            raise SettingsError(f"--tokens: {file}: {error.strerror}") from None
        tokens: list[_Token] = []
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            match, roles = _LINE.fullmatch(line.strip()), get_args(Role)
            if match is None or match["role"] not in roles:
                raise SettingsError(
                    f"{file}:{number}: expected NAME SHA256 ROLE, the role one of {', '.join(roles)}; "
                    "`decathlon-mcp token NAME` makes such a line"
                )
            tokens.append(_Token(match["name"], match["digest"].lower(), match["role"]))  # pyright: ignore[reportArgumentType]
        if not tokens:
            raise SettingsError(f"{file}: there is no token in it; `decathlon-mcp token NAME` makes a line")
        return cls(tuple(tokens))

    def __bool__(self) -> bool:
        return bool(self._tokens)

    def principal(self, authorization: str | None) -> Principal | None:
        """Who shows this `Authorization` header; None: nobody we know. Takes the same time either way."""
        if not self._tokens:
            return Principal()
        scheme, _, secret = (authorization or "").partition(" ")
        digest = hashlib.sha256(secret.strip().encode()).hexdigest()
        found = [token for token in self._tokens if hmac.compare_digest(token.digest, digest)]
        if scheme.lower() != "bearer" or not found:
            return None
        return Principal(token=found[0].name, role=found[0].role)


def new_token(name: str, role: Role) -> tuple[str, str]:
    """A secret, and the line for the file of tokens."""
    secret = secrets.token_urlsafe(32)
    return secret, f"{name} {hashlib.sha256(secret.encode()).hexdigest()} {role}"
