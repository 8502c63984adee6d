"""A server whose episodes survive it, which a test kills and starts again: FILE-DESCRIPTOR, STATE-FOLDER."""

from __future__ import annotations

import socket
import sys

import anyio

from decathlon_mcp.app import bootstrap
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.settings import read_settings
from tests.probe.serving import SUITE


async def main(descriptor: int, state: str) -> None:
    settings = read_settings({"suite": (SUITE,), "provider": "local", "state": state})
    async with bootstrap(settings, survives=True) as registry:
        listener = socket.socket(fileno=descriptor)
        await serve_http(http_app(registry), listener, drain=registry.drain, on_ready=lambda: None)


if __name__ == "__main__":
    anyio.run(main, int(sys.argv[1]), sys.argv[2])
