"""`play`: play a task by hand in the full-screen player, or from a script."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO, cast

from decathlon_client import ClientError, Decathlon, NoVerdictError
from decathlon_client.script import ScriptError, play_script, read_script
from decathlon_client.shutdown import shutdown_on_signal

from decathlon_mcp.cli.console import ScriptConsole
from decathlon_mcp.cli.output import print_json
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.settings import Settings
from decathlon_mcp.storage.lock import create_state_folder
from decathlon_mcp.telemetry.logs import configure_logging

LOG_FILE = "play.log"
"""Log of the server in this process, in the state folder."""
PLAYER_MODULES = ("textual", "jsonschema")
"""Modules of the extra `play`, which only the full-screen player imports."""


async def play(settings: Settings | None, task: str | None, url: str | None, script: str | None) -> int:
    """Play a task and return the exit status; with a script, 0 only on a pass.

    `settings` are those of a server in this process; None to connect to one, whose URL is `url`, or else that
    of `DECATHLON_URL`. Raises DecathlonError if the player, the task or the server is not available.
    """
    if script is not None and task is None:
        raise BadRequestError("a script plays one task: decathlon-mcp play TASK --script FILE")
    if script is None:
        require_player()
        # The player draws only when its modules and the server have started, which can take ten seconds.
        sys.stderr.write(f"starting {'the player' if settings is None else 'a server and the player'} ...\n")
        sys.stderr.flush()
    d = connect(settings, url)
    try:
        with redirect_logs(settings):
            if script is not None and task is not None:
                return await _play_script(d, task, script)
            from decathlon_client.player.app import play_by_hand

            return await play_by_hand(d, task)
    except ClientError as error:
        raise DecathlonError(error.message) from error


def require_player() -> None:
    """Raises DecathlonError, with what to do about it, if the full-screen player cannot run."""
    if any(importlib.util.find_spec(name) is None for name in PLAYER_MODULES):
        raise DecathlonError("the player needs Textual; in the clone: pip install '.[server,starter,play]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise DecathlonError(
            "the player needs a terminal; without one: decathlon-mcp play TASK --script FILE"
        )


def connect(settings: Settings | None, url: str | None) -> Decathlon:
    """A client, as for `play`. Raises BadRequestError for a URL that cannot be right."""
    if settings is not None:
        options: dict[str, Any] = {name: getattr(settings, name) for name in Settings.model_fields}
        return Decathlon.embedded(options.pop("suite"), options.pop("provider"), **options)
    try:
        return Decathlon(url)
    except ValueError as error:
        raise BadRequestError(str(error)) from None


@contextmanager
def redirect_logs(settings: Settings | None) -> Generator[None]:
    """Write the log of a server in this process to a file; without one, drop log records."""
    # The player draws on the terminal and a script prints its steps on stderr, so logs cannot go there.
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    try:
        with ExitStack() as stack:
            if settings is not None:
                create_state_folder(settings.state)
                log = stack.enter_context((settings.state / LOG_FILE).open("a", encoding="utf-8"))
                configure_logging(settings.log_level, settings.log_format)
                for handler in root.handlers:
                    cast("logging.StreamHandler[TextIO]", handler).setStream(log)
            else:
                root.handlers[:] = [logging.NullHandler()]
            yield
    finally:
        root.setLevel(level)
        root.handlers[:] = handlers


async def _play_script(d: Decathlon, task: str, file: str) -> int:
    """Play the script, printing its steps on stderr and the verdict as JSON on stdout."""
    steps = await read_script(file)
    console = ScriptConsole(stderr=True)
    async with shutdown_on_signal() as watcher:
        try:
            async with d, d.episode(task) as episode:
                console.line("episode", episode.address)
                await play_script(episode, steps, console)
                verdict = (await episode.evaluate()).raw
        except ScriptError as error:
            raise DecathlonError(str(error)) from None
        except NoVerdictError as error:
            if error.verdict:
                print_json(error.verdict)
            raise
        print_json(verdict)
        return 0 if verdict.get("success") is True else 1
    return watcher.status or 1
