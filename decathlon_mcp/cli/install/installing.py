"""Writing an entry, and taking it back: what is shown, what is asked, what is kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

from decathlon_mcp.cli.install.change import Change, Kept, keep, newest_backup
from decathlon_mcp.cli.install.edit import Text
from decathlon_mcp.cli.install.jsonc import NotJsonError
from decathlon_mcp.cli.install.programs import PROGRAMS, Machine, Program, ProgramName, file_of
from decathlon_mcp.cli.install.wish import TOKEN, Wish
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.types import as_object


def show(name: ProgramName, wish: Wish, entry_name: str) -> int:
    """Print the entry, and touch nothing."""
    program = PROGRAMS[name]
    entry = program.entry(wish.command(), wish.environment())
    sys.stdout.write(json.dumps({program.key: {entry_name: entry}}, indent=2, ensure_ascii=False) + "\n")
    return 0


def install(
    name: ProgramName, wish: Wish, entry_name: str, *, machine: Machine, project: Path | None, yes: bool
) -> int:
    """Write the entry, once it was agreed to. Raises BadRequestError for a file not as it should be."""
    program = PROGRAMS[name]
    before = Kept.read(file_of(name, machine, project))
    environment = wish.environment()
    entry = program.entry(wish.command(), environment)
    after = _edited(before, program, lambda text: text.with_member((program.key, entry_name), entry))
    change = Change(before, after.text.encode())
    if not change:
        sys.stdout.write(f"{before.path} has that entry already.\n")
        return 0
    if not wish.url and not machine.platform.startswith("linux"):
        sys.stderr.write(
            "decathlon-mcp: sandboxes want Linux: with --url the entry is a bridge to a server there\n"
        )
    if not _agreed(change, list(environment.values()), yes):
        return 1
    backup = keep(before, entry_name)
    try:
        change.write()
    except BadRequestError:
        backup.unlink()
        raise
    sys.stdout.write(f"Written; what was there is in {backup}.\n{program.what_next}\n")
    return 0


def undo(name: ProgramName, entry_name: str, *, machine: Machine, project: Path | None, yes: bool) -> int:
    """Take the newest writing back: the entry is again what it was, and what else has changed since stays."""
    program = PROGRAMS[name]
    now = Kept.read(file_of(name, machine, project))
    backup = newest_backup(now.path, entry_name)
    change = Change(now, _undone(now, Kept.read(backup), program, entry_name))
    if change and not _agreed(change, _secrets(now, program, entry_name), yes):
        return 1
    if change:
        change.write()
    backup.unlink()
    sys.stdout.write(f"Undone. {program.what_next}\n")
    return 0


def _undone(now: Kept, before: Kept, program: Program, entry_name: str) -> bytes | None:
    if now.data is None:
        return None
    was = before.text(comments=program.comments)
    old = was.get(program.key, entry_name)
    if old is not None:
        undone = _edited(now, program, lambda text: text.with_member((program.key, entry_name), old.value))
    else:
        undone = _edited(now, program, lambda text: text.without_member(program.key, entry_name))
        if was.get(program.key) is None and undone.value.get(program.key) == {}:
            undone = undone.without_member(program.key)
    if undone.value != was.value:
        return undone.text.encode()
    return before.data or None


def _edited(kept: Kept, program: Program, edit: Callable[[Text], Text]) -> Text:
    text = kept.text(comments=program.comments)
    try:
        return edit(text)
    except NotJsonError as error:
        raise BadRequestError(f"{kept.path} is not what it should be, and was not touched: {error}") from None


def _secrets(kept: Kept, program: Program, entry_name: str) -> list[str]:
    entry = kept.text(comments=program.comments).get(program.key, entry_name)
    environment = as_object((as_object(entry.value) or {}).get("env")) if entry else None
    return [str(environment[TOKEN])] if environment and TOKEN in environment else []


def _agreed(change: Change, secrets: list[str], yes: bool) -> bool:
    sys.stdout.write(change.shown(secrets) + "\n\n")
    if yes:
        return True
    if not sys.stdin.isatty():
        raise BadRequestError("nobody to ask: to write this without being asked, say --yes")
    sys.stdout.write("Write this? [y/N] ")
    sys.stdout.flush()
    if sys.stdin.readline().strip().lower() in ("y", "yes"):
        return True
    sys.stdout.write("Nothing was written.\n")
    return False
