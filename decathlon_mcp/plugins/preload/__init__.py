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
        description="Start the tasks' Python servers as forks of processes that have imported their "
        "libraries, one for each server. For sandboxes in namespaces with this machine's files; a server "
        "that would not be the same as a fork starts by itself.",
    )
