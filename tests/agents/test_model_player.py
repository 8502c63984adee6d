"""The endpoint of `run --model`: what it sends is bounded before it is kept."""

from __future__ import annotations

import json
import threading
import tracemalloc
import zlib
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from decathlon_mcp.plugins.agents.player import MAX_ANSWER_BYTES, ModelFailedError, model_endpoint

pytestmark = pytest.mark.anyio


@contextmanager
def answering(body: bytes, headers: Mapping[str, str]) -> Generator[tuple[str, list[str]]]:
    """An endpoint with this answer. Yields its URL, and the encodings that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            asked.append(self.headers["accept-encoding"])
            self.send_response(200)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            """Logs nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", asked
        server.shutdown()


async def test_compressed_answer_is_refused_before_it_is_unpacked() -> None:
    bomb = zlib.compress(bytes(64 << 20), 9)
    with answering(bomb, {"Content-Encoding": "deflate"}) as (url, asked):
        async with model_endpoint(url) as endpoint:
            tracemalloc.start()
            with pytest.raises(ModelFailedError, match="compresses its answers"):
                await endpoint.complete({"messages": []})
            _, peak_bytes = tracemalloc.get_traced_memory()
            tracemalloc.stop()
    assert peak_bytes < MAX_ANSWER_BYTES
    assert asked == ["identity"]


async def test_answer_that_is_not_compressed_is_read() -> None:
    with answering(json.dumps({"choices": []}).encode(), {"Content-Encoding": "identity"}) as (url, _):
        async with model_endpoint(url) as endpoint:
            assert await endpoint.complete({"messages": []}) == {"choices": []}
