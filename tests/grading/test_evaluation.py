"""Grading in real sandboxes of the local provider."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from decathlon_mcp.driver.client import DriverClient
from decathlon_mcp.errors import ProviderUnavailableError, SandboxLostError
from decathlon_mcp.grading.verdict import Verdict
from decathlon_mcp.sandboxes.base import Sandbox
from decathlon_mcp.types import Network
from tests.grading.evaluators import (
    ARGUMENTS,
    PAPER_FUNCTION,
    REQUIRES_PAPER,
    evaluator,
    one_metric,
    with_rubric,
)
from tests.grading.support import (
    PAPER,
    SandboxGrader,
    make_attempt,
    make_call,
    names_in,
    rubric_text,
    tar_of,
    write_suite,
)

pytestmark = pytest.mark.anyio


def unscored(verdict: Verdict) -> str:
    """The status of a verdict, after checking that it has no reward."""
    assert verdict.status not in ("scored", "forfeited")
    assert not {"reward", "success"} & verdict.to_json().keys()
    return verdict.status


def forfeited(verdict: Verdict) -> str:
    """The reason why an attempt was forfeited, after checking that its reward is 0."""
    assert (verdict.status, verdict.reward, verdict.success) == ("forfeited", 0.0, False), verdict
    assert verdict.weights == {}
    return verdict.detail


def runs_counted(source: str) -> str:
    """An evaluator that appends a line to the file `runs` on the host, then runs `source`."""
    # The local provider gives evaluators the host's files.
    return f"""
import os, sys
with open(os.environ["RUNS"], "a") as file: print("run", file=file)
number = len(open(os.environ["RUNS"]).readlines())
{source}
"""


@pytest.mark.parametrize(("workspace", "reward"), [({"paper.pdf": "x"}, 1.0), ({"other.pdf": "x"}, 0.0)])
async def test_reward_is_the_exit_code(
    grader: SandboxGrader, workspace: dict[str, str], reward: float
) -> None:
    verdict = await grader.verdict(evaluator(REQUIRES_PAPER), workspace)
    assert (verdict.status, verdict.reward, verdict.success) == ("scored", reward, bool(reward))
    assert verdict.weights == {}
    assert verdict.metrics == {"calls": 2, "failed_calls": 1, "tools_used": 2, "success": reward}
    assert verdict.seconds > 0
    assert grader.networks == ["none"]


@pytest.mark.toolathlon
async def test_evaluator_is_called_as_toolathlon_calls_it(grader: SandboxGrader) -> None:
    source = (
        ARGUMENTS
        + """
assert os.path.isabs(args.agent_workspace) and os.path.isabs(args.res_log_file)
log = json.load(open(args.res_log_file))
assert log["config"]["agent_workspace"] == args.agent_workspace, log
assert log["config"]["log_file"] == args.res_log_file
print(args.groundtruth_workspace, "|", args.launch_time, "|", os.getcwd() == log["config"]["log_file"][:-18])
print(open(os.path.join(args.groundtruth_workspace, "answer")).read())
print("a complaint", file=sys.stderr)
from .check import checked
print(checked, __name__, __package__)
"""
    )
    files = {"evaluation/check.py": "checked = 'package'", "groundtruth_workspace/answer": "42"}
    verdict = await grader.verdict(evaluator(source, **files))
    assert verdict.evaluator_output.splitlines() == [
        f"{PAPER}/groundtruth_workspace | 2026-11-21 09:30:00 Saturday | True",
        "42",
        "package __main__ tasks.train.paper.evaluation",
        "a complaint",
    ]
    assert verdict.reward == 1.0


async def test_evaluator_gets_the_word_none_without_a_groundtruth(grader: SandboxGrader) -> None:
    source = ARGUMENTS + "raise SystemExit(args.groundtruth_workspace != 'None')"
    assert (await grader.verdict(evaluator(source))).reward == 1.0


@pytest.mark.parametrize(
    ("source", "reason", "sandboxes"),
    [
        ("import os; os.kill(os.getpid(), 9)", "the evaluator was killed: signal 9", 2),
        ("raise SystemExit(127)", "the evaluator was killed or did not start: exit code 127", 2),
        (
            "import time; print('waiting', flush=True); time.sleep(600)",
            "the evaluator did not end in time",
            1,
        ),
    ],
)
async def test_attempt_whose_evaluator_is_killed_or_endless_is_forfeited(
    grader: SandboxGrader, source: str, reason: str, sandboxes: int
) -> None:
    verdict = await grader.verdict(evaluator(source), deadline_seconds=1.5 if sandboxes == 1 else 60.0)
    assert forfeited(verdict) == reason
    assert len(grader.networks) == sandboxes
    if sandboxes == 1:
        assert verdict.evaluator_output == "waiting"


async def test_killed_evaluator_is_run_once_more(
    grader: SandboxGrader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUNS", str(tmp_path / "runs"))
    source = runs_counted("if number == 1: os.kill(os.getpid(), 9)")
    verdict = await grader.verdict(evaluator(source))
    assert (verdict.status, verdict.reward) == ("scored", 1.0)
    assert len(grader.networks) == 2


async def test_attempt_is_graded_in_place_only_once(grader: SandboxGrader) -> None:
    verdict = await grader.verdict(evaluator("import os; os.kill(os.getpid(), 9)"), None, in_place=True)
    assert forfeited(verdict) == "the evaluator was killed: signal 9"
    assert len(grader.networks) == 1


async def test_waiting_for_a_sandbox_costs_nothing_of_the_deadline(grader: SandboxGrader) -> None:
    @asynccontextmanager
    async def late(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
        await anyio.sleep(4)
        async with grader.open(network) as opened:
            yield opened

    verdict = await grader.verdict(evaluator(""), open_sandbox=late, deadline_seconds=3.0)
    assert (verdict.status, verdict.reward) == ("scored", 1.0), verdict
    assert verdict.seconds > 4


UNCAUGHT = {
    "exception": ("raise RuntimeError('no such column')", "RuntimeError: no such column"),
    "bad-str": (
        "class Bad(Exception):\n    def __str__(self): raise OSError\nraise Bad",
        "Bad: (no message: its __str__ failed)",
    ),
    "long-and-odd": ("raise ValueError('a\\nb\\ud800' + 'x' * 10**6)", "ValueError: a b?xxx"),
    "hook-replaced": ("import sys; sys.excepthook = print\nraise OSError(5, 'x')", "OSError: [Errno 5] x"),
}


@pytest.mark.parametrize(("source", "uncaught"), UNCAUGHT.values(), ids=UNCAUGHT)
async def test_evaluator_that_raises_fails_the_attempt_and_pays_nothing(
    grader: SandboxGrader, source: str, uncaught: str
) -> None:
    text = rubric_text(function="evaluation/evaluator.py:evaluate", weights={"a": 1, "calls": 1})
    files = with_rubric("def evaluate(): return {'a': 1}", text, main=source)
    verdict = await grader.verdict(files)
    assert (verdict.status, verdict.success, verdict.reward) == ("scored", False, 0.0), verdict
    assert verdict.uncaught.startswith(uncaught)
    assert len(verdict.uncaught) <= 500
    assert "ended by an uncaught exception" in verdict.text()
    assert len(grader.networks) == 1, "graded a second time, or the function was run"


NOT_RUNNABLE = {
    "syntax": ({"main.py": "import json\n\ndef"}, "evaluation/main.py, line 3: invalid syntax"),
    "missing module": (
        {"main.py": "import json, no_such.thing"},
        "main.py, line 1: there is no module no_such",
    ),
    "syntax of a helper": (
        {"main.py": "from .checks import check", "checks.py": "\n\nx = = 1", "__init__.py": ""},
        "evaluation/checks.py, line 3: invalid syntax",
    ),
    "null byte": ({"main.py": "x = 1\0"}, "evaluation/main.py"),
}


@pytest.mark.parametrize(("sources", "problem"), NOT_RUNNABLE.values(), ids=NOT_RUNNABLE)
async def test_evaluator_that_python_cannot_run_gives_no_reward(
    grader: SandboxGrader, sources: dict[str, str], problem: str
) -> None:
    files = {f"{PAPER}/evaluation/{name}": text for name, text in sources.items()}
    verdict = await grader.verdict(files, {"no_such.py": ""})
    assert verdict.status == "evaluator_error", verdict
    assert problem in verdict.detail


AGENTS_MODULE = {
    "after a change of the path": "import sys\nsys.path.insert(0, 'workspace')\nimport answer",
    "by its path": "from importlib import import_module\nimport_module('workspace.answer')",
    "in a try": "try: import answer\nexcept ImportError: raise SystemExit(1)",
    "by a default": "def f(a=__import__('sys').path.append('workspace')): ...\nimport answer",
    "by an own module": "from . import paths\nimport answer",
    "by a decorator": "def change(f): import sys; sys.path.append('workspace')\n"
    "@change\ndef f(): ...\nimport answer",
}


@pytest.mark.parametrize("source", AGENTS_MODULE.values(), ids=AGENTS_MODULE)
async def test_agent_cannot_make_an_evaluator_one_that_cannot_run(grader: SandboxGrader, source: str) -> None:
    """What an evaluator takes from the workspace may be missing or broken by the agent's doing: a zero."""
    paths = "import sys\nsys.path.append('workspace')"
    files = {f"{PAPER}/evaluation/main.py": source, f"{PAPER}/evaluation/paths.py": paths}
    for workspace in ({}, {"answer.py": "def"}):
        verdict = await grader.verdict(files, workspace)
        assert (verdict.status, verdict.reward) == ("scored", 0.0), verdict


async def test_task_whose_folder_python_cannot_import_is_broken(tmp_path: Path) -> None:
    folder = "tasks/train/dot.v2"
    files = {
        f"{folder}/task_config.json": '{"needed_mcp_servers": []}',
        f"{folder}/docs/task.md": "Count.",
        f"{folder}/evaluation/main.py": "",
    }
    suite = write_suite(tmp_path / "checkout", files)
    (error,) = suite.tasks["dot.v2"].errors
    assert "a dot in its name: rename dot.v2" in error.message
    assert not suite.tasks["paper"].errors


CAUGHT = {
    "prints-a-traceback": "import traceback\ntry: 1 / 0\nexcept ZeroDivisionError: traceback.print_exc()\n"
    "raise SystemExit(1)",
    "in-a-child": "import subprocess, sys\n"
    "subprocess.run([sys.executable, '-c', '1 / 0'], close_fds=False)\nraise SystemExit(1)",
}


@pytest.mark.parametrize("source", CAUGHT.values(), ids=CAUGHT)
async def test_evaluator_that_exits_is_not_uncaught_whatever_it_prints(
    grader: SandboxGrader, source: str
) -> None:
    text = rubric_text(function="evaluation/evaluator.py:evaluate", weights={"a": 1})
    verdict = await grader.verdict(with_rubric("def evaluate(): return {'a': 0.5}", text, main=source))
    assert (verdict.success, verdict.reward, verdict.uncaught) == (False, 0.5, ""), verdict


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, "sandbox_lost"), (signal.SIGABRT, "forfeited")]
)
async def test_grader_that_dies_is_lost_only_if_it_was_killed_from_outside(
    grader: SandboxGrader, number: int, status: str
) -> None:
    source = f"import os, time; os.kill(os.getppid(), {number}); time.sleep(60)"
    verdict = await grader.verdict(evaluator(source))
    assert verdict.status == status
    assert len(grader.networks) == {"sandbox_lost": 1, "forfeited": 2}[status]


async def test_evaluator_output_is_cut_to_its_end(grader: SandboxGrader) -> None:
    verdict = await grader.verdict(evaluator("print('x' * 100_000 + 'end')"))
    assert len(verdict.evaluator_output) <= 8192
    assert verdict.evaluator_output.endswith("xend")


@pytest.mark.parametrize(
    ("workspace", "calls", "reward"),
    [
        ({"paper.pdf": "the right one"}, 2, 1.6),
        ({}, 20, 0.0),
    ],
)
@pytest.mark.toolathlon
async def test_example_rubric_gives_the_documented_rewards(
    grader: SandboxGrader, workspace: dict[str, str], calls: int, reward: float
) -> None:
    attempt = make_attempt(calls=[make_call(seq) for seq in range(calls)])
    verdict = await grader.verdict(with_rubric(PAPER_FUNCTION), workspace, attempt=attempt)
    assert verdict.status == "scored", verdict
    assert verdict.reward == pytest.approx(reward)
    assert verdict.success == ("paper.pdf" in workspace)
    assert verdict.weights == {"paper_downloaded": 0.5, "correct_paper": 1.0, "efficient": 0.1}
    assert verdict.metrics["efficient"] == float(calls < 20)


ALL_PARAMETERS = """
def evaluate(agent_workspace, groundtruth_workspace, res_log_file, launch_time):
    return {"a": len(launch_time.split())}
"""
PATH_PARAMETERS = """
from pathlib import Path
def evaluate(workspace: Path, log: "Path | None" = None):
    return {"a": workspace.is_dir() and log.is_file()}
"""
LEAVES_A_THREAD = """
import threading, time
threading.Thread(target=time.sleep, args=(600,)).start()
def evaluate():
    return {"a": 1}
"""


@pytest.mark.parametrize(
    ("source", "reward"),
    [
        ("async def evaluate(workspace): return {'a': -2.5}", -2.5),
        (ALL_PARAMETERS, 3.0),
        pytest.param(PATH_PARAMETERS, 1.0, marks=pytest.mark.toolathlon),
        (LEAVES_A_THREAD, 1.0),
    ],
)
async def test_rubric_function_gets_arguments_by_parameter_name(
    grader: SandboxGrader, source: str, reward: float
) -> None:
    files = {f"{PAPER}/evaluation/scoring.py": "def score(groundtruth): return {'a': 4}"}
    verdict = await grader.verdict({**one_metric(source), **files})
    assert (verdict.status, verdict.reward) == ("scored", reward), verdict


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("def evaluate(): return {'a': float('nan')}", "metric 'a' is nan"),
        ("def evaluate(): return {'a': 1, 'b\\ud800': 1}", "printable characters"),
        ("def evaluate(): return {f'm{n}': n for n in range(10**6)}", "not one JSON value"),
        ("import os\ndef evaluate(): os._exit(0)", "without returning metrics"),
    ],
)
async def test_attempt_with_invalid_metrics_is_forfeited(
    grader: SandboxGrader, source: str, complaint: str
) -> None:
    verdict = await grader.verdict(one_metric(source))
    assert complaint in forfeited(verdict)


@pytest.mark.parametrize(
    ("source", "uncaught"),
    [
        ("def evaluate(answer): return {'a': 1}", "TypeError: parameter 'answer'"),
        ("def evaluate(): raise SystemExit(0)", "SystemExit: 0"),
        ("def evaluate():\n    a = 0\n    for _ in range(9**6): a = [a]\n    return a", "RecursionError"),
    ],
)
async def test_rubric_function_that_raises_pays_nothing(
    grader: SandboxGrader, source: str, uncaught: str
) -> None:
    verdict = await grader.verdict(one_metric(source))
    assert (verdict.status, verdict.success, verdict.reward) == ("scored", True, 0.0), verdict
    assert verdict.uncaught.startswith(f"evaluation/evaluator.py:evaluate: {uncaught}")


@pytest.mark.toolathlon
async def test_evaluator_and_function_run_in_separate_sandboxes(grader: SandboxGrader) -> None:
    main = (
        ARGUMENTS
        + """
open(args.res_log_file, "w").write("overwritten")
open(os.path.join(args.agent_workspace, "left.txt"), "w").write("left behind")
open("tasks/train/paper/evaluation/evaluator.py", "w").write("def evaluate(): return {'a': 9}")
"""
    )
    source = """
import json, os
def evaluate(workspace, log):
    return {"a": json.load(open(log))["status"] == "success" and os.listdir(workspace) == ["mine.txt"]}
"""
    text = rubric_text(function="evaluation/evaluator.py:evaluate", weights={"a": 1})
    verdict = await grader.verdict(with_rubric(source, text, main=main), {"mine.txt": "x"})
    assert verdict.reward == 1.0, verdict
    assert grader.networks == ["none", "none"]


async def test_no_module_is_imported_from_the_workspace_or_the_environment(
    grader: SandboxGrader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("sitecustomize.py", "usercustomize.py", "argparse.py", "json.py", "inspect.py", "planted.py")
    planted = dict.fromkeys(names, "import os; os._exit(0)")
    outside = tmp_path / "outside"
    outside.mkdir()
    for name, text in planted.items():
        (outside / name).write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(outside))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    source = """
def tries():
    try:
        import planted
    except ModuleNotFoundError:
        return False
"""
    main = ARGUMENTS + source + "raise SystemExit(0 if tries() else 1)"
    function = source + "def evaluate(): return {'a': 3 if not tries() else 0}"
    text = rubric_text(function="evaluation/evaluator.py:evaluate", weights={"a": 1})
    verdict = await grader.verdict(with_rubric(function, text, main), {**planted, "p.pth": "import planted"})
    assert (verdict.success, verdict.reward) == (False, 3.0), verdict


async def test_sealed_files_of_preprocess_are_used(grader: SandboxGrader, tmp_path: Path) -> None:
    sealed = tmp_path / "sealed.tar"
    sealed.write_bytes(tar_of({"./evaluation/main.py": "", "./groundtruth_workspace/made": "by preprocess"}))
    assert (await grader.verdict(evaluator("raise SystemExit(1)"), sealed=sealed)).reward == 1.0


async def test_suite_may_require_a_claim(grader: SandboxGrader) -> None:
    files = {"suite.yaml": "profile: starter\nclaim_required: true\n"}
    claimed = await grader.verdict(files)
    unclaimed = await grader.verdict(files, attempt=make_attempt(claimed=False))
    assert (claimed.reward, unclaimed.reward) == (1.0, 0.0)
    assert "claimed" in unclaimed.detail


async def test_sandbox_that_cannot_be_opened_gives_no_reward(grader: SandboxGrader) -> None:
    def unavailable(network: Network) -> Any:
        raise ProviderUnavailableError("no Docker engine answers")

    def broken(network: Network) -> Any:
        raise RuntimeError("a secret path")

    verdict = await grader.verdict({}, open_sandbox=unavailable)
    assert (unscored(verdict), verdict.detail) == ("not_evaluated", "no Docker engine answers")
    verdict = await grader.verdict({}, open_sandbox=broken)
    assert (unscored(verdict), verdict.detail) == ("not_evaluated", "a fault of the server: RuntimeError")


@pytest.mark.parametrize("lost", [2, 3])
async def test_attempt_is_graded_although_drivers_of_two_sandboxes_never_came_up(
    grader: SandboxGrader, lost: int
) -> None:
    opened = 0

    @asynccontextmanager
    async def lost_at_first(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
        nonlocal opened
        opened += 1
        if opened <= lost:
            raise SandboxLostError("the driver did not come up", booted=False)
        async with grader.open(network) as sandbox:
            yield sandbox

    verdict = await grader.verdict({}, open_sandbox=lost_at_first)
    if lost < 3:
        assert verdict.reward == 1.0
    else:
        assert (unscored(verdict), opened) == ("sandbox_lost", 3)


async def test_grading_in_place_restores_the_suites_files_and_keeps_the_workspace(
    grader: SandboxGrader, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path / "checkout", evaluator(REQUIRES_PAPER, **{"evaluation/check.py": "pass"}))
    with anyio.fail_after(60):
        async with grader.open("none") as (sandbox, driver):
            folder = sandbox.root / PAPER / "evaluation"
            await driver.arrange(
                {"write": str(folder / "main.py"), "text": ""},
                {"write": str(folder / "argparse.py"), "text": "planted"},
                {"write": str(sandbox.root / "workspace" / "thesis.pdf"), "text": "x"},
            )
            os.symlink("/dev/null", Path(sandbox.root) / ".decathlon")  # noqa: PTH211

            @asynccontextmanager
            async def same(network: Network) -> AsyncGenerator[tuple[Sandbox, DriverClient]]:
                yield sandbox, driver

            verdict = await grader.grade(
                make_attempt(), suite, {"paper.pdf": "not put"}, open_sandbox=same, in_place=True
            )
            assert names_in(folder) == ["check.py", "main.py"]
            assert names_in(sandbox.root / "workspace") == ["thesis.pdf"]
    assert (verdict.reward, verdict.in_place) == (0.0, True)


async def test_missing_evaluator_gives_no_reward_and_opens_no_sandbox(
    grader: SandboxGrader, tmp_path: Path
) -> None:
    suite = write_suite(tmp_path / "checkout", {})
    (suite.path / PAPER / "evaluation" / "main.py").unlink()
    with anyio.fail_after(60):
        verdict = await grader.grade(make_attempt(), suite, {})
    assert unscored(verdict) == "evaluator_error"
    assert grader.networks == []


async def test_rubric_function_that_python_cannot_run_gives_no_reward(grader: SandboxGrader) -> None:
    verdict = await grader.verdict(one_metric("from .gone import evaluate"))
    assert verdict.status == "evaluator_error", verdict
