"""Every setting of the server, once: flags, `DECATHLON_*` variables and an optional file end here.

`--max-sandboxes 8`, `DECATHLON_MAX_SANDBOXES=8` and `max_sandboxes = 8` in the file are the same setting.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from decathlon_mcp.types import Language, Names

ProviderName = Literal["docker", "local"]
RewardPolicy = Literal["visible", "meta", "controller"]
"""The later, the fewer see a reward."""
Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]


def default_state() -> Path:
    """`$XDG_STATE_HOME/decathlon-mcp`, as the XDG base directory specification has it."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "decathlon-mcp"


class Settings(BaseModel):
    """What an operator can choose; each field's text is its help."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: tuple[str, ...] = Field(
        ("starter",),
        description="A checkout in Toolathlon's layout, or `starter`. May be given more than once.",
    )
    provider: ProviderName | None = Field(
        None,
        description="What opens sandboxes: `docker`, or `local`: no isolation. [starter: local, else docker]",
    )
    image: str | None = Field(None, description="Image of the sandboxes. [the suite's own]")
    names: Names | None = Field(None, description="How tools are spelled. [the suite's own: decathlon]")
    network: Literal["auto", "none", "outbound"] = Field(
        "auto", description="Network of sandboxes; `auto`: none for a task that needs none."
    )
    docker_network: str | None = Field(
        None,
        description="Docker's network for sandboxes that have one. [our own, in which none reaches another]",
    )
    reward: RewardPolicy = Field(
        "visible",
        description="`visible`: evaluate's reply tells the reward; `meta`: only its `_meta` does; "
        "`controller`: only whoever started the episode may evaluate, or a controller's token.",
    )
    overlong: Literal["cut", "raw"] | None = Field(
        None,
        description="Replies over 100,000 characters: `cut`, the whole saved in the workspace, or `raw`. "
        "[the suite's own]",
    )
    results: Path | None = Field(
        None,
        description="File of verdicts, of which tasks' pass rates are made: for draws by difficulty.",
    )
    language: Language = Field(
        "en",
        description="`cn`: tasks in Chinese, as Toolathlon's `--cn_mode` has them, where they are there.",
    )
    max_calls: Count | None = Field(
        None, description="Tool calls an episode may make; past it, it is claimed."
    )

    max_sandboxes: Count = Field(64, description="Sandboxes at once.")
    max_opening: Count = Field(4, description="Sandboxes being opened at once.")
    max_queue: int = Field(256, ge=0, description="Episodes that may wait for a sandbox; past it: refused.")

    idle_seconds: Seconds = Field(1800, description="An episode without a request for so long is ended.")
    episode_seconds: Seconds = Field(14_400, description="An episode's longest life before it is claimed.")
    servers_seconds: Seconds = Field(120, description="For a task's servers to come up.")
    preprocess_seconds: Seconds = Field(600, description="For a task's preprocess.")
    set_up_seconds: Seconds = Field(900, description="For a task's set-up in all.")
    evaluation_seconds: Seconds = Field(1800, description="For a task's evaluator.")
    drain_seconds: Seconds = Field(30, description="At the end, for gradings under way.")

    memory_mib: Count = Field(4096, description="Memory of one sandbox.")
    cpus: Annotated[float, Field(gt=0)] = Field(2.0, description="CPUs of one sandbox.")
    pids: Count = Field(1024, description="Processes of one sandbox.")
    workspace_mib: Count = Field(2048, description="The largest workspace that is graded.")

    state: Path = Field(
        default_factory=default_state, description="Where trajectories and verdicts are kept."
    )
    tokens: Path | None = Field(None, description="File of tokens: name, SHA-256, role, one a line.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="From what on to log."
    )
    log_format: Literal["text", "json"] = Field("text", description="How logs are written.")
