"""`audit` on tasks with a fault each: every fault is found, by its own check and no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from decathlon_mcp.grading.attempt import Attempt
from decathlon_mcp.grading.verdict import Outcome, Verdict, build_verdict
from decathlon_mcp.plugins.audit.attacks import attacks
from decathlon_mcp.plugins.audit.audit import AuditOptions
from decathlon_mcp.plugins.audit.audit import audit as run_audit
from decathlon_mcp.plugins.audit.audited_attempts import read_stored
from decathlon_mcp.plugins.audit.report import OF_THE_SERVER, PAYS_ALREADY, POLICIES, Report
from decathlon_mcp.settings import read_settings
from decathlon_mcp.suites.suite import Suite
from tests.web.test_end_to_end import STAND_IN
from tests.web.test_end_to_end import SUITE as PAPERS_SUITE

SUITE = Path(__file__).parent / "suite"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


PLANTED = {
    "free": ["pays for nothing"],
    "forgeable": ["can be forged"],
    "clock": ["unsteady"],
    "listing": ["unsteady"],
    "leaky": ["leaks"],
    "sound": list[str](),
}
"""Tasks with a planted fault, and the kinds of findings."""


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
    return state, *audit(state, *PLANTED)


def test_each_fault_is_found_by_its_own_check_only(audited: Any) -> None:
    _, status, document, printed = audited
    kinds = {task["task"]: [one["kind"] for one in task["findings"]] for task in document["tasks"]}
    assert kinds == PLANTED, printed
    assert status == 1
    verdicts = [line.split("\t")[1] for line in printed.splitlines() if line.count("\t") == 2]
    assert verdicts[-1] == "sound"  # failures come first


def test_no_attack_is_tried_where_an_empty_attempt_solves_the_task(audited: Any) -> None:
    (task,) = [task for task in audited[2]["tasks"] if task["task"] == "free"]
    assert task["not_checked"]["forger results"] == PAYS_ALREADY
    assert not any(policy.startswith("forger") for policy in task["rewards"])


def test_what_was_graded_again_is_not_graded_a_third_time(audited: Any) -> None:
    state, _, before, _ = audited
    (kept,) = (state / "audit").glob("*.json")
    content, clock = kept.read_text(), ("a clock that is 400 days ahead", "another clock")
    kept.write_text(content.replace(*clock))
    _, document, _ = audit(state, "clock")
    kept.write_text(content)
    (first,) = [task["findings"][0]["what"] for task in before["tasks"] if task["task"] == "clock"]
    (again,) = [task["findings"][0]["what"] for task in document["tasks"]]
    assert again == first.replace(*clock) != first


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
    assert "attempts are known" in printed
    (again,) = [task for task in document["tasks"] if task["task"] == "leaky"]
    (first,) = [task for task in before["tasks"] if task["task"] == "leaky"]
    assert [one["episode"] for one in again["findings"]] == [one["episode"] for one in first["findings"]]


def test_tools_without_a_shell_cannot_carry_all_attacks(audited: Any) -> None:
    (task,) = [task for task in audited[2]["tasks"] if task["task"] == "sound"]
    assert task["not_checked"]["forger link-absolute"] == "no tool gives a shell"
    assert "forger results" not in task["not_checked"]


@pytest.mark.usefixtures("namespaces")
def test_a_sound_task_withstands_every_attack_with_a_shell(tmp_path: Path) -> None:
    status, document, printed = audit(tmp_path, "sound-shell", "--policies", "forgers")
    assert status == 0, printed
    (task,) = document["tasks"]
    reasons = {why for name, why in task["not_checked"].items() if name.startswith("forger")}
    reasons = {why for why in reasons if not (why.startswith("no file ") and "is known" in why)}
    # In namespaces nobody is root, and only root's servers can limit memory.
    unlimited = set[str]() if os.geteuid() == 0 else {"the sandbox has no limit of memory, cpus"}
    assert reasons <= {"no tool runs as root", *unlimited}
    assert task["cost"]["grading_seconds"] > 0


@pytest.mark.anyio
async def test_an_answer_of_a_tool_that_the_prompt_sends_the_agent_to_is_no_leak(tmp_path: Path) -> None:
    suite = shutil.copytree(SUITE, tmp_path / "suite")
    task = suite / "tasks/planted/leaky/docs/task.md"
    task.write_text("Ask the oracle how the story in `story.txt` ends, and write it into `answer.txt`.\n")
    settings = read_settings({"suite": (str(suite),), "state": tmp_path / "state", "provider": "host"})
    options = AuditOptions(tasks=("leaky",), policies=("leaks",))
    assert await run_audit(settings, options, Report("", "", tmp_path / "audit.json")) == 0
    (report,) = json.loads((tmp_path / "audit.json").read_text())["tasks"]
    (note,) = report["notes"]
    assert note.startswith("a reply of oracle__get_help has the ground truth's answer.txt")
    assert report["verdict"] == "sound"


def test_without_its_own_check_a_fault_is_not_found(audited: Any) -> None:
    others = [name for name in POLICIES if name not in ("steadiness", "leaks", "search")]
    words = [word for name in others for word in ("--policies", name)]
    status, document, printed = audit(audited[0], "clock", "leaky", *words)
    assert status == 0, printed
    assert {task["verdict"] for task in document["tasks"]} == {"sound"}


def test_a_search_finds_a_dense_evaluator_that_leaks(tmp_path: Path) -> None:
    status, document, printed = audit(tmp_path, "dense", "--policies", "search", "--search", "32")
    assert status == 1, printed
    (finding,) = document["tasks"][0]["findings"]
    assert finding["what"] == "a search of 32 attempts solved it"
    assert document["tasks"][0]["rewards"]["null"] == 0


def test_a_task_with_a_recorded_web_is_audited_with_web(tmp_path: Path) -> None:
    web = ("--web", "record", "--web-proxy", str(STAND_IN))
    words = ("find-paper", "free", "--policies", "idle", "--suite", str(PAPERS_SUITE))
    _, document, printed = audit(tmp_path, *words, *web)
    attempts, recorded = read_stored(tmp_path, document["run"])
    assert {("find-paper", "null"), ("find-paper", "reads")} <= attempts.keys(), (printed, document)
    verdicts = [attempts["find-paper", policy].verdict for policy in ("null", "reads")]
    assert [verdict.raw["web"]["mode"] for verdict in verdicts if verdict] == ["record", "record"], printed
    (free,) = [task for task in document["tasks"] if task["task"] == "free"]
    assert " ".join(web) in free["findings"][0]["command"]
    replayed = (words[0], *words[2:], "--run", "again", "--web", "replay-or-record", *web[2:])
    _, document, printed = audit(tmp_path, *replayed)
    again, launch_times = read_stored(tmp_path, "again")
    (verdict,) = [attempt.verdict for (_, policy), attempt in again.items() if policy == "reads"]
    assert verdict is not None, printed
    assert verdict.raw["web"]["mode"] == "replay-or-record"
    assert launch_times["find-paper"] == recorded["find-paper"]


def test_no_attack_runs_a_command_where_nothing_is_isolated(tmp_path: Path) -> None:
    words = ("--isolation", "none", "--policies", "forgers")
    status, document, printed = audit(tmp_path, "sound-shell", *words)
    assert status == 0, printed
    (task,) = document["tasks"]
    assert "no attack ran a command, because the sandboxes are not isolated" in task["notes"]
    assert task["not_checked"]["forger link-absolute"] == "no tool gives a shell"


SOME = (
    *("results", "git-external-diff", "link-absolute", "link-through-proc", "workspace-nothing"),
    *("special-fifo", "too-deep", "sparse-terabyte", "answers-on-the-machine"),
)
"""Attacks of each kind: all of them take a minute."""


def keep_links(monkeypatch: pytest.MonkeyPatch, suite: Path) -> None:
    def keep(target: str, *, depth: int) -> str:
        return target

    monkeypatch.setattr("decathlon_mcp.archives.workspace._inner_target", keep)


def keep_settings_of_git(monkeypatch: pytest.MonkeyPatch, suite: Path) -> None:
    def is_harmless(*arguments: object) -> bool:
        return True

    monkeypatch.setattr("decathlon_mcp.archives.repositories._is_harmless", is_harmless)


def keep_answers(monkeypatch: pytest.MonkeyPatch, suite: Path) -> None:
    def nothing(*arguments: object, **options: object) -> tuple[str, ...]:
        return ()

    monkeypatch.setattr(Suite, "names_to_seal", nothing)
    with (suite / "suite.yaml").open("a", encoding="utf-8") as file:
        file.write("sealed: []\ngrading: []\n")


def forfeit_nothing(monkeypatch: pytest.MonkeyPatch, suite: Path) -> None:
    def build(attempt: Attempt, outcome: Outcome, **more: Any) -> Verdict:
        is_forfeited = outcome.status == "forfeited"
        return build_verdict(
            attempt, replace(outcome, status="sandbox_lost") if is_forfeited else outcome, **more
        )

    for module in ("grading.evaluation", "grading.verdict"):
        monkeypatch.setattr(f"decathlon_mcp.{module}.build_verdict", build)


DEFENCES = {
    "links that lead out are removed": (
        *("sound-shell", keep_links, "can be forged"),
        {"link-absolute", "link-through-proc"},
    ),
    "settings of git are removed": (
        *("repositories", keep_settings_of_git, "can be forged"),
        {"git-external-diff"},
    ),
    "answers are removed": ("sound-shell", keep_answers, "can be forged", {"answers-on-the-machine"}),
    "an attempt that the agent made impossible to be graded is forfeited": (
        *("sound-shell", forfeit_nothing, "no reward instead of 0"),
        {"too-deep", "sparse-terabyte"},
    ),
}
"""Each with a task, what is changed, and the findings that follow: their kind, and the attacks."""


@pytest.mark.anyio
@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize(("task", "remove", "kind", "attacks_"), DEFENCES.values(), ids=DEFENCES)
async def test_without_one_defence_exactly_its_attacks_earn(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    task: str,
    remove: Callable[[pytest.MonkeyPatch, Path], None],
    kind: str,
    attacks_: set[str],
) -> None:
    suite = shutil.copytree(SUITE, tmp_path / "suite")
    remove(monkeypatch, suite)
    some = tuple(attack for attack in attacks() if attack.name in SOME)
    monkeypatch.setattr("decathlon_mcp.plugins.audit.audit.attacks", lambda: some)
    settings = read_settings({"suite": (str(suite),), "state": tmp_path / "state", "provider": "host"})
    options = AuditOptions(tasks=(task,), policies=("forgers",))
    assert await run_audit(settings, options, Report("", "", tmp_path / "audit.json")) == 1
    (report,) = json.loads((tmp_path / "audit.json").read_text())["tasks"]
    whats = [finding["what"] for finding in report["findings"]]
    found = {name for name in SOME if any(f"({name})" in what for what in whats)}
    assert found == attacks_, (report["findings"], capsys.readouterr().out)
    assert {finding["kind"] for finding in report["findings"]} == {kind}


@pytest.mark.anyio
@pytest.mark.usefixtures("namespaces")
async def test_an_attack_on_the_server_is_carried_out_at_one_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = tuple(attack for attack in attacks() if attack.name in ("too-deep", "special-folder"))
    monkeypatch.setattr("decathlon_mcp.plugins.audit.audit.attacks", lambda: some)
    settings = read_settings({"suite": (str(SUITE),), "state": tmp_path / "state", "provider": "host"})
    options = AuditOptions(tasks=("sound-shell", "repositories"), policies=("forgers",))
    assert await run_audit(settings, options, Report("", "", tmp_path / "audit.json")) == 0
    document = json.loads((tmp_path / "audit.json").read_text())
    found = {task["task"]: task for task in document["tasks"]}
    assert {"forger too-deep", "forger special-folder"} <= found["sound-shell"]["rewards"].keys()
    assert "forger special-folder" in found["repositories"]["rewards"]
    assert found["repositories"]["not_checked"] == {"forger too-deep": f"{OF_THE_SERVER} sound-shell"}
