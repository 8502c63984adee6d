"""A server with sandboxes in its own process: STATE-FOLDER READY-FILE SETTINGS, a JSON object."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio

from decathlon_mcp import app
from decathlon_mcp.http.application import http_app
from decathlon_mcp.http.listening import listen
from decathlon_mcp.http.server import serve_http
from decathlon_mcp.sandboxes.base import SandboxSpec
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import configure_logging
from tests.fakes.driver import FakeCall
from tests.fakes.provider import FakeProvider, FakeSandbox
from tests.probe.serving import SUITE


class _Provider(FakeProvider):
    """Forgets its sandboxes when they are removed; the fake itself keeps them for tests."""

    @asynccontextmanager
    async def open(self, spec: SandboxSpec, **options: Any) -> AsyncGenerator[FakeSandbox]:
        async with super().open(spec, **options) as sandbox:
            try:
                yield sandbox
            finally:
                self.opened.remove(sandbox)


async def _echo(call: FakeCall) -> str:
    return str(call.arguments.get("text", ""))


async def _sleep(call: FakeCall) -> str:
    await anyio.sleep(float(call.arguments["seconds"]))
    return "slept"


async def main(state: Path, ready_file: Path, options: str) -> None:
    configure_logging("warning", "text")
    tools = {"probe": {"echo": _echo, "sleep": _sleep}}

    # `bootstrap` is a server's whole composition; only its provider is another.
    def create_provider(_name: str, owner: str, _settings: Settings) -> _Provider:
        return _Provider(owner, tools=tools)

    app.create_provider = create_provider
    values = {"suite": (SUITE,), "provider": "host", "state": state, **json.loads(options)}
    async with app.bootstrap(Settings.model_validate(values), serves=True) as registry:
        listener = listen("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"

        def announce() -> None:
            ready_file.write_text(url)

        await serve_http(
            http_app(registry),
            listener,
            drain=registry.shutdown.drain,
            on_ready=announce,
            events=registry.events,
        )


if __name__ == "__main__":
    anyio.run(main, Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
