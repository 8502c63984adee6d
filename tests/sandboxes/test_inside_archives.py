"""The program that packs and unpacks archives in sandboxes of gVisor, without a sandbox."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from decathlon_mcp.plugins.gvisor.inside import FAILED
from decathlon_mcp.plugins.inside_archives import MAX_LEVELS, program_inside

ENOUGH = 10_000, 100_000
"""Entries and bytes of names."""


@pytest.fixture
def folder(tmp_path: Path) -> Generator[Path]:
    """A folder that is removed by a program, since Python's `rmtree` fails at a thousand levels."""
    yield tmp_path
    subprocess.run(["rm", "-rf", *tmp_path.iterdir()], check=True)


def run(command: str, folder: Path, *limits: int, archive: bytes = b"") -> tuple[int, bytes]:
    arguments = [command, str(folder), *map(str, limits)]
    program = [sys.executable, "-I", "-S", "-c", program_inside("decathlon_mcp.plugins.gvisor"), *arguments]
    result = subprocess.run(program, input=archive, capture_output=True, timeout=60, check=False)
    return result.returncode, result.stdout


def make_deep(folder: Path, levels: int) -> None:
    """Folders in each other, with a file, an empty folder and a link to the file at the end."""
    folder.mkdir()
    place = os.open(folder, os.O_RDONLY)
    for _ in range(levels):
        os.mkdir("d", dir_fd=place)
        place, above = os.open("d", os.O_RDONLY, dir_fd=place), place
        os.close(above)
    os.close(os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=place))
    os.link("file", "link", src_dir_fd=place, dst_dir_fd=place)
    os.mkdir("empty", dir_fd=place)
    os.close(place)


def test_folders_as_deep_as_may_be_are_packed_and_unpacked(folder: Path) -> None:
    """A path has 4,096 bytes at most; Python before 3.12 has `os.walk` fail at a thousand levels."""
    make_deep(folder / "a", MAX_LEVELS - 1)
    code, archive = run("pack", folder / "a", *ENOUGH)
    assert code == 0
    assert run("unpack", folder / "b", archive=archive)[0] == 0
    deepest = Path(folder / "b", *["d"] * (MAX_LEVELS - 1))
    assert {path.name for path in deepest.iterdir()} == {"empty", "file", "link"}
    assert (deepest / "file").samefile(deepest / "link")


def test_deeper_folders_are_refused(folder: Path) -> None:
    make_deep(folder / "a", MAX_LEVELS)
    assert run("pack", folder / "a", *ENOUGH)[0] == FAILED


@pytest.mark.parametrize(("limits", "code"), [((9, 99), FAILED), ((10, 9), FAILED), ((10, 10), 0)])
def test_more_entries_or_longer_names_than_allowed_are_refused(
    folder: Path, limits: tuple[int, int], code: int
) -> None:
    (folder / "a").mkdir()
    for number in range(10):
        os.mknod(folder / "a" / str(number), stat.S_IFSOCK | 0o600)  # which no archive has
    assert run("pack", folder / "a", *limits)[0] == code
