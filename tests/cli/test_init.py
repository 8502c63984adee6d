"""`init`: the suite that it creates works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.init import init
from decathlon_mcp.starter import TEMPLATE_TASK
from tests.cli.conftest import Shell

pytestmark = pytest.mark.slow


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
    # As its README says, with none of this repository's configuration.
    tested = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "my suite/tests",
            "-k",
            "part or whole",
        ],
        cwd=shell.folder,
        env=shell.environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert "2 passed" in tested.stdout


@pytest.mark.parametrize("name", ["full", "full/file/below"])
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


def test_pytest_is_installed_first_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert init(tmp_path / "first") == 0
    assert "pip install" not in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert init(tmp_path / "second") == 0
    lines = capsys.readouterr().out.splitlines()
    (number,) = [number for number, line in enumerate(lines) if line.endswith(" -m pip install pytest")]
    assert " -m pytest " in lines[number + 1]
