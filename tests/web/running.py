"""The real proxy with one recording for each sandbox, and raw HTTP over its connections."""

from __future__ import annotations

import shutil
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import anyio
import pytest
from anyio.abc import ByteStream
from anyio.streams.buffered import BufferedByteReceiveStream
from anyio.streams.tls import TLSStream

from decathlon_mcp.plugins.web.exchanges import (
    Configuration,
    Listener,
    Mode,
    SessionSpec,
    WebRequest,
    parse_addresses,
    request_key,
)
from decathlon_mcp.plugins.web.proxy import WebProxy, find_program, running_proxy
from decathlon_mcp.plugins.web.recording import Recording, RecordingId
from tests.web.sites import Sites

needs_mitmdump = pytest.mark.usefixtures("mitmdump")
"""Mark of the tests with the real proxy. They must be slow too: CI installs it only for those."""


@dataclass(frozen=True, slots=True)
class Reply:
    """One response of the proxy."""

    status: int
    headers: dict[str, str] = field(default_factory=dict[str, str])
    body: bytes = b""


class Client:
    """One connection of a sandbox to the proxy."""

    def __init__(self, stream: ByteStream) -> None:
        self.stream = stream
        self._buffered = BufferedByteReceiveStream(stream)

    async def send(self, *lines: str, body: bytes = b"") -> None:
        """Send a request: its line, and its headers."""
        await self.stream.send("".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1") + body)

    async def receive(self) -> Reply:
        """The next response. Raises EndOfStream, IncompleteRead or BrokenResourceError without one."""
        head = (await self._buffered.receive_until(b"\r\n\r\n", 1 << 17)).decode("latin-1").split("\r\n")
        headers = {
            name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])
        }
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b""
            while size := int(await self._buffered.receive_until(b"\r\n", 100), 16):
                body += (await self._buffered.receive_exactly(size + 2))[:-2]
            await self._buffered.receive_exactly(2)
        else:
            body = await self._buffered.receive_exactly(int(headers.get("content-length", 0)))
        return Reply(int(head[0].split()[1]), headers, body)

    async def ask(self, *lines: str, body: bytes = b"") -> Reply:
        await self.send(*lines, body=body)
        return await self.receive()

    async def wait_until_closed(self) -> None:
        """Read until the proxy closes the connection."""
        with suppress(anyio.EndOfStream, anyio.BrokenResourceError):
            while True:
                await self.stream.receive()


@dataclass(frozen=True, slots=True)
class Running:
    """A proxy, and the folder with what its sandboxes record."""

    proxy: WebProxy
    folder: Path

    async def sandbox(self, name: str, mode: Mode = "record") -> str:
        """Open a session of a new episode with this name, with a recording of its own."""
        await self.proxy.open(SessionSpec(name, name, "agent", mode, str(self.recording(name))))
        return name

    def recording(self, name: str) -> Path:
        id = RecordingId("suite", "1", name)  # noqa: A001
        Recording.create(self.folder, id, datetime.now(UTC)).close()
        return id.path(self.folder)

    async def recorded(self, name: str) -> dict[str, bytes]:
        """What was recorded for a sandbox: the first bodies by their addresses."""
        await self.proxy.counts(name)  # what is received is stored then
        with Recording(self.recording(name)) as recording:
            found = {each.url: each.method for each in recording.exchanges()}
            bodies = {
                url: recording.find("agent", request_key(WebRequest(method, url)), 0)
                for url, method in found.items()
            }
        return {url: b"" if body is None else body.body for url, body in bodies.items()}

    @asynccontextmanager
    async def connected(self, session: str, listener: Listener = "proxy") -> AsyncGenerator[Client]:
        async with await self.proxy.connect(session, listener) as stream:
            yield Client(stream)

    @asynccontextmanager
    async def tls(
        self, session: str, name: str, target: str | None = None, alpn: tuple[str, ...] = ()
    ) -> AsyncGenerator[Client]:
        """A TLS connection for this server name: through a CONNECT to the target, or led here by name."""
        async with self.connected(session, "proxy" if target else "https") as client:
            if target:
                reply = await client.ask(f"CONNECT {target} HTTP/1.1", f"Host: {target}")
                assert reply.status == 200, reply
            context = ssl.create_default_context(cadata=self.proxy.authority)
            if alpn:
                context.set_alpn_protocols(list(alpn))
            async with await TLSStream.wrap(
                client.stream, hostname=name, ssl_context=context, standard_compatible=False
            ) as stream:
                yield Client(stream)


@asynccontextmanager
async def real_proxy(
    folder: Path, sites: Sites, *, max_response_bytes: int = 32 << 20, request_seconds: float = 120.0
) -> AsyncGenerator[Running]:
    configuration = Configuration(
        parse_addresses(sites.addresses), max_response_bytes, 1 << 30, request_seconds
    )
    program = find_program(None)
    async with running_proxy(program, folder / "state", configuration, sites.authority) as proxy:
        yield Running(proxy, folder / "recordings")
    shutil.rmtree(folder / "state", ignore_errors=True)
