"""The command `decathlon-mcp`: the server and the tools to operate it."""

from __future__ import annotations

import io
import os
import sys

PROJECT_PACKAGES = ("decathlon_mcp", "decathlon_client", "decathlon_sandbox")
BARE_HELP = """\
Usage: decathlon-mcp stdio --url URL

Only the client is installed: `decathlon_client` plays on a running server, and this command connects a
program to one. Every other command needs the extra `server`, and the bundled tasks need `starter` too; in the
clone: pip install '.[server,starter]'
"""

__all__ = ["main"]


def main() -> None:
    """Run the command in `sys.argv` and exit: 0 success, 1 error, 2 usage error."""
    # libuv aborts if it has to close 0, 1 or 2, which a socket gets where the parent has closed it.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for stream in (sys.stdout, sys.stderr):
        # With an encoding such as Latin-1, the marks of commands and texts of others must not be an error.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if sys.argv[1:2] == ["serve"]:
        # Before anything else is imported: the supervisor stays small.
        from decathlon_mcp.cli import supervisor

        if not supervisor.join() and supervisor.applies(sys.argv[1:]):
            # As this process was started, with the interpreter's options.
            sys.exit(supervisor.supervise([sys.executable, *sys.orig_argv[1:]]))
    try:
        from decathlon_mcp.cli.command_line import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:  # during the imports
        status = 130
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in PROJECT_PACKAGES:
            raise
        # The bridge needs only the client, so it must also work where the server is not installed.
        names_server = any(word.partition("=")[0] == "--url" for word in sys.argv)
        if sys.argv[1:2] == ["stdio"] and (names_server or "DECATHLON_URL" in os.environ):
            from decathlon_client.bridge import main as run_bridge

            sys.exit(run_bridge(sys.argv[2:]))
        if sys.argv[1:2] in ([], ["-h"], ["--help"], ["help"]):
            sys.stdout.write(BARE_HELP)
            sys.exit(0)
        sys.stderr.write(
            f"decathlon-mcp: only the client is installed (no module {missing}); "
            "to install the server, in the clone: pip install '.[server,starter]'\n"
        )
        status = 1
    sys.exit(status)
