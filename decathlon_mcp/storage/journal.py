"""What stays of an episode on disk: `trajectory.jsonl`, a line an event, and `verdict.json`."""

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
    """One episode's folder. Readable by its owner alone; made at once, so that a full disk is known early.

    Later a disk that fails costs lines of the trajectory, said in the log, and never the episode.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, mode=0o700)
        self._trajectory = (folder / "trajectory.jsonl").open("ab", buffering=0)

    def add(self, event: str, **values: Any) -> None:
        """Write one line: `event`, the time (Unix seconds), the values."""
        if self._trajectory.closed:
            return
        line = as_json({"event": event, "time": round(time.time(), 6), **values}) + b"\n"
        try:
            self._trajectory.write(line)
        except OSError as error:
            log.warning("a line of a trajectory is lost", extra=fields(event=event, why=error.strerror))

    def events(self, event: str) -> Iterator[JsonObject]:
        """The lines of one kind, in order; what a failing disk has cut short is passed over."""
        with (self.folder / "trajectory.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    value = as_object(json.loads(line)) or {}
                except ValueError:
                    continue
                if value.get("event") == event:
                    yield value

    def write_verdict(self, verdict: JsonObject) -> None:
        """Keep the verdict."""
        self.write("verdict.json", verdict)

    def write(self, name: str, value: JsonObject) -> None:
        """Keep a file beside; whoever reads it sees the whole of it or none."""
        target = self.folder / name
        partial = target.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(partial, target)  # noqa: PTH105  (atomic, as its documentation says)
        except OSError as error:
            log.warning("a file of an episode could not be kept", extra=fields(file=name, why=error.strerror))

    def close(self) -> None:
        self._trajectory.close()
