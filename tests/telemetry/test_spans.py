"""The export of spans: when it is there, what it refuses, and that it never holds up a server's end."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from socket import socket
from typing import Any

import anyio
import pytest

from decathlon_mcp.app import bootstrap
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.http.listening import listen
from decathlon_mcp.plugins.spans import FLUSH_SECONDS, exported_spans
from decathlon_mcp.settings import Settings, read_settings

pytestmark = pytest.mark.anyio

SERVER = (
    "decathlon_mcp.app, decathlon_mcp.http.application, decathlon_mcp.protocol.stdio, "
    "decathlon_mcp.cli.command_line"
)


def settings_in(state: Path, **settings: Any) -> Settings:
    return read_settings({"state": state, "isolation": "none", **settings})


@pytest.fixture
async def silent_collector(monkeypatch: pytest.MonkeyPatch) -> AsyncGenerator[socket]:
    """A collector that accepts connections and never answers."""
    with listen("127.0.0.1", 0) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        yield listener


def test_a_server_without_spans_imports_no_sdk_of_opentelemetry() -> None:
    code = f"import sys, {SERVER}; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run((sys.executable, "-c", code), check=False).returncode == 0


async def test_a_server_that_lacks_the_sdk_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(SettingsError, match=r"--spans requires .* pip install '\.\[otel\]'"):
        async with bootstrap(settings_in(tmp_path, spans=True)):
            pass


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "OTEL_EXPORTER_OTLP_PROTOCOL=grpc: only http/protobuf"),
        ("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1000000", "a variable OTEL_.* does not fit: max_export"),
    ],
)
async def test_a_variable_that_does_not_fit_is_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=message):
        async with exported_spans():
            pass


async def test_a_collector_that_does_not_answer_holds_up_neither_a_server_nor_its_end(
    silent_collector: socket,
) -> None:
    async with exported_spans() as spans:
        started = time.monotonic()
        for _ in range(3000):
            spans.tracer.start_span("call").end()
        assert time.monotonic() - started < FLUSH_SECONDS
        started = time.monotonic()
    assert time.monotonic() - started < 3 * FLUSH_SECONDS
    # Its thread does not try again, which would draw from the process's random numbers.
    silent_collector.close()
    with anyio.fail_after(5):
        while any("Otel" in thread.name for thread in threading.enumerate()):  # noqa: ASYNC110  (a thread has no event)
            await anyio.sleep(0.05)
