"""The versions of installed packages, compared with what the project needs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from decathlon_mcp.plugins.readiness.machine import check_packages
from decathlon_mcp.sandboxes.base import Finding

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Installs the metadata of a package where Python looks first."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def add(name: str, version: str, *requires: str, extras: tuple[str, ...] = ()) -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {text}" for text in requires)]
        lines += [f"Provides-Extra: {extra}" for extra in extras]
        (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")

    return add


def problems(project: str) -> list[str]:
    found: Finding = check_packages(project)
    assert not found.required
    assert found.ok is not found.is_problem
    return [] if found.ok else found.detail.splitlines()[1:]


def test_the_environment_of_the_tests_is_as_needed() -> None:
    found = check_packages()
    assert found.ok, found.detail


def test_a_version_that_a_trainer_brought_is_a_line_with_who_needs_another(install: Install) -> None:
    install("own", "1", "sdk>=2.2; extra == 'server'", "lib<3", extras=("server",))
    install("lib", "2", "sdk<9", "other==1.*")
    install("sdk", "2.0.0")
    install("other", "1.5")
    assert problems("own") == ["sdk 2.0.0: own needs >=2.2"]


def test_requirements_of_requirements_are_compared(install: Install) -> None:
    install("own", "1", "git-server; extra == 'starter'", extras=("starter",))
    install("git-server", "1", "sdk[cli]>=2.3", "absent", "windows-only; sys_platform == 'win32'", "]]")
    install("sdk", "2.4", "own>=1", "typer>=1; extra == 'cli'", "never; extra == 'x'", extras=("cli", "x"))
    install("typer", "0.9")
    assert problems("own") == ["absent is not installed: git-server needs it", "typer 0.9: sdk needs >=1"]
