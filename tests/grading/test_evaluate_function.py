"""A function `evaluate` in an evaluator, which gives metrics without a rubric that names it."""

from __future__ import annotations

from pathlib import Path

import pytest

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.grading.evaluator_source import MAX_SOURCE_BYTES
from decathlon_mcp.grading.rubric import load_rubric
from tests.grading.evaluators import ARGUMENTS, evaluator
from tests.grading.support import SandboxGrader, make_attempt, make_call, rubric_text, write_suite

pytestmark = pytest.mark.anyio

FUNCTION = "def evaluate(workspace):\n    return {'a': 1}\n"
MAIN_BLOCK = "if __name__ == '__main__':\n    raise SystemExit(1)\n"
PAPER_FOUND = """
from pathlib import Path

def evaluate(workspace: Path) -> dict[str, float]:
    paper = workspace / "paper.pdf"
    return {"downloaded": paper.is_file(), "pages": paper.stat().st_size / 4 if paper.is_file() else 0}
"""


def found(tmp_path: Path, main: str, evaluator_file: str = "") -> tuple[str | None, bool]:
    """The function that is found, and whether it decides about success."""
    suite = write_suite(tmp_path / "checkout", evaluator(main, **{"evaluation/evaluator.py": evaluator_file}))
    rubric = load_rubric(suite, suite.tasks["paper"])
    return (None, False) if rubric is None else (rubric.function, rubric.decides)


@pytest.mark.parametrize(
    "prefix",
    [
        "'''Doc.'''\nimport json\n",
        "import logging\nlogging.basicConfig(level='INFO')\n",
        "try:\n    import numpy\nexcept ImportError:\n    raise\n",
        "class Check:\n    def run(self): raise ValueError\n",
    ],
)
def test_module_that_only_defines_names_leaves_success_to_its_function(tmp_path: Path, prefix: str) -> None:
    assert found(tmp_path, prefix + FUNCTION) == ("evaluation/main.py:evaluate", True)


@pytest.mark.parametrize("main", [FUNCTION + MAIN_BLOCK, "from .evaluator import evaluate\n" + MAIN_BLOCK])
def test_module_with_a_main_block_keeps_its_exit_code(tmp_path: Path, main: str) -> None:
    function, decides = found(tmp_path, main, FUNCTION)
    assert function is not None
    assert not decides


@pytest.mark.parametrize(
    "end",
    [
        "import sys\nsys.exit(evaluate(sys.argv[2])['a'] < 1)\n",
        "for name in ('a', 'b'):\n    check(name)\n",
        "with open('x') as file:\n    print(file.read())\n",
        "import sys\nstatus = evaluate('.')['a'] and sys.exit(1)\n",
    ],
)
def test_function_whose_module_would_run_when_imported_is_not_called(tmp_path: Path, end: str) -> None:
    assert found(tmp_path, FUNCTION + end) == (None, False)
    # Another file can have it, and the exit code stays that of the module that runs.
    assert found(tmp_path, end, FUNCTION) == ("evaluation/evaluator.py:evaluate", False)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def evaluate(task_dir):\n    return {'a': 1}", "its parameter 'task_dir' is none of workspace,"),
        ("@cached\ndef evaluate(workspace):\n    return {'a': 1}", "a decorator"),
        ("def evaluate(workspace):\n    return True", "not always return a dict"),
        ("def evaluate(workspace):\n    print(workspace)", "returns no dict"),
    ],
)
def test_function_that_gives_no_metrics_is_used_by_no_evaluator_and_is_an_error_where_nothing_else_judges(
    tmp_path: Path, source: str, reason: str
) -> None:
    assert found(tmp_path, f"{source}\n{MAIN_BLOCK}") == (None, False)
    with pytest.raises(SuiteError, match="does nothing when it is run, and evaluation") as error:
        found(tmp_path, source)
    assert reason in error.value.message


@pytest.mark.parametrize("source", ["x = 1\n" * (MAX_SOURCE_BYTES // 6 + 1) + FUNCTION, FUNCTION + "def"])
def test_file_that_cannot_be_parsed_has_no_function(tmp_path: Path, source: str) -> None:
    assert found(tmp_path, source) == (None, False)


@pytest.mark.parametrize(
    ("workspace", "success", "reward"),
    [({"paper.pdf": "12"}, False, 0.75), ({"paper.pdf": "1234"}, True, 1.25)],
)
async def test_evaluator_that_only_returns_a_dict_pays_by_weights(
    grader: SandboxGrader, workspace: dict[str, str], success: bool, reward: float
) -> None:
    weights = {"downloaded": 0.5, "pages": 0.5, "success": 0.25}
    files = evaluator(PAPER_FOUND, **{"rubric.yaml": rubric_text(weights=weights)})
    verdict = await grader.verdict(files, workspace, attempt=make_attempt(calls=[]))
    assert (verdict.status, verdict.success, verdict.reward) == ("scored", success, reward), verdict
    assert verdict.weights == weights
    assert grader.networks == ["none"], "the exit code says nothing, so the module is not run"


async def test_without_weights_the_reward_is_whether_every_metric_is_at_least_1(
    grader: SandboxGrader,
) -> None:
    verdict = await grader.verdict(evaluator(PAPER_FOUND), {"paper.pdf": "1234"})
    assert (verdict.success, verdict.reward, verdict.weights) == (True, 1.0, {})
    assert verdict.metrics == {
        "calls": 2,
        "failed_calls": 1,
        "tools_used": 2,
        **dict.fromkeys(("success", "downloaded", "pages"), 1.0),
        "tool_calls(files__read)": 1,
        "tool_calls(files__write)": 1,
        "failed_calls(files__write)": 1,
    }


@pytest.mark.parametrize(
    ("returned", "reward"),
    [("{'success': True, 'a': 0}", 1.0), ("{'success': 0.5, 'a': 1}", 0.0), ("{}", 0.0)],
)
async def test_success_is_the_key_of_that_name(grader: SandboxGrader, returned: str, reward: float) -> None:
    source = f"def evaluate(workspace):\n    return {returned}"
    verdict = await grader.verdict(evaluator(source))
    assert (verdict.success, verdict.reward) == (bool(reward), reward), verdict


@pytest.mark.parametrize(("success", "code"), [(True, 1), (False, 0)])
async def test_success_that_contradicts_the_exit_code_forfeits_the_attempt(
    grader: SandboxGrader, success: bool, code: int
) -> None:
    source = f"def evaluate(workspace):\n    return {{'success': {success}}}"
    main = f"{ARGUMENTS}\nraise SystemExit({code})"
    verdict = await grader.verdict(evaluator(main, **{"evaluation/evaluator.py": source}))
    assert (verdict.status, verdict.reward) == ("forfeited", 0.0), verdict
    assert "evaluation/evaluator.py:evaluate returns success" in verdict.detail


async def test_program_of_the_agent_that_answers_its_two_runs_differently_does_not_get_rid_of_the_reward(
    grader: SandboxGrader,
) -> None:
    # It knows that the answer is yes or no, and not which.
    program = """
import os
with open(f"/proc/{os.getppid()}/cmdline") as command:
    print("yes" if "harness.py" in command.read() else "no")
"""
    source = """
import subprocess, sys

def evaluate(workspace):
    run = subprocess.run([sys.executable, f"{workspace}/answer.py"], capture_output=True, text=True)
    return {"success": run.stdout.strip() == "yes"}

if __name__ == "__main__":
    sys.exit(not evaluate(sys.argv[sys.argv.index("--agent_workspace") + 1])["success"])
"""
    verdict = await grader.verdict(evaluator(source), {"answer.py": program})
    assert (verdict.status, verdict.reward) == ("forfeited", 0.0), verdict


async def test_function_can_look_through_the_calls_of_each_tool(grader: SandboxGrader) -> None:
    source = """
def evaluate(workspace, tool_calls):
    reads, writes = tool_calls("files__read"), tool_calls("files__write")
    return {
        "read_first": reads[0]["number"] < writes[0]["number"],
        "no_failed_write": not any(call["failed"] for call in writes),
        "path": reads[-1]["arguments"]["path"] == "ä",
        "all": len(tool_calls()) == 3 and tool_calls("files__move") == [],
    }
"""
    calls = [make_call(1), make_call(2, tool="write"), make_call(4, arguments={"path": "ä"})]
    verdict = await grader.verdict(evaluator(source), attempt=make_attempt(calls=calls))
    assert (verdict.success, verdict.reward) == (True, 1.0), verdict
    assert verdict.metrics["tool_calls(files__read)"] == 2


async def test_calls_of_one_tool_can_have_a_weight(grader: SandboxGrader) -> None:
    weights = {
        "tool_calls(files__write) == 1": 0.5,
        "failed_calls(files__write)": -0.1,
        "tool_calls(x__y)": 9,
    }
    main = evaluator("raise SystemExit(0)", **{"rubric.yaml": rubric_text(weights=weights)})
    verdict = await grader.verdict(main)
    assert verdict.reward == 0.4, verdict
    assert verdict.metrics["tool_calls(x__y)"] == 0
    assert "tool_calls(files__read)" not in verdict.metrics
    assert "x__y" in verdict.text()


async def test_function_that_raises_where_nothing_else_judges_is_no_success(grader: SandboxGrader) -> None:
    verdict = await grader.verdict(evaluator("def evaluate(workspace):\n    return dict(a=1 / 0)"))
    assert (verdict.status, verdict.success, verdict.reward) == ("scored", False, 0.0)
    assert "ZeroDivisionError" in verdict.uncaught
