"""The server's side of the proxy, with a program that stands in for mitmdump."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.app import host_info
from decathlon_mcp.episodes.extensions import create_web
from decathlon_mcp.errors import SettingsError
from decathlon_mcp.plugins.web import proxy as proxies
from decathlon_mcp.plugins.web.exchanges import Configuration, Counts, SessionSpec
from decathlon_mcp.plugins.web.proxy import (
    WebProxy,
    find_program,
    running_proxy,
)
from decathlon_mcp.settings import read_settings

pytestmark = pytest.mark.anyio

PROGRAM = Path(__file__).with_name("fake_mitmdump.py")


@asynccontextmanager
async def proxy(state: Path) -> AsyncGenerator[WebProxy]:
    with anyio.fail_after(60):
        async with running_proxy(PROGRAM, state, Configuration({}, 1 << 20, 1 << 20)) as running:
            yield running


def spec(session: str, mode: str = "record") -> SessionSpec:
    return SessionSpec(session, "episode", "agent", mode, "/recording")  # type: ignore[arg-type]


async def test_a_proxy_that_dies_is_started_again_with_its_sessions(tmp_path: Path) -> None:
    async with proxy(tmp_path) as running:
        for session in ("one", "two"):
            await running.open(spec(session))
        with pytest.raises(OSError, match="the web proxy does not answer"):
            await running.counts("die")
        while True:
            try:
                assert (await running.counts("episode")).counts == Counts(replayed=2)
                break
            except OSError:
                await anyio.sleep(0.05)


async def test_nothing_is_sent_to_the_ports_of_a_proxy_that_died(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proxies, "RESTART_SECONDS", 3600)
    async with proxy(tmp_path) as running:
        reason = ""
        while "does not run" not in reason:
            try:
                await running.counts("die")
            except OSError as error:  # until the process's end is known
                reason = str(error)
        with pytest.raises(ConnectionRefusedError):
            await running.connect("one", "proxy")


async def test_a_program_that_does_not_start_is_an_error_with_its_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_MITMDUMP", "broken")
    with pytest.raises(SettingsError, match=r"fake_mitmdump\.py did not start: there is something wrong"):
        async with proxy(tmp_path):
            pass


def test_a_missing_program_is_an_error_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    with pytest.raises(SettingsError, match="not installed: install it with `make mitmproxy`"):
        find_program(None)
    with pytest.raises(SettingsError, match="--web-proxy nowhere is not a program"):
        find_program(Path("nowhere"))
    program = tmp_path / ".venv-mitmproxy" / "bin" / "mitmdump"
    program.parent.mkdir(parents=True)
    program.touch(mode=0o755)
    assert find_program(None) == program


def test_the_recorded_web_is_not_for_sandboxes_with_a_network() -> None:
    settings = read_settings({"web": "replay", "network": "outbound"})
    with pytest.raises(SettingsError, match="leave out --network outbound"):
        host_info([], settings)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"web_address": ("nonsense",)}, "expected HOST=ADDRESS"),
        ({"web_authorities": "/nowhere.pem"}, "is not a file"),
    ],
)
async def test_settings_of_the_recorded_web_are_checked(values: dict[str, object], message: str) -> None:
    settings = read_settings({"web": "record", "web_proxy": PROGRAM, **values})
    web = create_web(settings)
    assert web is not None
    with pytest.raises(SettingsError, match=message):
        async with web.running():
            pass
