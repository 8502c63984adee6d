"""The settings of saved states and prepared tasks."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from decathlon_mcp.settings import Count, PluginSettings


class BranchSettings(PluginSettings):
    """What is saved of episodes, and how much."""

    section: ClassVar[str] = "Limits"

    prepared: bool = Field(
        False,
        description="Save the sandbox of the first episode of a task and launch time once it is set up and "
        "its servers run, and open those of the others as copies. For groups of attempts whose client "
        "chooses their launch time; requires `--provider gvisor`.",
    )
    snapshot_mib: Annotated[int, Field(ge=0, le=1_000_000_000)] = Field(
        8192,
        description="Space for the saved states of all episodes, in MiB. Beyond it, the oldest of the token "
        "that has most are deleted. 0: none is saved.",
    )
    snapshots_kept: Count = Field(
        8, description="Saved states of one episode. Beyond that, its oldest ones are deleted."
    )
