"""The release of a checkout of Toolathlon."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from decathlon_mcp.plugins.toolathlon import toolathlon as toolathlon_suite
from decathlon_mcp.plugins.toolathlon.toolathlon import find_release, texts_digest
from tests.suites.conftest import Checkout
from tests.suites.test_revision import git


def release_of(checkout: Checkout) -> str | None:
    found = checkout.load().release
    return None if found is None else found.name


def test_the_release_is_known_from_the_history_or_the_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = Checkout(tmp_path / "checkout")
    text = checkout.task() / "docs" / "task.md"
    before = texts_digest(checkout.path)
    git(checkout, "init", "-q")
    git(checkout, "add", "--all")
    git(checkout, "commit", "-q", "-m", "first")
    monkeypatch.setattr(toolathlon_suite, "ROOT_COMMIT", git(checkout, "rev-parse", "HEAD"))
    assert release_of(checkout) == "before"
    text.write_text("Find the right paper.")
    git(checkout, "commit", "-q", "-a", "-m", "repaired")
    monkeypatch.setattr(toolathlon_suite, "VERIFIED_COMMIT", git(checkout, "rev-parse", "HEAD"))
    repaired = texts_digest(checkout.path)
    assert release_of(checkout) == "verified"
    git(checkout, "commit", "-q", "--allow-empty", "-m", "later")
    assert release_of(checkout) == "verified"
    copy = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth=1", f"file://{checkout.path}", str(copy)], check=True)
    assert find_release(copy).name == "unknown"
    monkeypatch.setattr(toolathlon_suite, "VERIFIED_TEXTS", repaired)
    assert find_release(copy).name == "verified"
    monkeypatch.setattr(toolathlon_suite, "VERIFIED_TEXTS", "")
    shutil.rmtree(copy / ".git")
    assert find_release(copy).name == "unknown"
    (copy / text.relative_to(checkout.path)).write_text("Find the paper.")
    monkeypatch.setattr(toolathlon_suite, "TEXTS_BEFORE", frozenset({before}))
    assert find_release(copy).name == "before"
