"""Token files, allowed host names and the listening socket."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.http.authentication import Tokens, new_token
from decathlon_mcp.http.listening import hosts_for, listen


def test_a_new_token_is_accepted_with_its_name_and_role(tmp_path: Path) -> None:
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
    ("text", "message"),
    [
        ("ada 12 player", "1: expected NAME SHA256 ROLE"),
        (f"# one\nada {'0' * 64} king", "2: expected NAME SHA256 ROLE"),
        ("# nobody\n", "there is no token in it"),
    ],
)
def test_an_invalid_token_file_is_an_error_naming_the_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "tokens"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        Tokens.read(file)


def test_a_missing_token_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        Tokens.read(tmp_path / "none")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "box.example"])
def test_listening_beyond_loopback_requires_tokens(host: str) -> None:
    with pytest.raises(SettingsError, match="--tokens FILE"):
        hosts_for(host, (), Tokens())


def test_allowed_hosts_are_loopback_the_host_and_the_configured_names(tmp_path: Path) -> None:
    _, line = new_token("ada", "player")
    (tmp_path / "tokens").write_text(line)
    tokens = Tokens.read(tmp_path / "tokens")
    loopback = ("127.0.0.1", "localhost", "[::1]")
    assert hosts_for("0.0.0.0", ("box.example",), tokens).names == (*loopback, "box.example")
    assert hosts_for("192.0.2.7", (), tokens).names == (*loopback, "192.0.2.7")
    security = hosts_for("127.0.0.1", (), Tokens()).security()
    assert "127.0.0.1:*" in security.allowed_hosts
    assert security.enable_dns_rebinding_protection


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingsError, match=f"{port}: Address already in use; choose another --port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_out_of_range_is_an_error(port: int) -> None:
    with pytest.raises(SettingsError, match=f"{port}: .*port must be 0-65535; choose another --port"):
        listen("127.0.0.1", port)
