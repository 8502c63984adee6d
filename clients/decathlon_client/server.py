"""Where the server is: at a URL, or in this process."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

from decathlon_client.connection import Connection
from decathlon_client.sdk import Session, http_session

LOBBY = "/mcp"


class Server(Protocol):
    """What a `Decathlon` talks to."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """As long as this is open, it can be dialled. Raises ClientError where it cannot be started."""
        ...

    def where(self, episode: str | None) -> str:
        """The address of the lobby, or of that episode: its handle's, or the address that it is already."""
        ...

    def dial(self, connection: Connection, episode: str | None) -> AbstractAsyncContextManager[Session]:
        """A session with the lobby, or with that episode."""
        ...


class HttpServer:
    """A server at `url`: its root, or its lobby."""

    def __init__(self, url: str, token: str | None) -> None:
        root = url.rstrip("/").removesuffix(LOBBY)
        if "://" not in root or "/tasks/" in root or "/episodes/" in root:
            raise ValueError(f"not the address of a server, as http://127.0.0.1:8765 is one: {url!r}")
        self._root = root
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        yield

    def where(self, episode: str | None) -> str:
        if episode is None:
            return self._root + LOBBY
        return episode if "://" in episode else f"{self._root}/episodes/{episode}{LOBBY}"

    def dial(self, connection: Connection, episode: str | None) -> AbstractAsyncContextManager[Session]:
        return http_session(self.where(episode), self._headers, connection.note_refusal, connection.note_cut)
