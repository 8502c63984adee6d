"""`token` and `key`: access tokens, and the server's signing key."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from decathlon_mcp.cli.output import print_json
from decathlon_mcp.cli.usage import report
from decathlon_mcp.grading.signing import Signer
from decathlon_mcp.http.authentication import new_token
from decathlon_mcp.settings import default_state

if TYPE_CHECKING:
    from decathlon_mcp.episodes.specification import Role


def make_token(name: str, role: Role, secret_file: Path | None) -> int:
    """Print a new token: the line to append to the tokens file on stdout, its secret on stderr.

    With `secret_file`, the secret goes to this new file instead, which only its owner can read.
    """
    secret, line = new_token(name, role)
    if secret_file is None:
        sys.stderr.write(
            f"Secret for {name} (shown once); clients send it as `Authorization: Bearer ...`:\n\n"
            f"  {secret}\n\nLine for the --tokens file:\n\n"
        )
        sys.stderr.flush()
    else:
        try:
            descriptor = os.open(secret_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            report(f"--secret: {secret_file}: {error.strerror}; name a file that does not exist yet")
            return 2
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(f"{secret}\n")
    sys.stdout.write(f"{line}\n")
    return 0


def show_key(state: Path | None) -> int:
    """Print the server's public key as JSON; create the key if there is none."""
    public = Signer.at(state or default_state()).public
    print_json(public.to_json(), indent=None)
    return 0
