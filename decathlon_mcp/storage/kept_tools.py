"""The lists of tools that episodes offered, in `tools/` of the state folder: each content once, by digest.

The trajectory's line `ready` names the digest. 70 tools are some 180 KiB, too much for each episode.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from weakref import WeakKeyDictionary

import anyio.to_thread

from decathlon_mcp.storage.disk import NotRegularError, new_file, open_regular
from decathlon_mcp.storage.trajectory import TRAJECTORY_FILE
from decathlon_mcp.storage.trajectory_lines import event_of, find_lines
from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, read_object

FOLDER = "tools"
UNFINISHED = ".new-"
RECENT_SECONDS = 3600.0
"""A list that was used so recently may be named by a line that is about to be written."""

log = logging.getLogger("decathlon.storage")


class KeptTools:
    """Writes lists of tools. `folder` is made when the first one is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._digests: WeakKeyDictionary[object, str] = WeakKeyDictionary()

    async def keep(self, holder: object, tools: Sequence[JsonObject]) -> str:
        """Keep the tools, and return the SHA-256 of their JSON.

        `holder`: has the same tools as long as it lives. A disk that fails is logged.
        """
        digest = self._digests.get(holder)
        if digest is None or not self._touch(digest):
            digest = self._digests[holder] = await anyio.to_thread.run_sync(self._write, tools)
        return digest

    def _touch(self, digest: str) -> bool:
        """Note that a list is used; False if it is not there any more."""
        try:
            os.utime(self._folder / f"{digest}.json")
        except OSError:
            return False
        return True

    def _write(self, tools: Sequence[JsonObject]) -> str:
        # ASCII, for lone surrogates too; sorted, so that the same tools are the same file.
        content = json.dumps(tools, sort_keys=True, separators=(",", ":")).encode("ascii")
        digest = sha256(content).hexdigest()
        if self._touch(digest):
            return digest
        unfinished = self._folder / f"{UNFINISHED}{token_hex(6)}"
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with new_file(self._folder / f"{digest}.json", unfinished) as file:
                file.write(content)
        except OSError as error:
            log.warning("a list of tools could not be kept", extra=fields(why=error.strerror))
        return digest


def remove_unnamed_tools(state: Path, before: float, *, dry_run: bool = False) -> int:
    """Remove the lists that no trajectory names and nobody has used since `before`; returns their number.

    `before`: Unix seconds. Blocks: reads the beginning of every trajectory if there is a list so old.
    """
    try:
        with os.scandir(state / FOLDER) as entries:
            old = [Path(entry.path) for entry in entries if entry.stat().st_mtime < before]
        named = set(_named_digests(state / "episodes")) if old else set[str]()
    except FileNotFoundError:
        return 0
    except OSError as error:
        # What cannot be read may name any of them.
        log.warning("lists of tools are not removed", extra=fields(why=error.strerror))
        return 0
    unnamed = [file for file in old if file.stem not in named]
    if not dry_run:
        for file in unnamed:
            file.unlink(missing_ok=True)
    return len(unnamed)


def _named_digests(episodes: Path) -> Iterator[str]:
    with os.scandir(episodes) as folders:
        for folder in folders:
            with suppress(FileNotFoundError, NotADirectoryError, NotRegularError):
                yield from _ready_digests(Path(folder.path) / TRAJECTORY_FILE)


def _ready_digests(trajectory: Path) -> Iterator[str]:
    """The digests in the lines `ready` of one trajectory; a set-up that started over has several."""
    with open_regular(trajectory) as lines:
        for _, _, line in find_lines(lines, whole=("ready",)):
            event = event_of(line)
            if event == "call":
                return  # nothing was sent before the episode was ready
            if event == "ready":
                yield str((read_object(line) or {}).get("tools"))
