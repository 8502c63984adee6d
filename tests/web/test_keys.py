"""A response is recorded under the address of the site that gave it, whatever a request says."""

from __future__ import annotations

import gzip
from collections.abc import AsyncGenerator, Generator
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from decathlon_mcp.plugins.web.exchanges import Counts
from tests.web.running import Running, needs_mitmdump, real_proxy
from tests.web.sites import Sites, sites

pytestmark = [pytest.mark.anyio, pytest.mark.slow, needs_mitmdump]

ATTACKER, VICTIM = NAMES = ("attacker.example", "victim.example")
MAX_RESPONSE_BYTES = 1 << 20


class NamedSite(BaseHTTPRequestHandler):
    """Answers with its name, or with what a path names, in an encoding."""

    protocol_version = "HTTP/1.1"
    name = b""

    def do_GET(self) -> None:
        body, encoding = self.name, ""
        if self.path == "/gzip":
            body, encoding = gzip.compress(b"page"), "gzip"
        elif self.path == "/bomb":
            body, encoding = gzip.compress(bytes(64 << 20)), "gzip"
        elif self.path == "/brotli":
            body, encoding = b"\x0b\x01\x80page\x03", "br"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def running_sites(tmp_path_factory: pytest.TempPathFactory) -> Generator[Sites]:
    handlers = {(name,): type("Site", (NamedSite,), {"name": name.encode()}) for name in NAMES}
    with sites(tmp_path_factory.mktemp("sites"), handlers) as running:
        yield running


@pytest.fixture(scope="module")
async def proxy(
    tmp_path_factory: pytest.TempPathFactory, running_sites: Sites, anyio_backend: object
) -> AsyncGenerator[Running]:
    folder = tmp_path_factory.mktemp("proxy")
    async with real_proxy(folder, running_sites, max_response_bytes=MAX_RESPONSE_BYTES) as running:
        yield running


@pytest.fixture
def web(running_sites: Sites) -> Sites:
    """The sites, which nothing has asked yet in this test."""
    running_sites.asked.clear()
    return running_sites


@pytest.fixture
async def session(proxy: Running, tmp_path: Path) -> str:
    """A session of this test's own."""
    return await proxy.sandbox(tmp_path.name)


MISMATCHES = {
    "another host": ("proxy", f"GET http://{ATTACKER}/ HTTP/1.1", f"Host: {VICTIM}"),
    "two hosts": ("http", "GET / HTTP/1.1", f"Host: {ATTACKER}", f"Host: {VICTIM}"),
    "a name that would be read as another": ("http", "GET / HTTP/1.1", f"Host: {VICTIM}#.{ATTACKER}"),
    "no host": ("http", "GET / HTTP/1.0"),
    "another method": ("http", "get / HTTP/1.1", f"Host: {VICTIM}"),
}


@pytest.mark.parametrize("request_lines", MISMATCHES.values(), ids=MISMATCHES)
async def test_a_request_that_is_not_for_the_site_that_gets_it_is_refused(
    proxy: Running, session: str, web: Sites, request_lines: tuple[str, ...]
) -> None:
    listener, *lines = request_lines
    async with proxy.connected(session, listener) as client:  # type: ignore[arg-type]
        reply = await client.ask(*lines)
    assert reply.status in (400, 421)
    counts = await proxy.proxy.close(session)
    assert counts.counts.recorded == counts.counts.passed == 0
    assert (web.asked, await proxy.recorded(session)) == ([], {})


@pytest.mark.parametrize(
    ("name", "target", "host"),
    [(VICTIM, f"{ATTACKER}:443", ATTACKER), (ATTACKER, None, VICTIM)],
    ids=["server name and host", "host, led here by name"],
)
async def test_a_request_over_tls_for_another_site_is_refused(
    proxy: Running, session: str, web: Sites, name: str, target: str | None, host: str
) -> None:
    async with proxy.tls(session, name, target) as client:
        reply = await client.ask("GET / HTTP/1.1", f"Host: {host}")
    assert (reply.status, reply.headers["decathlon-web"]) == (421, "refused")
    assert (await proxy.proxy.close(session)).counts == Counts(missed=1)
    assert (web.asked, await proxy.recorded(session)) == ([], {})


async def test_responses_are_decoded_up_to_the_limit(proxy: Running, session: str) -> None:
    async with proxy.connected(session) as client:
        for path in ("gzip", "bomb", "brotli"):
            line = f"GET http://{VICTIM}/{path} HTTP/1.1"
            assert (await client.ask(line, f"Host: {VICTIM}", "Accept-Encoding: br, gzip")).status == 200
    assert (await proxy.proxy.close(session)).counts == Counts(recorded=1, passed=2)
    assert await proxy.recorded(session) == {f"http://{VICTIM}/gzip": b"page"}
