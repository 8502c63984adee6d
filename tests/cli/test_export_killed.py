"""An export that is killed leaves no hidden file, and of a folder none beyond the next export."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.exports import export
from decathlon_mcp.plugins.exports.export import new_file, new_folder

KILLED_WITH_A_FILE = """
import os, signal, sys
from pathlib import Path
from decathlon_mcp.plugins.exports.export import new_file
with new_file(Path(sys.argv[1]), force=True) as file:
    file.write(b"half")
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""
KILLED_WITH_A_FOLDER = """
import os, signal, sys
from pathlib import Path
from decathlon_mcp.plugins.exports.export import new_folder
with new_folder(Path(sys.argv[1]), holds="*.txt", force=True) as folder:
    (folder / "a.txt").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def run_until_killed(program: str, out: Path) -> None:
    done = subprocess.run([sys.executable, "-c", program, str(out)], check=False)
    assert done.returncode == -signal.SIGKILL


def test_killed_export_of_a_file_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "episodes.jsonl"
    out.write_text("an earlier one")
    run_until_killed(KILLED_WITH_A_FILE, out)
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_text() == "an earlier one"


def test_killed_export_of_a_folder_is_removed_by_the_next_and_a_living_one_is_not(
    tmp_path: Path,
) -> None:
    out = tmp_path / "export [1]"
    run_until_killed(KILLED_WITH_A_FOLDER, out)
    (left,) = tmp_path.iterdir()
    with new_folder(out, holds="*.txt", force=False) as first:
        (first / "a.txt").write_text("first")
        assert not left.exists()
        with new_folder(out, holds="*.txt", force=True) as second:
            (second / "a.txt").write_text("second")
        assert first.exists()
        (out / "a.txt").unlink()
        out.rmdir()
    assert list(tmp_path.iterdir()) == [out]
    assert (out / "a.txt").read_text() == "first"


@pytest.mark.parametrize("has_unnamed", [True, False])
def test_file_appears_whole_and_replaces_only_if_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_unnamed: bool
) -> None:
    if not has_unnamed:  # a path that O_TMPFILE refuses, as file systems without it do
        monkeypatch.setattr(export.os, "O_TMPFILE", os.O_DIRECTORY)
    out = tmp_path / "episodes.jsonl"
    with new_file(out, force=False) as file:
        file.write(b"whole")
        assert not out.exists()
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"whole"
    assert out.stat().st_mode & 0o600 == 0o600
    with pytest.raises(BadRequestError, match="exists; --force"), new_file(out, force=False):
        pass
    with new_file(out, force=True) as file:
        file.write(b"new")
    assert out.read_bytes() == b"new"
    with pytest.raises(ZeroDivisionError), new_file(out, force=True) as file:
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == [out]
    assert out.read_bytes() == b"new"
