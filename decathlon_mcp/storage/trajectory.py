"""Reads the calls of an episode from its `trajectory.jsonl`, without the server that wrote it.

A call is either one line, or two: one of event `call` from before it was sent, and one of event `reply` with
the same `seq` from after it. Releases before the store wrote one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from decathlon_mcp.types import JsonObject, as_object

TRAJECTORY_FILE = "trajectory.jsonl"
NO_REPLY: JsonObject = {"error": "no reply was recorded"}
"""Result of a call whose reply is not in the trajectory: its server was killed, or its disk was full."""


class RecordedCalls:
    """The calls in the order of their `seq`, each with its reply, read one by one each time it is iterated.

    Both the constructor and the iteration block. Lines that cannot be read are skipped; FileNotFoundError if
    there is no file.
    """

    def __init__(self, trajectory: Path) -> None:
        self._file = trajectory
        # Positions, not lines: a trajectory may have hundreds of MiB.
        self._calls: dict[int, int] = {}
        self._replies: dict[int, int] = {}
        self.ended = False
        """Whether the episode is over: it has its last line."""
        self._index()

    def __iter__(self) -> Iterator[JsonObject]:
        with self._file.open("rb") as lines:
            for seq in sorted(self._calls):
                lines.seek(self._calls[seq])
                call = _parse(lines.readline()) or {}
                reply: JsonObject = {}
                if (position := self._replies.get(seq)) is not None:
                    lines.seek(position)
                    reply = _parse(lines.readline()) or {}
                yield _joined(call, reply)

    def _index(self) -> None:
        with self._file.open("rb") as lines:
            position = 0
            for line in lines:
                event = _parse(line) or {}
                seq = event.get("seq")
                match event.get("event"):
                    case "call" if isinstance(seq, int):
                        # The first, if a later server has written it again.
                        self._calls.setdefault(seq, position)
                    case "reply" if isinstance(seq, int):
                        self._replies[seq] = position
                    case "end":
                        self.ended = True
                    case _:
                        pass
                position += len(line)


def _joined(call: JsonObject, reply: JsonObject) -> JsonObject:
    """One event as `CallRecord.from_journal` reads it."""
    missing = {"started_at": call.get("time", 0.0), "seconds": 0.0, "failed": True, "result": NO_REPLY}
    known = {name: value for name, value in reply.items() if name not in ("event", "time")}
    return {**missing, **call, **known}


def _parse(line: bytes) -> JsonObject | None:
    try:
        return as_object(json.loads(line))
    except (ValueError, RecursionError):
        return None
