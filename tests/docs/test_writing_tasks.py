"""The files shown in docs/writing-tasks.md form a suite that loads."""

from __future__ import annotations

from pathlib import Path

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.suites.loading import load_suite
from tests.docs.pages import block

PAGE = "docs/writing-tasks.md"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


def test_example_files_form_a_suite_whose_task_can_run(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "mine" / "my-task"
    _write(tmp_path / "suite.yaml", block(PAGE, "suite.yaml", "yaml").text)
    _write(tmp_path / "configs" / "mcp_servers" / "files.yaml", block(PAGE, "A task", "yaml").text)
    _write(task / "task_config.json", block(PAGE, "A task", "json").text)
    _write(task / "docs" / "task.md", "Do it.")
    _write(task / "evaluation" / "main.py", "")
    _write(task / "evaluation" / "evaluator.py", block("docs/rewards.md", "Dense rewards", "python").text)
    _write(task / "evaluation" / "rubric.yaml", block(PAGE, "rubric.yaml", "yaml").text)
    suite = load_suite(tmp_path)
    assert suite.name == "my-suite"
    assert suite.profile.image == "my-image:latest"
    loaded = suite.task("my-task")
    assert Catalogue([suite]).missing_sentences(suite, loaded) == []
    assert loaded.splits == ("train",)
    assert loaded.deadlines.preprocess_seconds == 30
    rubric = load_rubric(suite, loaded)
    assert rubric is not None
    assert rubric.weights == {"paper_downloaded": 0.5, "correct_paper": 1.0, "calls < 20": 0.1}


def test_example_rubric_of_the_rewards_page_loads(tmp_path: Path) -> None:
    task = tmp_path / "tasks" / "mine" / "my-task"
    _write(task / "task_config.json", block(PAGE, "A task", "json").text)
    _write(task / "evaluation" / "evaluator.py", block("docs/rewards.md", "Dense rewards", "python").text)
    _write(task / "rubric.yaml", block("docs/rewards.md", "Dense rewards", "yaml").text)
    _write(task / "docs" / "task.md", "Do it.")
    _write(task / "evaluation" / "main.py", "")
    suite = load_suite(tmp_path)
    rubric = load_rubric(suite, suite.tasks["my-task"])
    assert rubric is not None
    metrics = {"paper_downloaded": 1.0, "correct_paper": 0.5, "calls": 7.0}
    assert rubric.reward(metrics) == 0.5 + 0.5 + 0.1
