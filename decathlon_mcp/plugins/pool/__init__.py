"""Sandboxes that are opened ahead, for the episodes that come next (`--pool`)."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from decathlon_mcp.settings import PluginSettings


class PoolSettings(PluginSettings):
    """How many sandboxes are opened ahead."""

    section: ClassVar[str] = "Limits"

    pool: int = Field(
        0,
        ge=0,
        le=1_000_000_000,
        description="Number of sandboxes opened ahead for agents and graders, of each kind that is used "
        "(image, limits, network). They count against `--max-sandboxes` and give way to episodes.",
    )
