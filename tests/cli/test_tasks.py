"""`tasks`: listing, filters and shared accounts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import COMMAND, Shell
from tests.probe.serving import SUITE

pytestmark = pytest.mark.slow


KEYS: dict[str, type] = {
    "id": str,
    "suite": str,
    "splits": list,
    "servers": list,
    "local_tools": list,
    "network": bool,
    "runnable": bool,
    "missing": list,
}


def test_json_has_the_documented_members(shell: Shell) -> None:
    output: dict[str, Any] = json.loads(shell.run("tasks", "--json").stdout)
    assert set(output) == {"tasks", "suites"}
    (suite,) = output["suites"]
    assert set(suite) == {"name", "path", "revision"}
    assert suite["name"] == "starter"
    assert len(output["tasks"]) >= 6
    own = {
        task["id"]: metrics for task in output["tasks"] if (metrics := task.pop("metrics", None)) is not None
    }
    assert own == {"audit-expenses": ["approved_total", "claimed_total", "exact", "found"]}
    for task in output["tasks"]:
        assert {name: type(value) for name, value in task.items()} == KEYS
        assert task["runnable"]


def test_a_pipe_gets_one_line_per_task(shell: Shell) -> None:
    done = shell.run("tasks", "--suite", SUITE, "--search", "find-answer")
    assert done.stdout == "find-answer\tprobe\ttrain\tprobe\truns here\n"


def test_filters_apply_to_samples(shell: Shell) -> None:
    arguments = [
        "--needs",
        "probe",
        "--without",
        "late,dead",
        "--split",
        "train",
        "--sample",
        "4",
        "--seed",
        "7",
    ]
    done = shell.run("tasks", "--suite", SUITE, *arguments)
    assert len(done.stdout.splitlines()) == 4
    assert "-server" not in done.stdout
    assert shell.run("tasks", "--suite", SUITE, *arguments).stdout == done.stdout


def test_tasks_can_be_ordered_by_pass_rate(shell: Shell) -> None:
    (shell.folder / "results.jsonl").write_text(
        '{"task": "dense", "success": false}\n{"task": "say-answer", "success": true}\n'
    )
    arguments = ("--results", "results.jsonl", "--order", "easy_first", "--min-pass-rate", "0")
    tasks = json.loads(shell.run("tasks", "--suite", SUITE, *arguments, "--json").stdout)["tasks"]
    assert [(task["id"], task["pass_rate"], task["attempts"]) for task in tasks] == [
        ("say-answer", 1.0, 1),
        ("dense", 0.0, 1),
    ]


def test_filters_that_no_task_fits_are_named(shell: Shell) -> None:
    done = shell.run("tasks", "--needs", "network,files", "--json")
    assert (done.returncode, json.loads(done.stdout)["tasks"]) == (0, [])
    assert done.stderr == "decathlon-mcp: none of the 10 tasks fits --needs network,files\n"


def test_a_folder_that_is_not_a_suite_is_an_error_with_the_expected_layout(shell: Shell) -> None:
    (shell.folder / "stuff").mkdir()
    message = shell.error("tasks", "--suite", ".", status=1)
    assert f"{shell.folder} is not a checkout in Toolathlon's layout" in message
    assert "looked for tasks/<split>/<task>/task_config.json" in message
    assert message.endswith("found stuff")


def test_a_closed_pipe_is_not_an_error(shell: Shell) -> None:
    import subprocess

    done = subprocess.run(
        ["sh", "-c", '"$@" | head -c 1 > /dev/null', "sh", *COMMAND, "tasks", "--json"],
        env=shell.environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stderr == ""


def test_conflicts_lists_accounts_and_groups_with_their_limits(shell: Shell, tmp_path: Path) -> None:
    suite = tmp_path / "suite"
    shutil.copytree(SUITE, suite)
    with (suite / "suite.yaml").open("a") as file:
        file.write("accounts: {line: {tasks: [find-answer, say-answer], slots: 2}, own: [dense]}\n")
        file.write("conflicts: [[dense, made-answer]]\n")
    done = shell.run("tasks", "--suite", str(suite), "--conflicts")
    assert done.stdout.splitlines() == [
        "the account line: 2 at a time of find-answer, say-answer",
        "the account own: one per task, each task once at a time: dense",
        "the conflict group of dense, made-answer: 1 at a time of dense, made-answer",
    ]
    assert done.stderr.startswith("4 of ")
    output = json.loads(shell.run("tasks", "--suite", str(suite), "--conflicts", "--json").stdout)
    assert {"name": "the account own", "account": "own", "slots": 1, "tasks": ["dense"]} in output["shared"]
    (task,) = json.loads(shell.run("tasks", "--suite", str(suite), "--search", "dense", "--json").stdout)[
        "tasks"
    ]
    assert task["shared"] == ["the conflict group of dense, made-answer", "the account own"]
