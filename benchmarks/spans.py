"""What `--spans` costs a call: two servers, one of which sends spans to a collector that keeps nothing."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from benchmarks.load import closed_loop, echo, for_each, wire_sessions
from benchmarks.running import Run, decathlon

SESSIONS = 4
TASK = "plain"


async def measure_spans(run: Run) -> tuple[float, float]:
    """Seconds of the server's CPU time for each call, with spans and without."""
    with collector() as url:
        environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": url}
        with_spans = await _cpu_seconds(run, environment, spans=True)
    return with_spans, await _cpu_seconds(run, {})


async def _cpu_seconds(run: Run, environment: dict[str, str], **settings: object) -> float:
    async with (
        decathlon(run, environment=environment, **settings) as server,
        wire_sessions([server.task(TASK)] * SESSIONS) as episodes,
    ):
        await for_each([lambda one=one: echo(one, f"{TASK}__echo") for one in episodes])
        load = await closed_loop(
            episodes, f"{TASK}__echo", seconds=run.options.load_seconds, cpu=lambda: server.cpu_seconds
        )
    assert load.cpu_seconds is not None
    return load.cpu_seconds


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  (the base class's name)
        pass


@contextmanager
def collector() -> Generator[str]:
    """A collector in this process, whose time is not the server's. Yields its address."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
