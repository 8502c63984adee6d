"""Who may look: the secret that a person presents once, and the session that the browser gets for it.

What a finished episode holds contains answers and rewards, so the page is never open to everyone. A server
with tokens accepts them; one without has a key in its state folder. A link and an event stream send no
header, so the secret is exchanged for a cookie. Sessions live in memory: they end with the server, after
`SESSION_SECONDS`, and when their token is removed.
"""

from __future__ import annotations

import hmac
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from time import monotonic
from typing import Protocol

import anyio
from starlette.requests import HTTPConnection

from decathlon_mcp.episodes.episode import Principal
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.storage.keys import create_secret, read_secret

PAGE_KEY_FILE = "page-key"
PAGE_KEY_BYTES = 32
SESSION_SECONDS = 12 * 3600.0
MAX_SESSIONS = 100
"""Sessions of one key or token; beyond, its oldest ends, and nobody else's."""
WRONG_SECONDS = 1.0
"""Each wrong secret is answered after this time, one after the other."""
MAX_WRONG = 32
"""Wrong secrets whose answers wait; one more is refused at once."""
MAX_SECRET_CHARACTERS = 512


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks at the page. `session`: digest of the session's id."""

    principal: Principal
    session: str = ""

    @property
    def sees_all(self) -> bool:
        """Whether this is the holder of the key, or an administrator."""
        return self.principal.token is None or self.principal.role == "admin"

    @property
    def may_watch(self) -> bool:
        """Whether this one may see what was played. A player may only play: results contain answers."""
        return self.principal.token is None or self.principal.controls

    @property
    def owner(self) -> str | None:
        """The token whose episodes are seen; None for all."""
        return None if self.sees_all else self.principal.token

    def may_see(self, owner: str | None) -> bool:
        """Whether this one may see an episode of that token."""
        return self.may_watch and (self.sees_all or owner == self.principal.token)


class Secrets(Protocol):
    """The secrets by which people are known; each is compared by its SHA-256."""

    @property
    def kind(self) -> str:
        """What a person is asked for: `key` or `token`."""
        ...

    def principal_of(self, digest: str) -> Principal | None:
        """Who has the secret with this digest (64 hexadecimal digits)."""
        ...


class PageKey:
    """The only secret of a server without tokens; its holder sees everything."""

    kind = "key"

    def __init__(self, key: str) -> None:
        self._digest = digest_of(key)

    def principal_of(self, digest: str) -> Principal | None:
        return Principal() if hmac.compare_digest(digest, self._digest) else None


@dataclass(frozen=True, slots=True)
class _Session:
    secret: str
    """Digest of the secret that was presented."""
    ends_at: float


class Sessions:
    """The sessions of all browsers. `clock`: a monotonic time in seconds."""

    def __init__(self, accepted: Secrets, clock: Callable[[], float] = monotonic) -> None:
        self._accepted = accepted
        self._clock = clock
        self._by_digest: dict[str, _Session] = {}
        self._wrong = anyio.Lock()

    @property
    def kind(self) -> str:
        """What a person is asked for: `key` or `token`."""
        return self._accepted.kind

    async def open(self, secret: str) -> str | None:
        """The id of a new session; None if the secret is wrong. Only then does it take time."""
        secret_digest = digest_of(secret[:MAX_SECRET_CHARACTERS])
        if self._accepted.principal_of(secret_digest) is None:
            if self._wrong.statistics().tasks_waiting < MAX_WRONG:
                async with self._wrong:
                    await anyio.sleep(WRONG_SECONDS)
            return None
        now = self._clock()
        for digest in [each for each, session in self._by_digest.items() if session.ends_at <= now]:
            del self._by_digest[digest]
        own = [digest for digest, session in self._by_digest.items() if session.secret == secret_digest]
        for digest in own[: max(0, len(own) + 1 - MAX_SESSIONS)]:
            del self._by_digest[digest]
        session_id = secrets.token_urlsafe(32)
        self._by_digest[digest_of(session_id)] = _Session(secret_digest, now + SESSION_SECONDS)
        return session_id

    def viewer(self, request: HTTPConnection) -> Viewer | None:
        """Who sent a request; None without a session."""
        session_id = request.cookies.get(cookie_name(request))
        if session_id is None:
            return None
        digest = digest_of(session_id)
        session = self._by_digest.get(digest)
        if session is None or session.ends_at <= self._clock():
            return None
        principal = self._accepted.principal_of(session.secret)
        return None if principal is None else Viewer(principal, digest)

    def close(self, viewer: Viewer) -> None:
        """End a session."""
        self._by_digest.pop(viewer.session, None)


def cookie_name(request: HTTPConnection) -> str:
    """Name of the cookie. Browsers send the cookies of one host to all its ports, so it has the port's."""
    _, port = request.scope.get("server") or ("", 0)
    return f"decathlon-{port}"


def digest_of(secret: str) -> str:
    """SHA-256 of a secret, in hexadecimal digits."""
    return sha256(secret.encode("utf-8", "replace")).hexdigest()


def load_or_create_page_key(state: Path) -> str:
    """The key of this state folder's page, made first if there is none: 64 hexadecimal digits.

    It opens the page of a server without tokens. Raises SettingsError if the file cannot be read or written,
    or has something else.
    """
    file = state / PAGE_KEY_FILE
    if not file.exists():
        create_secret(file, f"{secrets.token_hex(PAGE_KEY_BYTES)}\n".encode())
    key = read_secret(file).decode("ascii", "replace").strip()
    if not re.fullmatch(rf"[0-9a-f]{{{2 * PAGE_KEY_BYTES}}}", key):
        raise SettingsError(f"{file} is not the key of a page: remove it to have a new one created")
    return key
