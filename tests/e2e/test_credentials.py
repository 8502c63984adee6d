"""Credentials of the suite: an agent can read only those that its servers need."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.probe.clients import playing
from tests.probe.serving import SUITE, Served, serving

pytestmark = pytest.mark.anyio

TOKENS = """
all_token_key_session = {
    "probe_key": "key-of-the-probe", "other_key": "key-of-another", "file": "configs/used.json"
}
"""
PLACEHOLDERS = 'all_token_key_session = {"probe_key": "XX", "other_key": "XX", "file": "XX"}\n'
TASK_TOKENS = 'all_token_key_session = {"probe_key": "key-of-the-task"}\n'


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The probe suite with credentials that its server needs and credentials that it does not need."""
    suite = tmp_path_factory.mktemp("suites") / "suite"
    shutil.copytree(SUITE, suite)
    configs = suite / "configs"
    (configs / "token_key_session.py").write_text(TOKENS)
    (configs / "token_key_session_example.py").write_text(PLACEHOLDERS)
    (configs / "used.json").write_text("used-account")
    (configs / "unused.json").write_text("unused-account")
    (configs / "folder").mkdir()
    (configs / "folder" / "unused.json").write_text("unused-account")
    server = configs / "mcp_servers" / "probe.yaml"
    config = yaml.safe_load(server.read_text())
    config["params"]["env"] = {"PROBE_KEY": "${token.probe_key}", "PROBE_FILE": "${token.file}"}
    server.write_text(json.dumps(config))
    task = suite / "tasks" / "probe" / "own-token"
    shutil.copytree(suite / "tasks" / "probe" / "find-answer", task)
    (task / "token_key_session.py").write_text(TASK_TOKENS)
    settings = yaml.safe_load((suite / "suite.yaml").read_text())
    names = ("token_key_session.py", "used.json", "unused.json", "folder", "missing.json")
    settings["secrets"] = [f"configs/{name}" for name in names]
    settings["stand_ins"] = {"configs/token_key_session.py": "configs/token_key_session_example.py"}
    (suite / "suite.yaml").write_text(json.dumps(settings))
    return suite


@pytest.fixture(scope="module", params=["host", pytest.param("docker", marks=pytest.mark.docker)])
async def served(
    request: pytest.FixtureRequest,
    suite: Path,
    tmp_path_factory: pytest.TempPathFactory,
    anyio_backend: object,
) -> AsyncGenerator[Served]:
    if request.param == "docker":
        request.getfixturevalue("test_image")
    state = tmp_path_factory.mktemp("state")
    async with serving(state, suite=(str(suite),), provider=request.param) as served:
        yield served


@pytest.mark.parametrize(("task", "key"), [("find-answer", "probe"), ("own-token", "task")])
async def test_servers_get_their_credentials_and_no_file_has_the_others(
    served: Served, task: str, key: str
) -> None:
    async with playing(served, task, "task") as player:

        async def shell(command: str) -> str:
            return await player.text("probe__shell", command=command)

        assert (await shell("echo $PROBE_KEY")).strip() == f"key-of-the-{key}"
        assert await shell("cat ../$PROBE_FILE") == "used-account"
        output: Any = await shell("grep -rlaE 'key-of-|unused-account' .. ; echo searched")
        assert output == "searched\n"
        assert await shell("cat ../configs/token_key_session.py") == PLACEHOLDERS
        assert "token_key_session.py" not in await shell(f"ls ../tasks/probe/{task}")
