"""`tasks --check`: what each task lacks, where to read about it, and the same messages at a start."""

from __future__ import annotations

import json
import shutil
from datetime import UTC, datetime
from pathlib import Path

import pytest

from decathlon_mcp.app import bootstrap
from decathlon_mcp.cli.readiness import require_ready
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import NotRunnableError
from decathlon_mcp.plugins.web.exchanges import Counts
from decathlon_mcp.plugins.web.recorded_web import recording_id
from decathlon_mcp.plugins.web.recording import FOLDER, Recording, Rollout
from decathlon_mcp.settings import read_settings
from decathlon_mcp.starter import TEMPLATE_TASK, copy_template
from decathlon_mcp.suites.loading import load_suite
from tests.cli.conftest import Shell
from tests.probe.serving import SUITE

pytestmark = pytest.mark.slow


MISSING_PROGRAM = "name: gone\nparams: {command: no-such-program}\n"
CHECK = ("tasks", "--suite", "limited", "--provider", "host", "--isolation", "none", "--check")


@pytest.fixture
def limited(shell: Shell) -> Path:
    """A suite of two tasks; one of them lacks a service and a program."""
    suite = shell.folder / "limited"
    shutil.copytree(SUITE, suite)
    for task in (suite / "tasks" / "probe").iterdir():
        if task.name not in ("find-answer", "dense"):
            shutil.rmtree(task)
    (suite / "configs/mcp_servers/gone.yaml").write_text(MISSING_PROGRAM)
    (suite / "tasks/probe/dense/task_config.json").write_text('{"needed_mcp_servers": ["probe", "gone"]}')
    header = "name: limited\nprofile: starter\ncommon: [configs, local_servers, utils]\n"
    (suite / "suite.yaml").write_text(
        f"{header}tasks: {{dense: {{services: [moon]}}}}\npages: {{service.moon: docs/moon.md}}\n"
    )
    return suite


def record(path: Path, name: str, state: Path) -> None:
    """Store a recording of a task's web that answered three of four requests of a rollout."""
    suite = load_suite(str(path))
    belongs_to = recording_id(suite, suite.tasks[name])
    with Recording.create(state / FOLDER, belongs_to, datetime.now(UTC)) as recording:
        recording.add_rollout(Rollout("1", "replay", "requests", Counts(replayed=3, missed=1), "2026-01-01"))


async def messages_at_a_start(suite: Path, state: Path) -> list[str]:
    settings = read_settings(
        {"suite": (str(suite),), "provider": "host", "isolation": "none", "state": state}
    )
    async with bootstrap(settings) as episodes:
        await require_ready(episodes, settings.max_sandboxes)
        with pytest.raises(NotRunnableError) as raised:
            episodes.start("dense", Principal())
        assert episodes.admission.active == 0
    return raised.value.data["missing"]


@pytest.mark.anyio
async def test_check_reports_what_a_failed_start_reports(shell: Shell, limited: Path) -> None:
    state = shell.folder / "state"
    record(limited, "find-answer", state)
    done = shell.run(*CHECK, "--json", "--state", str(state))
    assert done.returncode == 1
    output = json.loads(done.stdout)
    dense, find_answer = output["tasks"]
    assert find_answer["recorded"] == {"hit_rate": 0.75, "runnable": False}
    assert "recorded" not in dense
    assert (find_answer["id"], find_answer["runnable"], find_answer["lacks"]) == ("find-answer", True, [])
    assert [(lack["kind"], lack["name"]) for lack in dense["lacks"]] == [
        ("package", "gone"),
        ("service", "moon"),
    ]
    assert dense["lacks"][1]["page"] == "docs/moon.md"
    assert (dense["how"]["way"], find_answer["how"]["way"]) == ("cannot run", "ready")
    assert output["findings"] == []
    assert await messages_at_a_start(limited, state) == dense["missing"]


def test_text_output_has_a_line_per_task_and_a_summary(shell: Shell, limited: Path) -> None:
    lines = shell.run(*CHECK).stdout.splitlines()
    assert lines[0] == "✗   dense: cannot run: the program of the MCP server gone, the service moon"
    assert lines[1].startswith("      needs the program no-such-program for the MCP server 'gone'")
    assert "      → docs/moon.md" in lines
    assert "ok  find-answer: ready" in lines
    assert lines[-6:-1] == [
        "1 of 2 can run here",
        "  1 ready",
        "  1 cannot run",
        "missing server programs: gone (1)",
        "missing services: moon (1)",
    ]
    assert lines[-1].startswith(f"limited: {limited} (")


def test_a_rubric_function_that_cannot_be_imported_is_reported_with_file_and_line(shell: Shell) -> None:
    copy_template(shell.folder / "mine")
    evaluator = shell.folder / "mine/tasks/mine" / TEMPLATE_TASK / "evaluation/evaluator.py"
    evaluator.write_text("print('noise')\nimport no_such_module\n\ndef evaluate(workspace): ...\n")
    done = shell.run("tasks", "--suite", "mine", "--check")
    assert done.returncode == 1
    assert "it cannot be imported: ModuleNotFoundError: No module named 'no_such_module'" in done.stdout
    assert "evaluation/evaluator.py, line 2)" in done.stdout
    evaluator.write_text("def evaluate(workspace, colour): ...\n")
    ready = shell.run("doctor", "--suite", "mine", "--port", "0")
    assert ready.returncode == 1
    assert "its parameter 'colour' is none of agent_workspace, groundtruth" in ready.stdout
    assert "tasks: 0 of 1 can run here" in ready.stdout
    assert ready.stdout.endswith("Not ready: rubrics of mine, tasks\n")


def test_a_program_outside_of_the_sandbox_is_not_visible_there(shell: Shell) -> None:
    copy_template(shell.folder / "mine")
    program = shell.folder / "server"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    server = shell.folder / "mine/configs/mcp_servers/shop.yaml"
    server.write_text(server.read_text().replace("command: python3", f"command: {program}"))
    arguments = ("tasks", "--suite", "mine", "--check", "--provider", "host")
    if "not visible in the sandbox" not in (output := shell.run(*arguments).stdout):
        pytest.skip(f"no namespaces here: {output}")
    assert f"needs the program {program} for the MCP server 'shop', which is not visible" in output
    assert "ready" in shell.run(*arguments, "--isolation", "none").stdout


def test_an_evaluator_that_python_cannot_run_is_named(shell: Shell) -> None:
    copy_template(shell.folder / "mine")
    task = shell.folder / "mine/tasks/mine" / TEMPLATE_TASK
    shutil.copytree(task, task.with_name("dot.v2"))
    shutil.copytree(task, task.with_name("typo"))
    (task.with_name("typo") / "evaluation/main.py").write_text("import json\nimport no_such_module\n")
    done = shell.run("tasks", "--suite", "mine", "--check")
    assert done.returncode == 1
    assert (
        "typo: the evaluator: tasks/mine/typo/evaluation/main.py, line 2: there is no module no_such_m"
        in (done.stdout)
    )
    assert "Python finds no module in a folder with a dot in its name: rename dot.v2" in done.stdout
    assert f"ok  {TEMPLATE_TASK}" in done.stdout
