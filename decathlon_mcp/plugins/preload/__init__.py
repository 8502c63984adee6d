"""Python servers that start as forks of processes which have imported their libraries (`--preload`)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from decathlon_mcp.settings import PluginSettings


class PreloadSettings(PluginSettings):
    """Whether servers start as forks."""

    section: ClassVar[str] = "Limits"

    preload: bool = Field(
        False,
        description="Start the tasks' Python servers as forks of processes that have imported their libraries, "
        "for each server one. Sandboxes in namespaces with this machine's files only; a server that could "
        "differ from one that starts by itself does so.",
    )
