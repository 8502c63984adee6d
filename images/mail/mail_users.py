"""The users of a mail server: reads Toolathlon's configs/users_data.json, writes Dovecot's passwd-file.

`{"users": [{"email": "...", "password": "..."}, ...]}`; other fields are ignored. Errors contain no password.
"""

import base64
import json
import re
from collections.abc import Mapping
from pathlib import Path

FILE_BYTES = 64 << 20
MAX_USERS = 100_000
PASSWORD_CHARACTERS = 1000
_ADDRESS = re.compile(r"[A-Za-z0-9.+_-]{1,64}@[A-Za-z0-9.-]{1,255}")


class UsersError(Exception):
    """The file of users is not what was expected."""


def read_users(path: Path) -> dict[str, str]:
    """Passwords by address, in lower case. Raises UsersError."""
    try:
        if path.stat().st_size > FILE_BYTES:
            raise UsersError(f"{path} is longer than {FILE_BYTES} bytes")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UsersError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise UsersError(f"{path} is not JSON") from None
    entries = content.get("users") if isinstance(content, dict) else None
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_USERS:
        raise UsersError(f"{path}: `users`, a list of 1 to {MAX_USERS} users, was expected")
    return dict(_user(path, number, entry) for number, entry in enumerate(entries, 1))


def _user(path: Path, number: int, entry: object) -> tuple[str, str]:
    fields = entry if isinstance(entry, dict) else {}
    email, password = fields.get("email"), fields.get("password")
    if not isinstance(email, str) or not _ADDRESS.fullmatch(email):
        raise UsersError(f"{path}: user {number} has no `email` of the form name@domain")
    if not isinstance(password, str) or not 0 < len(password) <= PASSWORD_CHARACTERS:
        expected = f"a text of 1 to {PASSWORD_CHARACTERS} characters"
        raise UsersError(f"{path}: user {number} ({email}) has no `password`, {expected}")
    return email.lower(), password


def passwd_file(users: Mapping[str, str]) -> str:
    """The text of Dovecot's passwd-file. Passwords are encoded, as they may contain its separator."""
    lines = (
        f"{email}:{{PLAIN.b64}}{base64.b64encode(password.encode()).decode()}\n"
        for email, password in users.items()
    )
    return "".join(lines)
