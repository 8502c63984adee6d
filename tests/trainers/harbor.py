"""`docs/trainers.md` with Harbor itself: it loads every exported task, and plays one.

Not collected by default, because it installs Harbor. Run it by name:

    python -m pytest tests/trainers/harbor.py

Playing needs a Docker engine and `docker compose` 2, whose plugin may be in `DOCKER_CONFIG/cli-plugins`:
Debian 13 has it in the package `docker-compose`. The image of the server is built on the tests' image, in
which agents run too.
"""

from __future__ import annotations

import json
import os
import subprocess
from functools import partial
from pathlib import Path

import anyio
import pytest

from decathlon_mcp.cli.command_line import run
from decathlon_mcp.starter import oracle_ids
from tests.docs.pages import block
from tests.docs.snippets import INSTALL_SECONDS, install
from tests.packaging.test_container import container_image, docker

__all__ = ["container_image"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * INSTALL_SECONDS)]

LOAD = """
import json, sys
from pathlib import Path
from harbor.models.task.task import Task
from harbor.models.task.verifier_mode import resolve_verifier_environment_definition

for folder in sorted(Path(sys.argv[1]).iterdir()):
    assert Task.is_valid_dir(folder)
    task = Task(folder)
    (server,) = task.config.environment.mcp_servers
    (hook,) = task.config.verifier.collect
    verifier = resolve_verifier_environment_definition(task.config, task.paths)
    print(json.dumps([
        task.name, task.instruction, server.transport, server.url, hook.service,
        [artifact.service for artifact in task.config.artifacts], str(verifier.directory.relative_to(folder)),
    ]))
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, python_3_12: str) -> Path:
    folder = tmp_path_factory.mktemp("harbor")
    return anyio.run(partial(install, folder, "harbor", python=python_3_12))


def export(out: Path, *options: str) -> None:
    assert run(["export", "--to", "harbor", "--output", str(out), *options]) == 0


def test_harbor_loads_every_exported_task(programs: Path, tmp_path: Path) -> None:
    out = tmp_path / "harbor-tasks"
    export(out)
    result = subprocess.run(
        [programs / "python", "-c", LOAD, out],
        check=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "HARBOR_TELEMETRY": "0"},
    )
    loaded = [json.loads(line) for line in result.stdout.splitlines()]
    assert [task[0] for task in loaded] == oracle_ids()
    for name, instruction, *config in loaded:
        assert instruction == (out / name / "instruction.md").read_text("utf-8")
        assert config == ["streamable-http", "http://decathlon:8765/mcp", "decathlon", ["decathlon"], "tests"]


def test_the_pages_commands_play_a_task_to_both_rewards(
    programs: Path, tmp_path: Path, container_image: str, test_image: str
) -> None:
    if docker("compose", "version", check=False).returncode:
        pytest.skip("no `docker compose` here")
    out = tmp_path / "harbor-tasks"
    export(out, "--search", "reactor", "--server-image", container_image, "--agent-image", test_image)
    result = subprocess.run(
        ["bash", "-e", "-c", block("docs/trainers.md", "Harbor", "bash").text],
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    rewards: dict[str, str] = {}
    for trial in tmp_path.glob("jobs/*/tune-reactor__*"):
        config = json.loads((trial / "config.json").read_text("utf-8"))
        rewards[config["agent"]["name"]] = (trial / "verifier" / "reward.txt").read_text("utf-8").strip()
        verdict = json.loads((trial / "artifacts" / "state" / "verdict.json").read_text("utf-8"))
        assert verdict["isolation"] == "namespaces"
    assert rewards == {"oracle": "1.0", "nop": "0.0"}
    assert docker("ps", "--all", "--quiet", "--filter", "name=tune-reactor__").stdout == ""
