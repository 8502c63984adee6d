"""Making a token."""

from __future__ import annotations

import sys

from decathlon_mcp.edge.tokens import new_token
from decathlon_mcp.episodes.caller import Role
from decathlon_mcp.errors import SettingsError

ALPHABET = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.@-")


def make(name: str, role: Role) -> int:
    """The secret is told once, to whoever sits there; the line can be appended to the file as it comes."""
    if not name or len(name) > 64 or not ALPHABET.issuperset(name):
        raise SettingsError(f"a token's name is of letters, digits and _.@-, at most 64 of them: {name!r}")
    secret, line = new_token(name, role)
    sys.stderr.write(
        f"The secret of {name}, told only now; clients send it as `Authorization: Bearer ...`:\n\n"
        f"  {secret}\n\nThe line for the file that --tokens names:\n\n"
    )
    sys.stderr.flush()
    sys.stdout.write(f"{line}\n")
    return 0
