"""A recording compared with the sites as they are now."""

from __future__ import annotations

import hashlib
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from decathlon_mcp.plugins.web.commands import compare_with_web
from decathlon_mcp.plugins.web.recording import Exchange


class Site(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 302 if self.path == "/moved" else 200
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/same")
        self.end_headers()
        self.wfile.write(b"" if status == 302 else b"page")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


@pytest.fixture
def site() -> Generator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def exchange(url: str, body: bytes = b"page", *, method: str = "GET", status: int = 200) -> Exchange:
    digest = hashlib.sha256(body).hexdigest()
    return Exchange("agent", url, "", 0, method, url, status, digest, len(body), "2026-01-01")


def test_each_address_is_compared_with_the_site(site: str) -> None:
    recorded = [
        exchange(f"{site}/same"),
        exchange(f"{site}/changed", b"old page"),
        exchange(f"{site}/moved"),
        exchange(f"{site}/redirect-stays", b"", status=302),
        exchange(f"{site}/moved?recorded", b"", status=200),
        exchange(f"{site}/form", method="POST"),
        exchange(f"{site}/?key=REDACTED"),
        exchange("http://127.0.0.1:1/"),
    ]
    found = {
        result.exchange.url.removeprefix(site): result.difference for result in compare_with_web(recorded)
    }
    assert found == {
        "/same": "same",
        "/changed": "different",
        "/moved": "status",
        "/redirect-stays": "status",
        "/moved?recorded": "different",
        "/form": "skipped",
        "/?key=REDACTED": "skipped",
        "http://127.0.0.1:1/": "unreachable",
    }
