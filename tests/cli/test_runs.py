"""`runs`, `diff` and the filters of `episodes`, over a state folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.conftest import Shell
from tests.history.stored_episodes import LIVE, LOST, add_episode, add_run


@pytest.fixture
def state(shell: Shell) -> Path:
    folder = Path(shell.environment["XDG_STATE_HOME"]) / "decathlon-mcp"
    folder.mkdir(parents=True)
    return folder


def test_runs_are_listed_with_their_success_over_all_finished_episodes(shell: Shell, state: Path) -> None:
    add_run(state, "monday", {"a": [1.0, 0.5, LOST, LIVE], "b": [0.0]})
    add_episode(state, "later", started_at=2.0, labels={"run": "tuesday"})
    lines = [line.split("\t") for line in shell.run("runs").stdout.splitlines()]
    assert [line[:7] for line in lines] == [
        ["tuesday", "1", "0", "0", "1.000", "1.000", "1"],
        ["monday", "5", "1", "1", "0.250", "0.500", "2"],
    ]
    listed = json.loads(shell.run("runs", "--json").stdout)["runs"]
    assert [(run["run"], run["episodes"], run["lost"], run["success_of_all"]) for run in listed] == [
        ("tuesday", 1, 0, 1.0),
        ("monday", 5, 1, 0.25),
    ]


def test_a_run_is_shown_by_task_with_what_was_lost(shell: Shell, state: Path) -> None:
    add_run(state, "monday", {"a": [1.0, 0.0, LOST, 1.0], "b": [0.0]})
    lines = shell.run("runs", "monday").stdout.splitlines()
    assert lines == [
        "a\t4\t0\t1\t0.500\t0.667\t2.0\t3.0",
        "b\t1\t0\t0\t0.000\t0.000\t2.0\t3.0",
        "success rate, mean over tasks: 0.250 ± 0.250",
        "reward, mean over tasks: 0.333 ± 0.333",
        "pass@1 0.250 ± 0.250, pass^1 0.250 ± 0.250",
        "pass@2 0.833, pass^2 0.167; fewer than 2 episodes: b",
        "pass@4 1.000, pass^4 0.000; fewer than 4 episodes: b",
        "lost: 1, its evaluation gave no verdict (evaluator_error)",
    ]
    report = json.loads(shell.run("runs", "monday", "--json").stdout)
    assert report["success_rate"] == {"mean": 0.25, "standard_error": 0.25, "count": 2}
    assert [task["task"] for task in report["tasks"]] == ["a", "b"]


def test_two_runs_are_compared_by_task(shell: Shell, state: Path) -> None:
    add_run(state, "monday", {"a": [1.0, 0.0], "b": [0.0], "c": [1.0]})
    add_run(state, "tuesday", {"a": [1.0, 1.0], "b": [1.0]})
    assert shell.run("runs", "monday", "--compare", "tuesday").stdout.splitlines() == [
        "a\t0.500\t2\t1.000\t2\t+0.500",
        "b\t0.000\t1\t1.000\t1\t+1.000",
        "c\t1.000\t1\t-\t0\t-",
        (
            "difference of the success rates, tuesday - monday: +0.750 ± 0.250 "
            "(paired over 2 tasks, with its standard error)"
        ),
    ]
    document = json.loads(shell.run("runs", "monday", "--compare", "tuesday", "--json").stdout)
    assert document["difference"] == {"mean": 0.75, "standard_error": 0.25, "count": 2}
    error = shell.error("runs", "monday", "--compare", "friday", status=2)
    assert "is of run 'friday'; `decathlon-mcp runs` lists the runs" in error
    assert "is of run 'mondy'; did you mean monday?" in shell.error("runs", "mondy", status=2)


def test_episodes_are_filtered_by_run_label_task_and_failure(shell: Shell, state: Path) -> None:
    labels = {"run": "monday", "model": "m=1"}
    passed = add_episode(state, "one", labels=labels)
    failed = add_episode(state, "two", labels=labels, reward=0.0, task="other")
    lost = add_episode(state, "three", labels={"run": "monday"}, reward=LOST)
    live = add_episode(state, "four", labels={"run": "monday"}, reward=LIVE)
    for number in range(25):
        add_episode(state, f"old-{number}", started_at=0.5)

    def listed(*options: str) -> set[str]:
        return {line.split("\t")[0] for line in shell.run("show", *options).stdout.splitlines()}

    assert listed("--run", "monday") == {passed, failed, lost, live}
    assert listed("--label", "model=m=1", "--label", "run=monday") == {passed, failed}
    assert listed("--run", "monday", "--failed") == {failed, lost}
    assert listed("--task", "other") == {failed}
    assert len(listed()) == 1 + 20
    assert len(listed("--all")) == 4 + 25
    branch = add_episode(
        state, "five", labels={"run": "monday"}, branch={"episode": "0123456789abcdef", "at": 1}
    )
    replay = add_episode(state, "six", labels={"run": "monday", "replay_of": passed}, reward=LIVE)
    # One that plays has a sandbox, and no summary has it.
    assert listed("--run", "monday") == {passed, failed, lost, live, replay}
    assert listed("--run", "monday", "--all") == {passed, failed, lost, live, replay, branch}
    document = shell.run("show", "--label", "model=m=1", "--failed", "--json").stdout
    (shown,) = json.loads(document)["episodes"]
    assert (shown["id"], shown["labels"], shown["success"]) == (failed, labels, False)
    assert "filters list several" in shell.error("show", passed, "--failed", status=1)
    error = shell.error("show", "--label", "model", status=2)
    assert error == "--label: the label 'model' is not NAME=VALUE"
    done = shell.run("show", "--run", "sunday")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == f"decathlon-mcp: no episode in {state} fits\n"


def test_texts_of_clients_cannot_change_the_terminal(shell: Shell, state: Path) -> None:
    add_episode(state, "one", task="\x1b[31mtask\n", labels={"run": "\u202erun\x07"})
    for command in (["runs", "\u202erun\x07"], ["show"], ["runs", "--json"], ["show", "--json"]):
        output = shell.run(*command).stdout
        assert output
        assert "\x1b" not in output
        assert "\x07" not in output
        if "--json" not in command:
            assert "\u202e" not in output


@pytest.mark.parametrize(
    "words",
    [
        ("show", "nosuch"),
        ("replay", "nosuch"),
        ("regrade", "nosuch"),
        ("export", "nosuch", "--to", "html", "--output", "page.html"),
        ("runs", "nosuch", "--leaderboard"),
    ],
)
def test_an_episode_or_run_that_there_is_not_is_a_wrong_command_line(
    shell: Shell, state: Path, words: tuple[str, ...]
) -> None:
    add_run(state, "monday", {"a": [1.0]})
    done = shell.run(*words)
    assert done.returncode == 2, done.stderr
    assert "nosuch" in done.stderr + done.stdout
