"""`tasks --check`: what each task lacks, where to get it, and the same words when it is started."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.app import bootstrap
from decathlon_mcp.episodes.access import Principal
from decathlon_mcp.episodes.program_probe import look
from decathlon_mcp.errors import NotRunnableError
from decathlon_mcp.settings import Settings
from tests.probe.serving import SUITE

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

GONE = "name: gone\nparams: {command: no-such-program}\n"
WORDS = ("tasks", "--suite", "lame", "--provider", "local", "--check")


@pytest.fixture
def lame(shell: Shell) -> Path:
    """A suite of two tasks, of which one lacks a service and a program."""
    suite = shell.folder / "lame"
    shutil.copytree(SUITE, suite)
    for task in (suite / "tasks" / "probe").iterdir():
        if task.name not in ("find-answer", "dense"):
            shutil.rmtree(task)
    (suite / "configs/mcp_servers/gone.yaml").write_text(GONE)
    (suite / "tasks/probe/dense/task_config.json").write_text('{"needed_mcp_servers": ["probe", "gone"]}')
    said = "name: lame\nprofile: starter\ncommon: [configs, local_servers, utils]\n"
    (suite / "suite.yaml").write_text(
        f"{said}tasks: {{dense: {{services: [moon]}}}}\npages: {{service.moon: docs/moon.md}}\n"
    )
    return suite


async def said_when_started(suite: Path, state: Path) -> list[str]:
    settings = Settings.model_validate({"suite": (str(suite),), "provider": "local", "state": state})
    async with bootstrap(settings) as episodes:
        assert await look(episodes.sandbox_factory("lame")) is None
        with pytest.raises(NotRunnableError) as raised:
            episodes.start("dense", Principal())
        assert episodes.admission.active == 0
    return raised.value.data["missing"]


@pytest.mark.anyio
async def test_a_check_says_what_is_missing_in_the_words_of_a_start_that_fails(
    shell: Shell, lame: Path
) -> None:
    done = shell.run(*WORDS, "--json")
    assert done.returncode == 1
    told = json.loads(done.stdout)
    dense, found = told["tasks"]
    assert (found["id"], found["runnable"], found["lacks"]) == ("find-answer", True, [])
    assert [(lack["kind"], lack["name"]) for lack in dense["lacks"]] == [
        ("package", "gone"),
        ("service", "moon"),
    ]
    assert dense["lacks"][1]["page"] == "docs/moon.md"
    assert told["unseen"] == {}
    assert await said_when_started(lame, shell.folder / "state") == dense["missing"]


def test_a_person_gets_a_line_a_task_and_what_is_wanted_most(shell: Shell, lame: Path) -> None:
    lines = shell.run(*WORDS).stdout.splitlines()
    assert lines[0] == "✗   dense"
    assert lines[1].startswith("      needs the program no-such-program for the MCP server 'gone'")
    assert "      → docs/moon.md" in lines
    assert "ok  find-answer" in lines
    assert lines[-3:] == [
        "1 of 2 can run here",
        "servers' programs not there: gone (1)",
        "services not there: moon (1)",
    ]


def test_a_check_passes_where_all_that_is_asked_for_can_run(shell: Shell, lame: Path) -> None:
    done = shell.run(*WORDS, "--without", "services")
    assert (done.returncode, done.stdout) == (0, "ok  find-answer\n\n1 of 1 can run here\n")
    assert lame.is_dir()


def test_without_an_engine_all_but_the_programs_is_checked(shell: Shell, lame: Path) -> None:
    words = ("tasks", "--suite", "lame", "--provider", "docker", "--check")
    done = shell.run(*words, DOCKER_HOST="unix:///nowhere")
    assert done.returncode == 1
    assert "1 of 2 can run here\nservices not there: moon (1)\n" in done.stdout
    assert "lame: could not check its servers' programs: no Docker engine answers" in done.stdout
    assert lame.is_dir()
