"""The files of one episode: `trajectory.jsonl`, one event a line, and `verdict.json`."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decathlon_mcp.telemetry.logs import fields
from decathlon_mcp.types import JsonObject, as_json, as_object

log = logging.getLogger("decathlon.observe")


class Journal:
    """Writes and reads the folder of one episode, which is readable by its owner alone.

    Creating it raises OSError; later a disk that fails costs lines and files, which is logged, and never the
    episode.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Created at once, so that a full disk is found before the episode starts.
        folder.mkdir(parents=True, mode=0o700)
        self._trajectory = (folder / "trajectory.jsonl").open("ab", buffering=0)

    def add(self, event: str, **values: Any) -> None:
        """Append one line: `event`, `time` (Unix seconds) and the values. Does nothing once closed."""
        if self._trajectory.closed:
            return
        line = as_json({"event": event, "time": round(time.time(), 6), **values}) + b"\n"
        try:
            self._trajectory.write(line)
        except OSError as error:
            log.warning("a line of a trajectory is lost", extra=fields(event=event, why=error.strerror))

    def events(self, event: str) -> Iterator[JsonObject]:
        """Read the lines of one kind, in order. Lines that a failing disk has truncated are skipped."""
        with (self.folder / "trajectory.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    value = as_object(json.loads(line)) or {}
                except ValueError:
                    continue
                if value.get("event") == event:
                    yield value

    def write_verdict(self, verdict: JsonObject) -> None:
        """Write or replace `verdict.json`."""
        self.write("verdict.json", verdict)

    def write(self, name: str, value: JsonObject) -> None:
        """Write or replace a file of the folder; readers see either the whole file or none."""
        target = self.folder / name
        partial = target.with_suffix(".partial")
        try:
            # UTF-8 has no lone surrogates; Python's escape for them is also JSON's.
            text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
            partial.write_bytes(text.encode("utf-8", "backslashreplace"))
            os.replace(partial, target)  # noqa: PTH105  (documented as atomic)
        except OSError as error:
            log.warning("a file of an episode could not be kept", extra=fields(file=name, why=error.strerror))

    def close(self) -> None:
        """Close the trajectory; it can still be read."""
        self._trajectory.close()
