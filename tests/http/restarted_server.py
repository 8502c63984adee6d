"""A server over the fake provider, which a test kills and starts again: FILE-DESCRIPTOR, FOLDER.

The fake's sandboxes die with the process, so that each start makes new ones for the episodes of the sessions
in the store, under their ids. The tool `probe__hang` returns only in a process that is not the first.
"""

from __future__ import annotations

import secrets
import socket
import sqlite3
import sys
from contextlib import closing
from pathlib import Path
from tempfile import mkdtemp
from unittest.mock import patch

import anyio

from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.storage.store import FILE_NAME, Store
from tests.episodes.environment import echo, running_registry
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider
from tests.http.restarting import SERVER


def restore_episodes(registry: EpisodeRegistry, folder: Path) -> None:
    """Start an episode for each that a session in the store has."""
    with closing(sqlite3.connect(folder / FILE_NAME)) as connection:
        handles = connection.execute("SELECT DISTINCT episode FROM sessions WHERE episode IS NOT NULL")
        for (handle,) in handles.fetchall():
            with patch.object(secrets, "token_hex", side_effect=[handle, handle[::-1]]):
                registry.start("find-answer", Principal())


async def main(descriptor: int, folder: Path) -> None:
    async def slow(call: FakeCall) -> str:
        with (folder / "calls").open("a") as calls:
            calls.write(f"{call.arguments['text']}\n")
        if store.generation == 1:
            await anyio.sleep_forever()
        return f"{call.arguments['text']} in generation {store.generation}"

    provider = FakeProvider(tools={"probe": {"echo": echo, "hang": slow}})
    with Store.open(folder, SERVER) as store:
        async with running_registry(Path(mkdtemp(dir=folder)), provider) as registry:
            registry.store = store
            restore_episodes(registry, folder)
            listener = socket.socket(fileno=descriptor)
            await serve_http(http_app(registry), listener, drain=registry.drain, on_ready=lambda: None)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]), Path(sys.argv[2]))
