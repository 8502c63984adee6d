"""`init`: the suite that it creates works, and its test finds a broken evaluator."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp.catalogue.catalogue import Catalogue
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.grading.rubric import load_rubric
from decathlon_mcp.plugins.init import init
from decathlon_mcp.starter import TEMPLATE_TASK, copy_template
from decathlon_mcp.suites.loading import load_suite

pytestmark = pytest.mark.slow

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

EVALUATION = f"tasks/mine/{TEMPLATE_TASK}/evaluation"


def run_its_test(shell: Shell, suite: str, *selection: str) -> subprocess.CompletedProcess[str]:
    """Run the suite's own test as its README says, with none of this repository's configuration."""
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{suite}/tests", *selection],
        cwd=shell.folder,
        env=shell.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def replace(file: Path, old: str, new: str) -> None:
    text = file.read_text("utf-8")
    assert old in text
    file.write_text(text.replace(old, new), "utf-8")


def test_the_created_suite_passes_its_own_test_and_what_is_printed_works(shell: Shell) -> None:
    done = shell.run("init", "my suite")
    assert done.returncode == 0, done
    *commands, _ = [line.split("decathlon-mcp ")[1] for line in done.stdout.splitlines() if "mcp " in line]
    assert commands[0] == "tasks --suite 'my suite' --check"
    checked = shell.run("tasks", "--suite", "my suite", "--check")
    assert checked.returncode == 0
    assert checked.stdout.startswith(
        f"ok  {TEMPLATE_TASK}: ready\n\n1 of 1 can run here\n  1 ready\nmy-suite: "
    )
    tested = run_its_test(shell, "my suite")
    assert tested.returncode == 0, tested.stdout
    assert "5 passed" in tested.stdout


@pytest.mark.long
def test_its_test_fails_if_the_evaluator_is_broken(shell: Shell) -> None:
    copy_template(shell.folder / "suite")
    # It pays for lines that nobody should order.
    replace(shell.folder / "suite" / EVALUATION / "evaluator.py", "- len(order - expected)", "")
    tested = run_its_test(shell, "suite", "-k", "too_much")
    assert tested.returncode == 1, tested.stdout
    assert "1 failed, 4 deselected" in tested.stdout


def test_the_suite_has_an_explicit_profile_a_split_and_partial_credit(tmp_path: Path) -> None:
    copy_template(tmp_path / "my-suite")
    suite = load_suite(tmp_path / "my-suite")
    task = suite.task(TEMPLATE_TASK)
    assert "profile: starter" in (tmp_path / "my-suite" / "suite.yaml").read_text("utf-8")
    assert (suite.name, suite.profile.name, task.splits) == ("my-suite", "starter", ("train",))
    assert Catalogue([suite]).missing_sentences(suite, task) == []
    rubric = load_rubric(suite, task)
    assert rubric is not None
    assert rubric.reward({"ordered": 0.5, "complete": 0.0}) == 0.5 * 3 / 4


def test_its_readme_names_every_file(tmp_path: Path) -> None:
    files = {file.relative_to(tmp_path) for file in copy_template(tmp_path)}
    assert files == {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()}
    readme = (tmp_path / "README.md").read_text("utf-8")
    named = [line.split("`")[1] for line in readme.splitlines() if line.startswith("| `")]
    assert [name for name in named if not (tmp_path / name).exists()] == []
    unnamed = [file for file in files if not any(str(file).startswith(name) for name in named)]
    assert unnamed == [Path("README.md")]


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert init(tmp_path) == 0
    assert (tmp_path / EVALUATION / "rubric.yaml").is_file()


@pytest.mark.parametrize("name", ["full", "full/file", "full/file/below", "/proc/suite"])
def test_a_folder_that_cannot_be_created_is_an_error_and_nothing_is_written(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("mine")
    with pytest.raises(BadRequestError) as error:
        init(tmp_path / name)
    assert name.rpartition("/")[2] in error.value.message
    assert [file.name for file in tmp_path.rglob("*")] == ["full", "file"]


def test_what_was_written_is_removed_if_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = Path.write_bytes

    def write_until_full(file: Path, data: bytes) -> int:
        if file.name == "evaluator.py":
            raise OSError(28, "No space left on device")
        return write(file, data)

    monkeypatch.setattr(Path, "write_bytes", write_until_full)
    for folder in (tmp_path / "new", tmp_path):
        with pytest.raises(BadRequestError, match="No space left on device"):
            init(folder)
        assert list(tmp_path.iterdir()) == []
