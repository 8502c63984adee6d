"""`tasks`: what there is."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

from tests.cli.conftest import COMMAND
from tests.probe.serving import SUITE

if TYPE_CHECKING:
    from pathlib import Path

    from tests.cli.conftest import Shell

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


def test_json_is_what_programs_are_promised(shell: Shell) -> None:
    told: dict[str, Any] = json.loads(shell.run("tasks", "--json").stdout)
    assert set(told) == {"tasks"}
    assert len(told["tasks"]) >= 6
    for task in told["tasks"]:
        assert {name: type(value) for name, value in task.items()} == KEYS
        assert task["runnable"]


def test_a_pipe_gets_a_line_a_task(shell: Shell) -> None:
    done = shell.run("tasks", "--suite", SUITE, "--search", "find-answer")
    assert done.stdout == "find-answer\tprobe\ttrain\tprobe\truns here\n"


def test_a_split_can_be_asked_for(shell: Shell) -> None:
    splits = [line.split("\t")[2] for line in shell.run("tasks", "--split", "train").stdout.splitlines()]
    assert splits
    assert set(splits) == {"train"}


def test_filters_are_those_of_a_draw(shell: Shell) -> None:
    words = ("--needs", "probe", "--without", "late,dead", "--split", "train", "--sample", "4", "--seed", "7")
    done = shell.run("tasks", "--suite", SUITE, *words)
    assert len(done.stdout.splitlines()) == 4
    assert "-server" not in done.stdout
    assert shell.run("tasks", "--suite", SUITE, *words).stdout == done.stdout


def test_tasks_are_ordered_by_the_results_that_are_given(shell: Shell) -> None:
    (shell.folder / "results.jsonl").write_text(
        '{"task": "dense", "success": false}\n{"task": "say-answer", "success": true}\n'
    )
    words = ("--results", "results.jsonl", "--order", "easy_first", "--min-pass-rate", "0")
    told = json.loads(shell.run("tasks", "--suite", SUITE, *words, "--json").stdout)["tasks"]
    assert [(task["id"], task["pass_rate"], task["attempts"]) for task in told] == [
        ("say-answer", 1.0, 1),
        ("dense", 0.0, 1),
    ]


def test_a_split_that_is_not_there_is_told_those_that_are(shell: Shell) -> None:
    said = shell.fault("tasks", "--split", "x", status=1)
    assert said == "there is no split 'x'; the splits are test, train"


def test_words_that_do_not_go_together_are_told(shell: Shell) -> None:
    assert shell.fault("tasks", "--seed", "7", status=1) == "--seed requires --sample"


def test_no_engine_is_needed(shell: Shell) -> None:
    done = shell.run("tasks", "--suite", SUITE, "--provider", "docker", DOCKER_HOST="unix:///nowhere")
    assert done.returncode == 0


def test_a_folder_that_is_no_suite_is_told_what_was_looked_for(shell: Shell) -> None:
    (shell.folder / "stuff").mkdir()
    said = shell.fault("tasks", "--suite", ".", status=1)
    assert f"{shell.folder} is not a checkout in Toolathlon's layout" in said
    assert "looked for tasks/<split>/<task>/task_config.json" in said
    assert said.endswith("found stuff")


def test_a_reader_that_has_enough_is_no_error(shell: Shell) -> None:
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


def test_what_tasks_share_is_listed_with_how_many_run_at_once(shell: Shell, tmp_path: Path) -> None:
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
    told = json.loads(shell.run("tasks", "--suite", str(suite), "--conflicts", "--json").stdout)
    assert {"name": "the account own", "account": "own", "slots": 1, "tasks": ["dense"]} in told["shared"]
    (task,) = json.loads(shell.run("tasks", "--suite", str(suite), "--search", "dense", "--json").stdout)[
        "tasks"
    ]
    assert task["shared"] == ["the conflict group of dense, made-answer", "the account own"]
