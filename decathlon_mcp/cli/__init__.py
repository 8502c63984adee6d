"""The command `decathlon-mcp`: the server, and what an operator wants around it."""

from __future__ import annotations

import sys

OURS = ("decathlon_mcp", "decathlon_client", "decathlon_sandbox")

__all__ = ["main"]


def main() -> None:
    """Run the command of `sys.argv` and exit: 0 well done, 1 it went wrong, 2 it was not understood."""
    try:
        from decathlon_mcp.cli.app import run

        status = run(sys.argv[1:])
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in OURS:
            raise
        if sys.argv[1:2] == ["stdio"] and "--url" in sys.argv:
            from decathlon_client.bridge import main as run_bridge

            sys.exit(run_bridge(sys.argv[2:]))
        sys.stderr.write(
            f"decathlon-mcp: this is only the client (no module {missing}): "
            "install the server with: pip install 'decathlon-mcp[server]'\n"
        )
        status = 1
    sys.exit(status)
