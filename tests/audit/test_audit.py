"""`audit` on tasks with a fault each: every fault is found, by its own check and no other."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.plugins.audit.audit import AuditOptions
from decathlon_mcp.plugins.audit.audit import audit as run_audit
from decathlon_mcp.plugins.audit.report import Report
from decathlon_mcp.settings import read_settings

SUITE = Path(__file__).parent / "suite"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def audit(state: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """The exit status, the JSON document and what was printed."""
    file = state / "audit.json"
    command = [sys.executable, "-m", "decathlon_mcp.cli", "audit", "--suite", str(SUITE), "--json", str(file)]
    done = subprocess.run(
        [*command, "--state", str(state), *arguments], capture_output=True, text=True, check=False
    )
    document: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return done.returncode, document, done.stdout + done.stderr


@pytest.fixture(scope="module")
def audited(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, dict[str, Any], str]:
    state = tmp_path_factory.mktemp("state")
    return state, *audit(state, "sound", "free", "clock", "listing", "leaky", "forgeable")


def test_each_fault_is_found_by_its_own_check_only(audited: Any) -> None:
    _, status, document, printed = audited
    kinds = {task["task"]: [one["kind"] for one in task["findings"]] for task in document["tasks"]}
    assert kinds == {
        "free": ["pays for nothing"],
        "forgeable": ["can be forged"],
        "clock": ["unsteady"],
        "listing": ["unsteady"],
        "leaky": ["leaks"],
        "sound": [],
    }, printed
    assert status == 1
    verdicts = [line.split("\t")[1] for line in printed.splitlines() if line.count("\t") == 2]
    assert verdicts[-1] == "sound"  # failures come first


def test_the_command_of_a_finding_shows_it(audited: Any) -> None:
    state, _, document, _ = audited
    (task,) = [task for task in document["tasks"] if task["task"] == "forgeable"]
    (finding,) = task["findings"]
    words = finding["command"].split(" ", 1)[1]
    shown = subprocess.run(
        [sys.executable, "-m", "decathlon_mcp.cli", *words.split()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "the verdict was reward 1, and is reward 1" in shown.stdout, shown.stderr
    assert str(state) in words


def test_what_was_played_is_not_played_again(audited: Any) -> None:
    state, _, before, _ = audited
    status, document, printed = audit(state, "sound", "leaky")
    assert status == 1
    # The empty attempt is played again, since its cost is measured.
    assert "attempts are known" in printed
    (again,) = [task for task in document["tasks"] if task["task"] == "leaky"]
    (first,) = [task for task in before["tasks"] if task["task"] == "leaky"]
    assert [one["episode"] for one in again["findings"]] == [one["episode"] for one in first["findings"]]


def test_tools_without_a_shell_cannot_carry_all_attacks(audited: Any) -> None:
    (task,) = [task for task in audited[2]["tasks"] if task["task"] == "sound"]
    assert task["not_checked"]["forger link-absolute"] == "no tool gives a shell"
    assert "forger results" not in task["not_checked"]


def test_a_sound_task_withstands_every_attack_with_a_shell(tmp_path: Path) -> None:
    status, document, printed = audit(tmp_path, "sound-shell")
    assert status == 0, printed
    (task,) = document["tasks"]
    reasons = {why for name, why in task["not_checked"].items() if name.startswith("forger")}
    assert reasons <= {"no tool runs as root"}  # in namespaces nobody is root
    assert task["cost"]["grading_seconds"] > 0


def test_a_policy_that_there_is_not_is_refused(tmp_path: Path) -> None:
    status, document, printed = audit(tmp_path, "--policies", "magic")
    assert (status, document) == (2, {})
    assert "--policies" in printed
    assert "idle" in printed


@pytest.mark.anyio
async def test_without_one_defence_exactly_its_attacks_earn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The defence: a link of the workspace that leads out of it does not reach the grader."""

    def keep(target: str, *, depth: int) -> str:
        return target

    monkeypatch.setattr("decathlon_mcp.archives.workspace._inner_target", keep)
    settings = read_settings({"suite": (str(SUITE),), "state": tmp_path, "provider": "host"})
    options = AuditOptions(tasks=("sound-shell",), policies=("forgers",))
    assert await run_audit(settings, options, Report("", "", tmp_path / "audit.json")) == 1
    (task,) = json.loads((tmp_path / "audit.json").read_text())["tasks"]
    earned = {policy for policy, reward in task["rewards"].items() if reward and policy.startswith("forger ")}
    assert earned, capsys.readouterr().out
    assert all(policy.startswith(("forger link-", "forger workspace-a-link")) for policy in earned), earned
    assert {finding["kind"] for finding in task["findings"]} == {"can be forged"}
