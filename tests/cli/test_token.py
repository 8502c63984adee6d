"""`token`: a secret for its owner, and a line for the tokens file."""

from __future__ import annotations

import hashlib

import pytest

from tests.cli.conftest import Shell


def test_the_line_for_the_file_holds_only_a_hash_of_the_secret(shell: Shell) -> None:
    done = shell.run("token", "alice", "--role", "admin")
    (secret,) = [line.strip() for line in done.stderr.splitlines() if line.startswith("  ")]
    assert done.stdout == f"alice {hashlib.sha256(secret.encode()).hexdigest()} admin\n"
    assert len(secret) >= 40


@pytest.mark.parametrize("name", ["two words", "ä", "x" * 65])
def test_a_name_that_does_not_fit_the_file_is_refused(shell: Shell, name: str) -> None:
    assert "letters, digits and _.@-" in shell.error("token", name, status=2)


def test_an_unknown_role_gets_the_list_of_roles(shell: Shell) -> None:
    assert '"player", "controller", "admin"' in shell.error("token", "alice", "--role", "king", status=2)
