"""The built wheel as users get it: by `uvx` from an index on loopback, and by a bare `pip install`.

These tests download the packages that the wheel needs, so they are not collected by default:

    python -m pytest tests/packaging/publishing.py
"""

from __future__ import annotations

import http.server
import os
import subprocess
import sys
import threading
import venv
from collections.abc import Generator
from functools import partial
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_SECONDS = 1200
"""Some fifty packages are downloaded into an empty cache, on a machine that may be busy."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_SECONDS)]


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty home."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    folders = {name: str(folder / name.lower()) for name in ("HOME", "XDG_STATE_HOME", "UV_CACHE_DIR")}
    return subprocess.run(
        command,
        cwd=folder,
        env={**inherited, **folders},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_SECONDS,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, in the folder that an index serves: `simple/decathlon-mcp/`."""
    folder = tmp_path_factory.mktemp("index") / "simple" / "decathlon-mcp"
    folder.mkdir(parents=True)
    built = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(built, cwd=REPOSITORY, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture
def index(wheel: Path) -> Generator[str]:
    """The address of an index that has this wheel only. A listing of the folder is a page of an index."""
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(wheel.parents[2]))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/simple"
        finally:
            server.shutdown()
            thread.join()


def test_uvx_plays_the_demo_from_an_index(index: str, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    venv.create(tools, with_pip=True)
    installed = run(tools / "bin" / "pip", "install", "--quiet", "uv", folder=tmp_path)
    assert installed.returncode == 0, installed.stderr
    done = run(
        tools / "bin" / "uvx",
        *("--index", index, "--python", sys.executable),
        *("--from", "decathlon-mcp[server,starter]", "decathlon-mcp", "demo"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "  reward    1.0" in done.stdout.splitlines()


def test_a_bare_installation_answers_help_and_names_the_extra(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=True)
    installed = run(tmp_path / "bare" / "bin" / "pip", "install", "--quiet", str(wheel), folder=tmp_path)
    assert installed.returncode == 0, installed.stderr
    command = tmp_path / "bare" / "bin" / "decathlon-mcp"
    helped = run(command, "--help", folder=tmp_path)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "Only the client is installed" in helped.stdout
    for words in (["demo"], ["serve", "--no-supervisor"], ["doctor"]):
        refused = run(command, *words, folder=tmp_path)
        assert refused.returncode == 1, words
        assert "to install the server" in refused.stderr
        assert "Traceback" not in refused.stderr
    imported = run(tmp_path / "bare" / "bin" / "python", "-c", "import decathlon_client", folder=tmp_path)
    assert imported.returncode == 0, imported.stderr
