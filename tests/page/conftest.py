"""A browser, the tools that check the scripts, and a page for both to look at.

Chromium is the system's, and is not downloaded; the tools are npm packages. Where one of them is missing the
test says so and is skipped, or fails with DECATHLON_REQUIRE_BROWSER=1.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING

import pytest
import uvicorn
from jinja2 import Environment

from tests.conformance import suites
from tests.conftest import skip_or_fail
from tests.page.sites import page_over, with_key
from tests.page.watching import ChangingServer, Watched, fill

if TYPE_CHECKING:
    from playwright.sync_api import Browser

PACKAGES = Path(__file__).parent / "node"
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="session", autouse=True)
def compiled_once() -> Iterator[None]:
    """Compile each template once, and not for each page of a test."""
    codes: dict[tuple[str, str], CodeType] = {}
    compile_ = Environment.compile

    def compiled(environment: Environment, source: str, name: str, filename: str) -> CodeType:
        if (source, name) not in codes:
            codes[source, name] = compile_(environment, source, name, filename)
        return codes[source, name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Environment, "compile", compiled)
        yield


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """A state folder without episodes, with the key of its page."""
    return with_key(tmp_path)


@pytest.fixture(scope="session")
def node_modules(pytestconfig: pytest.Config) -> Path:
    """The npm packages of `node/package-lock.json`. All test processes, and later runs, share them."""
    assert pytestconfig.cache is not None
    try:
        return suites.install(pytestconfig.cache.mkdir("page"), PACKAGES) / "node_modules"
    except suites.NotInstalledError as error:
        skip_or_fail(str(error), "BROWSER")


# Not for the session: as long as it is open, no asynchronous test can run in this thread.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser, as Playwright has it."""
    if not Path(CHROMIUM).exists():
        skip_or_fail(f"there is no {CHROMIUM}; on Debian: apt-get install chromium", "BROWSER")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A page with runs, a long episode, and a server whose live episodes the test changes."""
    state, server = with_key(tmp_path_factory.mktemp("watched")), ChangingServer()
    fill(state, server)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(page_over(state, live=server.feed), log_level="error", lifespan="off")
        web = uvicorn.Server(config)
        thread = threading.Thread(target=web.run, kwargs={"sockets": [listener]})
        thread.start()
        yield Watched(f"http://decathlon.localhost:{listener.getsockname()[1]}", state, server)
        server.stopping = web.should_exit = True
        thread.join(20)
