"""Making a token."""

from __future__ import annotations

import sys

from decathlon_mcp.episodes.access import Role
from decathlon_mcp.http.authentication import new_token


def make(name: str, role: Role) -> int:
    """The secret is told once, to whoever sits there; the line can be appended to the file as it comes."""
    secret, line = new_token(name, role)
    sys.stderr.write(
        f"The secret of {name}, told only now; clients send it as `Authorization: Bearer ...`:\n\n"
        f"  {secret}\n\nThe line for the file that --tokens names:\n\n"
    )
    sys.stderr.flush()
    sys.stdout.write(f"{line}\n")
    return 0
