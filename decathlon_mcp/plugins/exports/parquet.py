"""Parquet: the tables `episodes`, `calls` and `notes`, joined by the public id `episode`.

Values of any shape (arguments, replies, verdicts, settings) are columns of JSON text.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from decathlon_mcp.plugins.exports.episodes import ExportedEpisode, json_bytes, utf8
from decathlon_mcp.plugins.history.values import CallEntry, NoteEntry
from decathlon_mcp.types import JsonObject

# It has no types.
pa: Any = pyarrow
pq: Any = pyarrow.parquet

GROUP_BYTES = 8 << 20
"""Text of a row group: what is in memory of each table."""
GROUP_ROWS = 10_000

_TIME = pa.timestamp("us", tz="UTC")
_TABLES: dict[str, Any] = {
    "episodes": pa.schema(
        [
            ("episode", pa.string()),
            ("suite", pa.string()),
            ("task", pa.string()),
            ("run", pa.string()),
            ("labels", pa.map_(pa.string(), pa.string())),
            ("started_at", _TIME),
            ("ended_at", _TIME),
            ("ending", pa.string()),
            ("lost", pa.string()),
            ("cause", pa.string()),
            ("success", pa.bool_()),
            ("reward", pa.float64()),
            ("turns", pa.int64()),
            ("calls", pa.int64()),
            ("notes", pa.int64()),
            ("launch_time", pa.string()),
            ("suite_revision", pa.string()),
            ("settings", pa.string()),
            ("system_prompt", pa.string()),
            ("task_prompt", pa.string()),
            ("tools_sha256", pa.string()),
            ("answer", pa.string()),
            ("truncated", pa.bool_()),
            ("has_files", pa.bool_()),
            ("verdict", pa.string()),
        ]
    ),
    "calls": pa.schema(
        [
            ("episode", pa.string()),
            ("call", pa.int64()),
            ("time", _TIME),
            ("name", pa.string()),
            ("server", pa.string()),
            ("tool", pa.string()),
            ("arguments", pa.string()),
            ("seconds", pa.float64()),
            ("failed", pa.bool_()),
            ("reply_kind", pa.string()),
            ("reply", pa.string()),
            ("cut", pa.bool_()),
        ]
    ),
    "notes": pa.schema(
        [
            ("episode", pa.string()),
            ("note", pa.int64()),
            ("calls", pa.int64()),
            ("time", _TIME),
            ("role", pa.string()),
            ("text", pa.string()),
            ("usage", pa.string()),
        ]
    ),
}


class _Table:
    """One table, written group by group."""

    def __init__(self, name: str, folder: Path) -> None:
        self._schema = _TABLES[name]
        self._writer: Any = pq.ParquetWriter(folder / f"{name}.parquet", self._schema, compression="zstd")
        self._rows: list[JsonObject] = []
        self._bytes = 0

    def add(self, row: JsonObject) -> None:
        self._rows.append(row)
        self._bytes += sum(len(value) for value in row.values() if isinstance(value, str))
        if self._bytes >= GROUP_BYTES or len(self._rows) >= GROUP_ROWS:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows, self._bytes = [], 0

    def close(self) -> None:
        try:
            if self._rows:
                self._flush()
        finally:
            self._writer.close()


def write_parquet(episodes: Iterable[ExportedEpisode], folder: Path) -> int:
    """Write the tables into a folder; the number of episodes."""
    count = 0
    with ExitStack() as stack:
        tables = {name: _Table(name, folder) for name in _TABLES}
        for table in tables.values():
            stack.callback(table.close)
        for count, episode in enumerate(episodes, 1):  # noqa: B007
            public_id = episode.details.summary.public_id
            tables["episodes"].add(_episode_row(episode))
            for entry in episode.entries():
                is_note = isinstance(entry, NoteEntry)
                row = _note_row(entry) if is_note else _call_row(entry)
                tables["notes" if is_note else "calls"].add({"episode": public_id, **row})
    return count


def _episode_row(episode: ExportedEpisode) -> JsonObject:
    values = episode.to_json()
    labels, prompt = values["labels"], values["prompt"]
    row: JsonObject = {
        **values,
        "episode": values["id"],
        "run": labels.get("run"),
        "started_at": _microseconds(values["started_at"]),
        "ended_at": _microseconds(values["ended_at"]),
        "settings": _json(values["settings"]),
        "system_prompt": prompt["system"],
        "task_prompt": prompt["task"],
        "verdict": None if values["verdict"] is None else _json(values["verdict"]),
    }
    return {
        **{
            name: utf8(value) if isinstance(value := row[name], str) else value for name in _names("episodes")
        },
        "labels": [(utf8(name), utf8(value)) for name, value in labels.items()],
    }


def _call_row(entry: CallEntry) -> JsonObject:
    texts = (entry.arguments, entry.reply)
    return {
        "call": entry.seq,
        "time": _microseconds(entry.time),
        "name": utf8(entry.name),
        "server": utf8(entry.server),
        "tool": utf8(entry.tool),
        "arguments": None if entry.arguments is None else utf8(entry.arguments.raw),
        "seconds": entry.seconds,
        "failed": entry.failed,
        "reply_kind": entry.reply_kind,
        "reply": None if entry.reply is None else utf8(entry.reply.raw),
        "cut": any(text is not None and text.truncated for text in texts),
    }


def _note_row(entry: NoteEntry) -> JsonObject:
    return {
        "note": entry.number,
        "calls": entry.calls,
        "time": _microseconds(entry.time),
        "role": utf8(entry.role),
        "text": utf8(entry.text.raw),
        "usage": _json(dict(entry.usage)),
    }


def _names(table: str) -> list[str]:
    return list(_TABLES[table].names)


def _json(value: object) -> str:
    return json_bytes(value).decode()


def _microseconds(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * 1e6)
