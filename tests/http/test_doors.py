"""Tokens, names and sockets: what is refused before anybody is let in."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.http.authentication import Tokens, new_token
from decathlon_mcp.http.server import hosts_for, listen


def test_a_new_token_opens_the_door_its_line_is_for(tmp_path: Path) -> None:
    secret, line = new_token("ada", "controller")
    assert secret not in line
    file = tmp_path / "tokens"
    file.write_text(f"# people\n\n{line}\n")
    tokens = Tokens.read(file)
    principal = tokens.principal(f"Bearer {secret}")
    assert principal is not None
    assert (principal.token, principal.role) == ("ada", "controller")
    for header in (None, "", secret, f"Basic {secret}", "Bearer nonsense", f"Bearer {secret}x"):
        assert tokens.principal(header) is None, header


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("ada 12 player", "1: expected NAME SHA256 ROLE"),
        (f"# one\nada {'0' * 64} king", "2: expected NAME SHA256 ROLE"),
        ("# nobody\n", "there is no token in it"),
    ],
)
def test_a_broken_file_of_tokens_names_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(SettingsError, match=words):
        Tokens.read(file)


def test_a_file_of_tokens_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        Tokens.read(tmp_path / "none")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "box.example"])
def test_beyond_loopback_nobody_serves_without_tokens(host: str) -> None:
    with pytest.raises(SettingsError, match="--tokens FILE"):
        hosts_for(host, (), Tokens())


def test_the_hosts_names_are_answered_to_and_no_others(tmp_path: Path) -> None:
    _, line = new_token("ada", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    assert hosts_for("0.0.0.0", ("box.example",), tokens).names[-1] == "box.example"
    security = hosts_for("127.0.0.1", (), Tokens()).security()
    assert "127.0.0.1:*" in security.allowed_hosts
    assert security.enable_dns_rebinding_protection


def test_a_port_that_is_taken_is_said() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"{port}: Address already in use; choose another --port"):
            listen("127.0.0.1", port)
