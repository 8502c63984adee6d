"""What one sandbox can take of the proxy that all sandboxes share, over the real proxy."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, closing, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from decathlon_mcp.plugins.web.connections import MAX_BODY_BYTES, MAX_CONNECTIONS, MAX_RECEIVED_BYTES
from tests.web.running import Client, Running, needs_mitmdump, real_proxy
from tests.web.sites import Sites, sites

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_mitmdump]

SITE = "site.example"
PAGE = (f"GET http://{SITE}/page HTTP/1.1", f"Host: {SITE}")
UPLOAD = (f"POST http://{SITE}/upload HTTP/1.1", f"Host: {SITE}")
MEBIBYTE = 1 << 20
ENDED = (anyio.BrokenResourceError, anyio.EndOfStream, anyio.IncompleteRead, anyio.ClosedResourceError)


class Site(BaseHTTPRequestHandler):
    """A page, and responses without an end."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        with suppress(OSError):
            if self.path == "/slow":
                time.sleep(2.5)
            if self.path in ("/page", "/slow"):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\npage")
            elif self.path == "/long":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 33554432\r\n\r\n")
                for _ in range(31):
                    self.wfile.write(bytes(MEBIBYTE))
                self.rfile.read(1)  # until the proxy closes the connection

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.do_GET()


@pytest.fixture
def web(tmp_path: Path) -> Generator[Sites]:
    with sites(tmp_path, {(SITE,): Site}) as running:
        yield running


@pytest.fixture
async def proxy(tmp_path: Path, web: Sites) -> AsyncGenerator[Running]:
    async with real_proxy(tmp_path, web) as running:
        yield running


def memory(field: str = "VmRSS") -> int:
    """Bytes that the proxy's process has, or had at most (VmHWM)."""
    pids: list[str] = []
    for task in Path(f"/proc/{os.getpid()}/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            pids += (task / "children").read_text().split()
    (pid,) = (pid for pid in pids if b"mitmdump" in Path(f"/proc/{pid}/cmdline").read_bytes())
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith(field))) << 10


async def send_all(client: Client, size: int) -> None:
    """Send so many bytes, or as many as the proxy takes."""
    with suppress(*ENDED):
        for _ in range(size // MEBIBYTE):
            await client.stream.send(bytes(MEBIBYTE))


async def opened(proxy: Running, stack: AsyncExitStack, session: str, count: int) -> list[Client]:
    return [await stack.enter_async_context(proxy.connected(session)) for _ in range(count)]


async def test_uploads_without_an_end_take_little_memory_and_no_time_of_others(proxy: Running) -> None:
    noisy, quiet = await proxy.sandbox("noisy"), await proxy.sandbox("quiet")
    async with proxy.connected(quiet) as client:
        assert (await client.ask(*PAGE)).body == b"page"
        before = memory()
        async with AsyncExitStack() as stack:
            for upload in await opened(proxy, stack, noisy, 40):
                await upload.send(*UPLOAD, "Transfer-Encoding: chunked", body=b"7000000\r\n")
                await send_all(upload, 7 * MEBIBYTE)
            assert (await client.ask(*PAGE)).body == b"page"
            grown = memory("VmHWM") - before
    assert grown < 4 * MAX_RECEIVED_BYTES, f"{grown >> 20} MiB"


@pytest.mark.parametrize("size", ["Content-Length: 8388609", "Transfer-Encoding: chunked"])
async def test_a_body_that_is_too_long_ends_its_connection(proxy: Running, web: Sites, size: str) -> None:
    session = await proxy.sandbox("sandbox")
    async with proxy.connected(session) as client:
        with suppress(*ENDED):
            await client.send(*UPLOAD, size, body=b"800001\r\n")
        await send_all(client, MAX_BODY_BYTES + MEBIBYTE)
        await client.wait_until_closed()
    async with proxy.connected(session) as client:
        body = bytes(MAX_BODY_BYTES)
        reply = await client.ask(
            UPLOAD[0].replace("upload", "page"), UPLOAD[1], f"Content-Length: {len(body)}", body=body
        )
        assert reply.body == b"page"
    assert len(web.asked) == 0


@pytest.mark.parametrize("start", [b"GET / HTTP/1.1\r\nX: ", b"\x16\x03\x01\x40\x00\x01\xff\xff\xff"])
async def test_a_head_without_an_end_ends_its_connection(proxy: Running, start: bytes) -> None:
    session = await proxy.sandbox("sandbox")
    async with proxy.connected(session, "https" if start[0] == 0x16 else "http") as client:
        await client.stream.send(start)
        await send_all(client, 64 * MEBIBYTE)
        await client.wait_until_closed()
    assert memory("VmHWM") - memory() < 16 * MEBIBYTE


async def test_many_unfinished_responses_take_little_memory(proxy: Running) -> None:
    session = await proxy.sandbox("sandbox")
    before = memory()

    async def read(client: Client) -> None:
        await client.send(PAGE[0].replace("page", "long"), PAGE[1])
        received = 0
        while received < 31 * MEBIBYTE:
            received += len(await client.stream.receive())

    async with AsyncExitStack() as stack:
        clients = await opened(proxy, stack, session, 10)
        async with anyio.create_task_group() as tasks:
            for client in clients:
                tasks.start_soon(read, client)
        assert memory("VmHWM") - before < 160 * MEBIBYTE
        assert "too many large responses" in (await proxy.proxy.counts(session)).problem


@pytest.mark.parametrize(
    "sent", ["GET / HTTP/1.1\r\nX: ", "\r\n".join((*UPLOAD, "Content-Length: 9", "", "x"))]
)
async def test_a_connection_without_a_complete_request_ends_after_a_time(
    tmp_path: Path, web: Sites, sent: str
) -> None:
    async with real_proxy(tmp_path, web, request_seconds=1.0) as proxy:
        session = await proxy.sandbox("sandbox")
        async with proxy.connected(session) as client:
            await client.stream.send(sent.encode())
            await client.wait_until_closed()
        # One byte after the other is no complete request either.
        async with proxy.connected(session) as client:
            with suppress(anyio.BrokenResourceError):
                while True:
                    await client.stream.send(b"x")
                    await anyio.sleep(0.1)
        # A site may take longer.
        async with proxy.connected(session) as client:
            assert (await client.ask(PAGE[0].replace("page", "slow"), PAGE[1])).body == b"page"


async def test_the_connections_of_a_sandbox_are_limited(proxy: Running) -> None:
    noisy, quiet = await proxy.sandbox("noisy"), await proxy.sandbox("quiet")
    async with AsyncExitStack() as stack:
        first, *_ = await opened(proxy, stack, noisy, MAX_CONNECTIONS)
        with pytest.raises(OSError, match="64 connections already"):
            await proxy.proxy.connect(noisy, "proxy")
        async with proxy.connected(quiet) as client:
            assert (await client.ask(*PAGE)).body == b"page"
        assert (await first.ask(*PAGE)).body == b"page"
        await first.stream.aclose()
        while True:
            with suppress(OSError):
                await stack.enter_async_context(proxy.connected(noisy))
                break


@pytest.mark.long
async def test_requests_of_one_sandbox_do_not_go_before_those_of_another(proxy: Running) -> None:
    noisy, quiet = await proxy.sandbox("noisy", "replay"), await proxy.sandbox("quiet", "replay")
    answered = 0

    async def flood(client: Client) -> None:
        nonlocal answered
        for _ in range(50):
            await client.ask(*PAGE)
            answered += 1

    async with AsyncExitStack() as stack:
        (client,) = await opened(proxy, stack, quiet, 1)
        await client.ask(*PAGE)
        floods = await opened(proxy, stack, noisy, 60)
        meanwhile: list[int] = []
        async with anyio.create_task_group() as tasks:
            for each in floods:
                tasks.start_soon(flood, each)
            while answered < 60:
                await anyio.lowlevel.checkpoint()
            for _ in range(20):
                before = answered
                await client.ask(*PAGE)
                meanwhile.append(answered - before)
        # The other sandbox has 60 requests in progress all the time.
    assert sorted(meanwhile)[10] < 20, meanwhile


async def test_a_recording_that_is_locked_delays_no_other_sandbox(proxy: Running) -> None:
    stuck, quiet = await proxy.sandbox("stuck"), await proxy.sandbox("quiet")
    with closing(sqlite3.connect(proxy.recording(stuck), isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        async with AsyncExitStack() as stack:
            waiting = await opened(proxy, stack, stuck, 40)
            for client in waiting:
                await client.send(*PAGE)
            async with proxy.connected(quiet) as client:
                for _ in range(20):
                    assert (await client.ask(*PAGE)).body == b"page"
            await proxy.sandbox("new")
            assert (await proxy.proxy.counts(quiet)).counts.recorded == 20
            assert (await proxy.proxy.counts("new")).counts.recorded == 0
            other.execute("ROLLBACK")
            # What a sandbox does not wait for need not be asked.
            for client in waiting:
                assert (await client.receive()).body == b"page"
    assert (await proxy.proxy.counts(stuck)).counts.recorded == 40
