"""docs/writing-tasks.md shows the suite that `init` creates, and its other files are valid."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.starter import TEMPLATE_TASK, copy_template
from decathlon_mcp.suites.loading import load_suite
from tests.docs.pages import block

PAGE = "docs/writing-tasks.md"


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")


def test_the_page_shows_the_suite_that_init_creates(tmp_path: Path) -> None:
    files = {file.relative_to(tmp_path) for file in copy_template(tmp_path)}
    assert set(_tree(block(PAGE, "Create a suite", "").text)) == files
    shown = {
        f"tasks/mine/{TEMPLATE_TASK}/task_config.json": block(PAGE, "A task", "json").text,
        "configs/mcp_servers/shop.yaml": block(PAGE, "A task", "yaml").text,
    }
    for name, text in shown.items():
        assert (tmp_path / name).read_text("utf-8").strip() == text.strip()
    test = (tmp_path / "tests" / "test_restock_shop.py").read_text("utf-8")
    for part in block(PAGE, "Test your task", "python").text.split("\n\n\n"):
        assert part.strip() in test


def _tree(text: str) -> Iterator[Path]:
    """The files of a tree in which folders end with `/` and may hold several levels."""
    folders: list[tuple[int, str]] = []
    for line in text.splitlines():
        name, depth = line.split()[0], len(line) - len(line.lstrip())
        folders = [(indent, folder) for indent, folder in folders if indent < depth]
        if name.endswith("/"):
            folders.append((depth, name))
        else:
            yield Path("".join(folder for _, folder in folders[1:]), name)


def _task(suite: Path) -> Path:
    """A task with the page's configuration, without its server, and an empty evaluator."""
    task = suite / "tasks" / "mine" / "my-task"
    # The server `shop` of the example needs a credential.
    server, config = block(PAGE, "A task", "yaml").text, block(PAGE, "A task", "json").text
    _write(suite / "configs" / "mcp_servers" / "files.yaml", server.replace("name: shop", "name: files"))
    _write(task / "task_config.json", config.replace('"shop"', '"files"'))
    _write(task / "docs" / "task.md", "Do it.")
    _write(task / "evaluation" / "main.py", "")
    _write(task / "evaluation" / "evaluator.py", block("docs/rewards.md", "Dense rewards", "python").text)
    return task


def test_example_suite_file_and_rubric_load(tmp_path: Path) -> None:
    task = _task(tmp_path)
    _write(tmp_path / "suite.yaml", block(PAGE, "suite.yaml", "yaml").text)
    _write(task / "evaluation" / "rubric.yaml", block(PAGE, "rubric.yaml", "yaml").text)
    suite = load_suite(tmp_path)
    assert (suite.name, suite.profile.image) == ("my-suite", "my-image:latest")
    loaded = suite.task("my-task")
    assert Catalogue([suite]).missing_sentences(suite, loaded) == []
    assert (loaded.splits, loaded.deadlines.preprocess_seconds) == (("train",), 30)
    rubric = load_rubric(suite, loaded)
    assert rubric is not None
    assert rubric.weights == {"paper_downloaded": 0.5, "correct_paper": 1.0, "calls < 20": 0.1}


def test_example_rubrics_of_the_rewards_page_load(tmp_path: Path) -> None:
    task = _task(tmp_path)
    _write(task / "rubric.yaml", block("docs/rewards.md", "Weights", "yaml").text)
    suite = load_suite(tmp_path)
    rubric = load_rubric(suite, suite.tasks["my-task"])
    assert rubric is not None
    assert rubric.reward({"paper_downloaded": 1.0, "correct_paper": 0.5, "calls": 7.0}) == 0.5 + 0.5 + 0.1
    # An evaluator that just returns a dict needs none.
    for name in ("rubric.yaml", "evaluation/evaluator.py"):
        (task / name).unlink()
    for text in (block(PAGE, "rubric.yaml", "python"), block("docs/rewards.md", "Parameters", "python")):
        _write(task / "evaluation" / "main.py", text.text)
        suite = load_suite(tmp_path)
        rubric = load_rubric(suite, suite.tasks["my-task"])
        assert rubric is not None
        assert (rubric.decides, len(rubric.returned or ())) == (True, 2)
