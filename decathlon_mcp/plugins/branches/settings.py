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
        description="Save the sandbox of the first episode of a task and launch time once the sandbox is set "
        "up and its servers run; the other episodes begin with copies. For groups of attempts whose client "
        "chooses their launch time; requires `--kernel gvisor`.",
    )
    snapshot_mib: Annotated[int, Field(ge=0, le=1_000_000_000)] = Field(
        8192,
        description="Space for the saved states of all episodes, in MiB. Beyond it, the server deletes the "
        "oldest states of the token that has most. 0: no state is saved.",
    )
    snapshots_kept: Count = Field(
        8, description="Maximum number of saved states of one episode. Beyond it, its oldest are deleted."
    )
