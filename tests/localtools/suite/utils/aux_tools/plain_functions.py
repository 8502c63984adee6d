"""Tools that are plain functions."""

import asyncio
from pathlib import Path


def make_notes(agent_workspace: str):
    """Return the tools for a workspace."""

    async def take_note(text: str, page: int = 1) -> str:
        """Write a note.

        It stays in the workspace.

        Args:
            text: What to write: anything.
            page: Where to write it.
        """
        (Path(agent_workspace) / f"note-{page}.txt").write_text(text)
        return f"noted {text} on page {page}"

    async def read_note(page: int) -> str:
        """Read a note."""
        return (Path(agent_workspace) / f"note-{page}.txt").read_text()

    return take_note, read_note


async def nap(seconds: float = 1) -> str:
    """Sleep a little."""
    await asyncio.sleep(seconds)
    return "awake"
