"""The users of a private mail server."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def mail_users() -> ModuleType:
    path = Path(__file__).parents[2] / "images/mail/mail_users.py"
    spec = importlib.util.spec_from_file_location("mail_users", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_any_password_survives_the_file_of_passwords(mail_users: ModuleType, tmp_path: Path) -> None:
    passwords = {"maryc@mcp.com": "castillo$m888", "odd@mcp.com": "a:b {PLAIN}c\nd é"}
    users = [{"email": email.title(), "password": password, "id": 1} for email, password in passwords.items()]
    path = tmp_path / "users.json"
    path.write_text(json.dumps({"users": users}))
    assert mail_users.read_users(path) == passwords
    lines = [line.split(":") for line in mail_users.passwd_file(passwords).splitlines()]
    decoded = {email: base64.b64decode(text.removeprefix("{PLAIN.b64}")).decode() for email, text in lines}
    assert decoded == passwords


def test_an_invalid_file_of_users_is_an_error_without_passwords(
    mail_users: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "users.json"
    with pytest.raises(mail_users.UsersError, match="cannot be read: No such file"):
        mail_users.read_users(path)
    for content, message in (
        ("{", "is not JSON"),
        ('{"users": []}', "a list of 1 to"),
        ('{"users": [{"email": "a/../b@mcp.com", "password": "secret"}]}', "user 1 has no `email`"),
        ('{"users": [{"email": "a@mcp.com", "password": ["secret"]}]}', r"user 1 \(a@mcp.com\) has no `pass"),
    ):
        path.write_text(content)
        with pytest.raises(mail_users.UsersError, match=message) as raised:
            mail_users.read_users(path)
        assert "secret" not in str(raised.value)
