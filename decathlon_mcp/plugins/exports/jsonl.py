"""JSON lines: an episode a line, with its calls and notes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO

from decathlon_mcp.plugins.exports.episodes import ExportedEpisode, entry_to_json, json_bytes


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
