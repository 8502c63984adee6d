"""The core alone: a copy of the sources without `decathlon_mcp/plugins` plays and passes the core's tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("decathlon_mcp", "sandbox", "clients", "tests", "benchmarks", "docs")
SECONDS = 900
CORE_TESTS = (
    *("tests/storage/test_store.py", "tests/episodes/test_registry.py", "tests/episodes/test_set_up.py"),
    *("tests/protocol/test_lobby.py", "tests/http/test_application.py", "tests/e2e/test_episode.py"),
)
"""Of what every episode goes through; none of them uses a plug-in, such as Toolathlon's with its profile."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * SECONDS)]


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    copy = tmp_path_factory.mktemp("core")
    ignored = shutil.ignore_patterns("__pycache__", "node_modules")
    for name in FOLDERS:
        shutil.copytree(REPOSITORY / name, copy / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    shutil.rmtree(copy / "decathlon_mcp" / "plugins")
    return copy


def run(core: Path, *arguments: str) -> str:
    """Run Python in the copy, before whose sources nothing of this repository is found."""
    environment = {
        **{
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("DECATHLON_", "PYTEST_"))
        },
        "PYTHONPATH": os.pathsep.join(str(folder) for folder in (core, core / "sandbox", core / "clients")),
        "XDG_STATE_HOME": str(core / "state"),
    }
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=core,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
    return done.stdout


def test_the_core_has_its_own_commands_only(core: Path) -> None:
    code = "import decathlon_mcp.hooks as hooks; print(hooks.__file__, [*hooks._built_in()])"
    assert run(core, "-c", code).split() == [str(core / "decathlon_mcp" / "hooks.py"), "[]"]
    listed = {*re.findall(r"^│ ([a-z-]+) ", run(core, "-m", "decathlon_mcp.cli", "--help"), re.MULTILINE)}
    assert {"serve", "stdio", "completion", "demo"} <= listed
    assert not listed & {"doctor", "export", "gc", "init", "runs", "play", "run", "tasks", "token", "view"}


def test_the_cores_tests_pass_without_plug_ins(core: Path) -> None:
    marks = "not docker and not slow and not long and not toolathlon"
    # Branches and Docker are plug-ins'.
    words = "not branch and not docker"
    run(core, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", marks, "-k", words, *CORE_TESTS)
