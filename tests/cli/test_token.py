"""`token`: a secret for somebody, a line for the file."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Shell


def test_the_line_can_be_appended_to_the_file_and_the_secret_is_not_in_it(shell: Shell) -> None:
    done = shell.run("token", "alice", "--role", "admin")
    (secret,) = [line.strip() for line in done.stderr.splitlines() if line.startswith("  ")]
    assert done.stdout == f"alice {hashlib.sha256(secret.encode()).hexdigest()} admin\n"
    assert len(secret) >= 40


def test_no_secret_is_made_twice(shell: Shell) -> None:
    assert shell.run("token", "alice").stdout != shell.run("token", "alice").stdout


@pytest.mark.parametrize("name", ["", "two words", "ä", "x" * 65])
def test_a_name_that_the_file_could_not_hold_is_refused(shell: Shell, name: str) -> None:
    assert "letters, digits and _.@-" in shell.fault("token", name, status=2)


def test_an_unknown_role_is_answered_with_those_there_are(shell: Shell) -> None:
    assert '"player", "controller", "admin"' in shell.fault("token", "alice", "--role", "king", status=2)
