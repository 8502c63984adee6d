"""The messages of a stream of server-sent events, as they came."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator

DATA = b"data:"


async def events(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """The data of each event that has some; the other fields are for whoever resumes streams."""
    data: list[bytes] = []
    async for line in _lines(chunks):
        if line.startswith(DATA):
            data.append(line[len(DATA) :].removeprefix(b" "))
        elif not line and data:
            if message := b"\n".join(data).strip():
                yield message
            data = []


async def _lines(chunks: AsyncIterable[bytes]) -> AsyncIterator[bytes]:
    """Without their ends; what is behind the last end is cut off and no line."""
    parts: list[bytes] = []
    async for chunk in chunks:
        *lines, rest = chunk.split(b"\n")
        for line in lines:
            yield b"".join([*parts, line]).removesuffix(b"\r")
            parts = []
        if rest:
            parts.append(rest)
