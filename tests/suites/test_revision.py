"""The revision changes when the checkout does, and only then."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.suites.conftest import Checkout


def git(checkout: Checkout, *arguments: str) -> str:
    options = ("-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "commit.gpgsign=false")
    process = subprocess.run(
        ["git", *options, "-C", str(checkout.path), *arguments], check=True, capture_output=True, text=True
    )
    return process.stdout.strip()


def test_without_git_it_depends_on_path_and_content(checkout: Checkout) -> None:
    folder = checkout.task()
    first = checkout.load().revision
    assert checkout.load().revision == first
    checkout.write("README.md", "no part of any archive")
    (folder / "evaluation" / "__pycache__").mkdir()
    assert checkout.load().revision == first
    (folder / "docs" / "task.md").write_text("Find the other paper.")
    second = checkout.load().revision
    assert second != first
    os.utime(folder / "docs" / "task.md", (1, 1))
    assert checkout.load().revision == second, "another installation of the same suite has other times"
    (folder / "docs" / "task.md").write_text("Find the OTHER paper.")
    assert checkout.load().revision not in {first, second}, "of the same size"
    checkout.write("configs/token_key_session.py", "password = 'one'")
    os.utime(secret := checkout.path / "configs/token_key_session.py", (1, 1))
    third = checkout.load().revision
    secret.write_text("password = 'two'")
    os.utime(secret, (1, 1))
    assert checkout.load().revision == third, "no guess of a password can be confirmed"
    os.utime(secret, (2, 2))
    assert checkout.load().revision != third
    checkout.write("suite.yaml", "name: mine\n")
    assert checkout.load().revision != first


def test_the_revision_of_a_clean_git_checkout_is_its_commit(checkout: Checkout) -> None:
    checkout.task()
    checkout.write(".gitignore", "configs/token_key_session.py\n__pycache__/\nnode_modules/\n")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "all")
    head = git(checkout, "rev-parse", "HEAD")[:12]
    checkout.write("utils/__pycache__/x.pyc")
    checkout.write("node_modules/x.js")
    assert checkout.load().revision == head
    checkout.write("configs/token_key_session.py", "ignored by git, but part of the revision")
    dirty = checkout.load().revision
    assert dirty.startswith(f"{head}-")
    checkout.write("tasks/finalpool/find-paper/docs/task.md", "Another task.")
    assert checkout.load().revision not in {head, dirty}


def test_a_broken_git_checkout_has_a_revision(checkout: Checkout) -> None:
    checkout.task()
    plain = checkout.load().revision
    checkout.write(".git", "gitdir: /nowhere\n")
    assert checkout.load().revision == plain


@pytest.mark.parametrize("where", ["filter", "included", "submodule", "remote"])
def test_git_runs_no_program_that_the_checkout_names(checkout: Checkout, where: str) -> None:
    mark = checkout.path.parent / "mark"
    checkout.write("utils/x.py")
    git(checkout, "init", "-q")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-q", "-m", "all")
    evil = f'[filter "a=b"]\n clean = "touch {mark}; cat"\n'
    folder = checkout.path / "utils/sub" if where == "submodule" else checkout.path
    if where == "remote":
        tree = git(checkout, "rev-parse", "HEAD^{tree}")
        (folder / ".git/objects" / tree[:2] / tree[2:]).unlink()
        evil = (
            "[core]\n repositoryformatversion = 1\n[extensions]\n partialClone = evil\n"
            f'[protocol "ext"]\n allow = always\n[remote "evil"]\n promisor\n url = ext::touch {mark}\n'
        )
    elif where == "included":
        checkout.write(".git/more", evil)
        evil = "[include]\n path = more\n"
    elif where == "submodule":
        git(checkout, "clone", "-q", ".", "utils/sub")
        git(checkout, "add", "utils/sub")
    with (folder / ".git/config").open("a") as config:
        config.write(evil)
    (folder / ".git/info/attributes").write_text("* filter=a=b\n")
    os.utime(folder / "utils/x.py", (0, 0))  # git compares what has another time
    checkout.task()
    assert checkout.load().revision
    assert not mark.exists()
