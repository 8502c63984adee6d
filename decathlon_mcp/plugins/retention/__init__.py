"""Files of episodes that ended long ago are deleted (`--keep-days`)."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from decathlon_mcp.settings import PluginSettings


class RetentionSettings(PluginSettings):
    """How long the files of episodes are kept."""

    section: ClassVar[str] = "Files and logs"

    keep_days: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] | None = Field(
        None,
        description="Days after which the files of an ended episode are deleted. [never]",
    )
