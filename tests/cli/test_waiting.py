"""What commands say while something takes long: a server that does not answer, a start."""

from __future__ import annotations

import asyncio

import anyio.to_thread
import pytest

from decathlon_mcp.cli import console
from decathlon_mcp.cli.app import run as run_command

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class HangingServer:
    """Holds every request until its health was asked for three times, and answers only the second time."""

    def __init__(self) -> None:
        self._questions = 0
        self._done = asyncio.Event()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self._questions += head.startswith(b"GET /healthz ")
        if self._questions == 2:
            writer.write(OK)
        else:
            if self._questions == 3:
                self._done.set()
            await self._done.wait()
        writer.close()
        await writer.wait_closed()


async def test_a_command_says_that_its_server_is_away_and_that_it_is_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "QUIET_SECONDS", 0.05)
    monkeypatch.setattr(console, "ANSWER_SECONDS", 0.5)
    async with await asyncio.start_server(HangingServer().serve, "127.0.0.1", 0) as server:
        host, port = server.sockets[0].getsockname()
        url = f"http://{host}:{port}"
        status = await anyio.to_thread.run_sync(run_command, ["episode", "status", "0123", "--url", url])
    assert status == 1
    assert capsys.readouterr().err.splitlines()[:2] == [
        f"decathlon-mcp: the server at {url} does not answer; this command waits for it",
        f"decathlon-mcp: the server at {url} answers again",
    ]
