"""Episodes for programs outside: by their public id, with their signed verdicts, and without handles."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

from decathlon_mcp.plugins.history.episode_history import EpisodeHistory
from decathlon_mcp.plugins.history.values import (
    CallEntry,
    EpisodeDetails,
    EpisodeQuery,
    EpisodeSummary,
    NoteEntry,
    Text,
)
from decathlon_mcp.types import JsonObject, as_object

MAX_VALUE_BYTES = 8 << 20
"""Longest arguments or reply that are exported whole; the default limit of a reply is 4 MiB."""
SETTINGS = ("policy", "provider", "isolation", "language", "names", "release", "limits")
"""Members of a trajectory's first line that are exported."""


@dataclass(frozen=True, slots=True)
class ExportedEpisode:
    """One episode of a history. Its entries are read while they are iterated."""

    history: EpisodeHistory
    details: EpisodeDetails

    @property
    def verdict(self) -> JsonObject | None:
        """The verdict as it was signed, so that it verifies; None if there is none."""
        verdict = self.details.verdict
        if verdict is None and self.details.verdict_text is not None:
            verdict = as_object(parse_json(self.details.verdict_text))
        # One that names the episode in another way could give its handle away.
        is_own = verdict is not None and verdict.get("episode") == self.details.summary.public_id
        return verdict if is_own else None

    def entries(self, limit_bytes: int = MAX_VALUE_BYTES) -> Iterator[CallEntry | NoteEntry]:
        """The calls and notes in order. Longer arguments and replies are cut."""
        yield from self.history.entries(self.details.summary.public_id, limit_bytes=limit_bytes)

    def to_json(self) -> JsonObject:
        """Everything but the entries. Times in Unix seconds."""
        details, summary = self.details, self.details.summary
        head, ready, claim = details.head or {}, details.ready or {}, details.claim
        return {
            "id": summary.public_id,
            "suite": summary.suite,
            "task": summary.task,
            "labels": dict(summary.labels),
            "started_at": summary.started_at,
            "ended_at": summary.ended_at,
            "ending": summary.ending,
            "lost": summary.reason,
            "cause": summary.cause,
            "success": summary.success,
            "reward": summary.reward,
            "turns": summary.turns,
            "calls": details.calls if summary.has_files else summary.calls,
            "notes": details.notes,
            "launch_time": details.launch_time,
            "suite_revision": ready.get("suite_revision"),
            "settings": {name: head[name] for name in SETTINGS if head.get(name) is not None},
            "prompt": {"system": _raw(details.system_prompt), "task": _raw(details.task_prompt)},
            "tools_sha256": ready.get("tools"),
            "answer": None if claim is None else claim.get("answer"),
            "truncated": bool(claim is not None and claim.get("truncated")),
            "has_files": summary.has_files,
            "verdict": self.verdict,
        }


def finished_episodes(
    history: EpisodeHistory,
    run: str | None,
    group: Callable[[EpisodeSummary], tuple[str, ...]] = lambda _: (),
) -> list[str]:
    """Public ids of the finished episodes of a run, or of all. Without branches and replays.

    Episodes of a `group` follow each other, the oldest first.
    """
    every = history.all_episodes(EpisodeQuery(run=run, live=False))
    found = [(group(summary), summary.public_id) for summary in every]
    found.reverse()
    found.sort(key=lambda item: item[0])
    return [public_id for _, public_id in found]


def read_episodes(history: EpisodeHistory, public_ids: list[str]) -> Iterator[ExportedEpisode]:
    """The episodes, one at a time in memory, without episodes that were deleted meanwhile."""
    for public_id in public_ids:
        details = history.episode(public_id)
        if details is not None:
            yield ExportedEpisode(history, details)


def entry_to_json(entry: CallEntry | NoteEntry) -> JsonObject:
    """A call or a note. Times in Unix seconds."""
    if isinstance(entry, NoteEntry):
        note = {"note": entry.number, "time": entry.time, "role": entry.role, "text": entry.text.raw}
        return {**note, "usage": dict(entry.usage)} if entry.usage else note
    return {
        "call": entry.seq,
        "time": entry.time,
        "name": entry.name,
        "server": entry.server,
        "tool": entry.tool,
        "arguments": value_of(entry.arguments),
        "seconds": entry.seconds,
        "failed": entry.failed,
        "reply_kind": entry.reply_kind,
        "reply": value_of(entry.reply),
    }


def value_of(text: Text | None) -> Any:
    """The value of JSON text; for a cut text or none of JSON, `{"text", "truncated", "size_bytes"}`."""
    if text is None:
        return None
    if not text.truncated:
        try:
            return parse_json(text.raw)
        except (ValueError, RecursionError):
            pass
    return {"text": text.raw, "truncated": text.truncated, "size_bytes": text.size_bytes}


def parse_json(text: str) -> Any:
    """Parse JSON. `NaN` and infinities, which are none, become text. Raises ValueError, RecursionError."""
    return json.loads(text, parse_constant=str)


def json_bytes(value: object) -> bytes:
    """Compact JSON in UTF-8."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # UTF-8 has no lone surrogates; Python's escape for them is also JSON's.
    return text.encode("utf-8", "backslashreplace")


def utf8(text: str | None) -> str | None:
    """The text with marks in the place of lone surrogates, which UTF-8 does not have."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def _raw(text: Text | None) -> str | None:
    return None if text is None else text.raw


def write_jsonl(episodes: Iterable[ExportedEpisode], file: BinaryIO) -> int:
    """Write the episodes; their number. One entry at a time is in memory."""
    count = 0
    for count, episode in enumerate(episodes, 1):  # noqa: B007
        file.write(json_bytes(episode.to_json())[:-1] + b',"entries":[')
        separator = b""
        for entry in episode.entries():
            file.write(separator + json_bytes(entry_to_json(entry)))
            separator = b","
        file.write(b"]}\n")
    return count
