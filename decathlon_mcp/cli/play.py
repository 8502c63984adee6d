"""`play`: a task by hand, in a full-screen terminal, or a script of its calls from a pipe."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any, TextIO, cast

from decathlon_client import ClientError, Decathlon, NoVerdictError
from decathlon_client.script import ScriptError, play_script, read_script
from decathlon_client.shutdown import shutdown_on_signal

from decathlon_mcp.cli.console import Screen
from decathlon_mcp.errors import BadRequestError, DecathlonError
from decathlon_mcp.settings import Settings
from decathlon_mcp.telemetry.logs import configure_logging

LOG = "play.log"
"""What the server in this process logs, in the state folder."""
NEEDED = ("textual", "jsonschema")
"""What only the full-screen player imports: the extra `play`."""


async def play(settings: Settings, task: str | None, url: str | None, script: str | None) -> int:
    """The status to exit with: of a script 0 only with a pass.

    Raises DecathlonError where there is nothing to play, or nothing to play it on.
    """
    if script is not None and task is None:
        raise BadRequestError("a script plays one task: decathlon-mcp play TASK --script FILE")
    if script is None:
        require_player()
    d = _server(settings, url)
    try:
        with _logs_kept(settings, embedded=url is None):
            if script is not None and task is not None:
                return await _script(d, task, script)
            from decathlon_client.player.app import play_by_hand

            return await play_by_hand(d, task)
    except ClientError as error:
        raise DecathlonError(error.message) from error


def require_player() -> None:
    """Raises DecathlonError where the full-screen player cannot run, saying what to do about it."""
    if any(importlib.util.find_spec(name) is None for name in NEEDED):
        raise DecathlonError("the player needs Textual: pip install 'decathlon-mcp[server,play]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise DecathlonError(
            "the player needs a terminal; without one: decathlon-mcp play TASK --script FILE"
        )


def _server(settings: Settings, url: str | None) -> Decathlon:
    if url is None:
        told: dict[str, Any] = {name: getattr(settings, name) for name in Settings.model_fields}
        return Decathlon.embedded(told.pop("suite"), told.pop("provider"), **told)
    try:
        return Decathlon(url, os.environ.get("DECATHLON_TOKEN") or None)
    except ValueError as error:
        raise BadRequestError(str(error)) from None


@contextmanager
def _logs_kept(settings: Settings, *, embedded: bool) -> Generator[None]:
    """The screen, and a script's stderr, are for who plays; what the server in this process logs is kept."""
    root = logging.getLogger()
    before = root.level, root.handlers[:]
    try:
        with ExitStack() as stack:
            if embedded:
                settings.state.mkdir(parents=True, exist_ok=True)
                settings.state.chmod(0o700)
                log = stack.enter_context((settings.state / LOG).open("a", encoding="utf-8"))
                configure_logging(settings.log_level, settings.log_format)
                for handler in root.handlers:
                    cast("logging.StreamHandler[TextIO]", handler).setStream(log)
            else:
                root.handlers[:] = [logging.NullHandler()]
            yield
    finally:
        root.setLevel(before[0])
        root.handlers[:] = before[1]


async def _script(d: Decathlon, task: str, file: str) -> int:
    """The verdict as JSON on stdout, the steps on stderr."""
    steps = await read_script(file)
    screen = Screen(stderr=True)
    async with shutdown_on_signal() as departure:
        try:
            async with d, d.episode(task) as episode:
                screen.say("episode", episode.address)
                await play_script(episode, steps, screen)
                verdict = (await episode.evaluate()).raw
        except ScriptError as error:
            raise DecathlonError(str(error)) from None
        except NoVerdictError as error:
            if error.verdict:
                _write(error.verdict)
            raise
        _write(verdict)
        return 0 if verdict.get("success") is True else 1
    return departure.status or 1


def _write(verdict: object) -> None:
    sys.stdout.write(json.dumps(verdict, indent=2, ensure_ascii=False) + "\n")
