"""Parquet: the tables `episodes`, `calls` and `notes`, joined by the public id `episode`.

Values of any shape (arguments, replies, verdicts, settings) are columns of JSON text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pyarrow
import pyarrow.parquet

from decathlon_mcp.plugins.exports.exported_episodes import ExportedEpisode, json_bytes, utf8
from decathlon_mcp.plugins.history.values import NoteEntry, Text
from decathlon_mcp.types import JsonObject

# It has no types.
pa: Any = pyarrow
pq: Any = pyarrow.parquet

GROUP_BYTES = 8 << 20
"""Text of a row group: what is in memory of each table."""
GROUP_ROWS = 10_000

_TIME, _LABELS = pa.timestamp("us", tz="UTC"), pa.map_(pa.string(), pa.string())
_TABLES: dict[str, Any] = {
    "episodes": pa.schema(
        [
            ("episode", pa.string()),
            ("suite", pa.string()),
            ("task", pa.string()),
            ("run", pa.string()),
            ("labels", _LABELS),
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

    def add(self, values: JsonObject) -> None:
        row = {column.name: _cell(column.type, values[column.name]) for column in self._schema}
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
            values = episode.to_json()
            labels, prompt, public_id = values["labels"], values["prompt"], values["id"]
            texts = {"system_prompt": prompt["system"], "task_prompt": prompt["task"]}
            tables["episodes"].add({**values, **texts, "episode": public_id, "run": labels.get("run")})
            for entry in episode.entries():
                name = "notes" if isinstance(entry, NoteEntry) else "calls"
                row = {column: getattr(entry, column, None) for column in _TABLES[name].names}
                if isinstance(entry, NoteEntry):
                    row["note"] = entry.number
                else:
                    texts = (entry.arguments, entry.reply)
                    cut = any(text is not None and text.truncated for text in texts)
                    row |= {"call": entry.seq, "cut": cut}
                tables[name].add({**row, "episode": public_id})
    return count


def _cell(kind: Any, value: Any) -> Any:
    """A value as its column has it: times in microseconds, texts without lone surrogates, objects as JSON."""
    if isinstance(value, Text):
        value = value.raw
    if isinstance(value, str):
        return utf8(value)
    if isinstance(value, Mapping):
        members = cast("Mapping[str, Any]", value)
        if kind == _LABELS:
            return [(utf8(name), utf8(text)) for name, text in members.items()]
        return json_bytes(members).decode()
    return round(value * 1e6) if kind == _TIME and value is not None else value
