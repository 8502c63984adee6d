"""Kept attempts are graded again with the evaluators of now: `regrade`."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from decathlon_mcp.settings import PluginSettings


class KeepSettings(PluginSettings):
    """What is kept of attempts for a later grading."""

    section: ClassVar[str] = "Files and logs"

    keep: Literal["workspace"] | None = Field(
        None,
        description="`workspace`: keep the workspace of every claimed attempt, compressed, with what "
        "`regrade` needs to grade it again.",
    )
