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
from collections.abc import Generator
from functools import partial
from pathlib import Path

import anyio
import pytest

from tests.docs.pages import REPOSITORY
from tests.docs.snippets import install

TIMEOUT_SECONDS = 1200
"""Some fifty packages are downloaded into an empty cache, on a machine that may be busy."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_SECONDS)]


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command in an empty home."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DECATHLON_")}
    environment |= {name: str(folder / name) for name in ("HOME", "XDG_STATE_HOME", "UV_CACHE_DIR")}
    return subprocess.run(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        check=False, timeout=TIMEOUT_SECONDS,
    )  # fmt: skip


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
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def test_uvx_plays_the_demo_from_an_index(index: str, tmp_path: Path) -> None:
    tools = anyio.run(install, tmp_path, "uv")
    done = run(
        tools / "uvx",
        *("--index", index, "--python", sys.executable),
        *("--from", "decathlon-mcp[server,starter]", "decathlon-mcp", "demo"),
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "  reward    1.0" in done.stdout.splitlines()


def test_a_bare_installation_answers_help_and_names_the_extra(wheel: Path, tmp_path: Path) -> None:
    programs = anyio.run(install, tmp_path, str(wheel))
    command = programs / "decathlon-mcp"
    helped = run(command, "--help", folder=tmp_path)
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "Only the client is installed" in helped.stdout
    for words in (["demo"], ["serve", "--no-supervisor"], ["doctor"]):
        refused = run(command, *words, folder=tmp_path)
        assert refused.returncode == 1, words
        assert "to install the server" in refused.stderr
        assert "Traceback" not in refused.stderr
    imported = run(programs / "python", "-c", "import decathlon_client", folder=tmp_path)
    assert imported.returncode == 0, imported.stderr
