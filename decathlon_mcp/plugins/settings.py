"""The settings of these plug-ins: read at every start, and so apart from the plug-ins' code."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

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


class RetentionSettings(PluginSettings):
    """How long the files of episodes are kept."""

    section: ClassVar[str] = "Files and logs"

    keep_days: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] | None = Field(
        None,
        description="Days after which the files of an ended episode are deleted. [never]",
    )


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


class PreloadSettings(PluginSettings):
    """Whether servers start as forks."""

    section: ClassVar[str] = "Limits"

    preload: bool = Field(
        False,
        description="Start the tasks' Python servers as forks of processes that have imported their "
        "libraries, one for each server. For sandboxes in namespaces with this machine's files; a server "
        "that would not be the same as a fork starts by itself.",
    )


class SpanSettings(PluginSettings):
    """Whether spans are exported."""

    section: ClassVar[str] = "Files and logs"

    spans: bool = Field(
        False,
        description="Send spans of requests, calls, set-ups and gradings to an OpenTelemetry collector, by "
        "OTLP over HTTP. The variables `OTEL_*` set its address and all else. Requires the extra `otel`.",
    )


class MetricSettings(PluginSettings):
    """What metrics are counted by."""

    section: ClassVar[str] = "Files and logs"

    metrics_tasks: bool = Field(
        False,
        description="Count episodes and verdicts in `/metrics` by task, not only by suite. Every task that "
        "was played adds some time series.",
    )


class KeepSettings(PluginSettings):
    """What is kept of attempts for a later grading."""

    section: ClassVar[str] = "Files and logs"

    keep: Literal["workspace"] | None = Field(
        None,
        description="What is kept of claimed attempts. `workspace`: the workspace, compressed, and what "
        "`regrade` needs to grade it again.",
    )


class WebSettings(PluginSettings):
    """What sandboxes get in place of a network, and how the recording proxy reaches the sites."""

    section: ClassVar[str] = "Sandboxes"
    listed_by: ClassVar[Mapping[str, Collection[str]]] = {"tasks": ("web",), "doctor": ("web", "web_proxy")}

    web: Literal["record", "replay", "replay-or-record"] | None = Field(
        None,
        description="A recorded web instead of a network, for tasks that need one. `record`: pass "
        "requests to the sites and store the responses. `replay`: answer from the task's recording only. "
        "`replay-or-record`: ask the sites for what the recording does not have.",
    )
    web_proxy: Path | None = Field(
        None, description="The program `mitmdump`. [installed by `make mitmproxy`, else on the PATH]"
    )
    web_address: tuple[str, ...] = Field(
        (),
        description="HOST=ADDRESS, both with an optional port: where the recorded web finds a host, such as "
        "a mirror or one without a public address. Can be given more than once.",
    )
    web_authorities: Path | None = Field(
        None,
        description="PEM file of the authorities by which the recorded web checks the certificates of sites. "
        "[mitmproxy's own list]",
    )
    web_response_mib: Count = Field(
        32, description="Largest response that is recorded, in MiB. `record` passes larger responses on."
    )
    web_recording_mib: Count = Field(1024, description="Largest recording of a task, in MiB.")
