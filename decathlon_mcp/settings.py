"""All settings of the server: flags, `DECATHLON_*` variables and an optional file set the same fields.

`--max-sandboxes 8`, `DECATHLON_MAX_SANDBOXES=8` and `max_sandboxes = 8` in the file are the same setting.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    create_model,
    field_validator,
)

from decathlon_mcp.errors import SettingsError
from decathlon_mcp.hooks import broken, load, plugins
from decathlon_mcp.types import Language, Names, ServerStart
from decathlon_mcp.validation import find_problems

IsolationMode = Literal["auto", "namespaces", "none"]
RewardPolicy = Literal["visible", "meta", "controller"]
"""Ordered: each policy reveals less of the reward than the policy before."""
# The upper limits are beyond anything useful. They keep typing errors from engines, clocks and the SDK.
Seconds = Annotated[float, Field(gt=0, le=1_000_000_000, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000_000)]


def _check_text(value: object) -> object:
    # An empty path would be the working directory.
    if value == "":
        raise ValueError("must not be empty")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("must not contain a zero byte")
    return value


Text = Annotated[str, BeforeValidator(_check_text)]
PathSetting = Annotated[Path, BeforeValidator(_check_text)]


def default_state() -> Path:
    """`$XDG_STATE_HOME/decathlon-mcp`, by default `~/.local/state/decathlon-mcp`."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "decathlon-mcp"


class PluginSettings(BaseModel):
    """Settings of one plug-in, which users set by the same names and in the same places as the core's."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    section: ClassVar[str]
    """The heading of the help below which they are listed, one of `cli.options.SECTIONS`."""
    listed_by: ClassVar[Mapping[str, Collection[str]]] = {}
    """By the name of a command that takes settings: which of these its help lists too. `serve` lists all."""


Part = TypeVar("Part", bound=PluginSettings)


class Settings(BaseModel):
    """The settings of a server. Descriptions are help texts; a computed default is in brackets."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    suite: tuple[str, ...] = Field(
        ("starter",),
        description="A checkout in Toolathlon's layout, or `starter`. Can be given more than once.",
    )
    provider: str | None = Field(
        None,
        description="Sandbox backend. `host`: namespaces of this machine, without a daemon; others are those "
        "of plug-ins. [starter: host, else docker; with `--kernel` or a folder as `--image`: host]",
    )
    provider_option: tuple[str, ...] = Field(
        (),
        description="An option of the provider; the error for an unknown option lists the provider's "
        "options. Can be given more than once.",
    )
    kernel: Text | None = Field(
        None,
        description="Kernel of sandboxes with `--provider host`: `gvisor`, one for each sandbox. Requires an "
        "unpacked image. [this machine's]",
    )
    isolation: IsolationMode = Field(
        "auto",
        description="Isolation of sandboxes with `--provider host` and no image. `namespaces`: a sandbox "
        "sees this machine's programs and nothing else of it; paths are the same in all sandboxes. `none`: a "
        "sandbox is an ordinary process. `auto`: namespaces if this machine can have them at the first start "
        "on a state folder, else none.",
    )
    image: Text | None = Field(
        None,
        description="Docker image of the sandboxes. With `--provider host`, the folder of an unpacked image: "
        "a path that begins with `/`, `.` or `~`. [the suite's own; with `--provider host`, none: this "
        "machine's programs]",
    )
    names: Names | None = Field(
        None,
        description="Spelling of tool names. `decathlon`: `server__tool`. `toolathlon`: `server-tool`, as in "
        "Toolathlon until June 2026. `verified`: `server_tool`, as since then. `raw`: `tool`. [the suite's "
        "own: decathlon]",
    )
    network: Literal["auto", "none", "outbound"] = Field(
        "auto",
        description="Network access of sandboxes. `auto`: outbound for tasks that need it, else none.",
    )
    reward: RewardPolicy = Field(
        "visible",
        description="Who sees the reward. `visible`: the result of `evaluate` has the reward. `meta`: only "
        "the result's `_meta` has it. `controller`: only the client that started the episode, or a client "
        "with a controller's token, can evaluate.",
    )
    results: PathSetting | None = Field(
        None,
        description="File of verdicts (JSON objects) to compute pass rates from, for draws by difficulty.",
    )
    servers: ServerStart = Field(
        "lazy",
        description="When a task's MCP servers start, once its tool list is known from an earlier episode. "
        "`lazy`: each at its first call. `ahead`: one after the other while the sandbox is idle. "
        "`eager`: all at set-up.",
    )
    language: Language = Field(
        "en",
        description="Language of the tasks. `cn`: Chinese, like Toolathlon's `--cn_mode`; "
        "tasks without a Chinese text cannot run.",
    )
    max_calls: Count | None = Field(
        None,
        description="Maximum number of tool calls per episode. At the limit the attempt is closed. [none]",
    )

    merge_pages: bool = Field(
        False,
        description="Let the kernel merge equal memory pages of agents' sandboxes, so that more of them fit. "
        "Processes in these sandboxes get fixed addresses, and can learn from the time of a write what other "
        "sandboxes have in memory. The memory of graders' sandboxes is never merged.",
    )

    max_sandboxes: Count = Field(64, description="Maximum number of sandboxes at the same time.")
    max_opening: Count = Field(
        4,
        description="Maximum number of agents' sandboxes being created at the same time, and of graders'. Up "
        "to twice as many set-ups run, and up to as many containers are removed, at the same time.",
    )
    max_queue: int = Field(
        256,
        ge=0,
        le=1_000_000_000,
        description="Maximum number of episodes waiting for a sandbox. Further episodes are refused.",
    )

    max_body_mib: Count = Field(4, description="Largest request body over HTTP, in MiB.")

    idle_seconds: Seconds = Field(1800, description="Time without a request after which an episode ends.")
    first_use_seconds: Seconds = Field(
        300, description="Time in which an episode that is ready must get its first request."
    )
    grace_seconds: Seconds = Field(
        120,
        description="Time without a request after which an episode ends if its client lost the connection: "
        "the GET stream of the session that is the episode, or a request that waits for the sandbox.",
    )
    episode_seconds: Seconds = Field(
        14_400, description="Maximum time from the start of an episode's set-up to its claim."
    )
    servers_seconds: Seconds = Field(120, description="Deadline for each of a task's MCP servers to start.")
    set_up_seconds: Seconds = Field(900, description="Deadline for the whole set-up of a task.")
    evaluation_seconds: Seconds = Field(1800, description="Deadline for a task's evaluator.")
    drain_seconds: Seconds = Field(
        30, description="Time that a stopping server waits for evaluations in progress."
    )
    survive_seconds: Annotated[int, Field(ge=0, le=86_400)] = Field(
        300,
        description="Time that sandboxes wait for the next server after their server has died; the next "
        "`serve` on the same state folder continues their episodes. A server on a busy machine is silent for "
        "seconds: give 30 or more. 0: sandboxes end with their server, as with `stdio`.",
    )
    hand_over: bool = Field(
        False,
        description="On SIGTERM, `serve` leaves its sandboxes and episodes to the next server on the state "
        "folder, instead of ending them.",
    )

    memory_mib: Count = Field(4096, description="Memory limit of one sandbox, in MiB.")
    cpus: Annotated[float, Field(gt=0, le=100_000, allow_inf_nan=False)] = Field(
        2.0, description="CPU limit of one sandbox."
    )
    pids: Count = Field(1024, description="Maximum number of processes in one sandbox.")
    workspace_mib: Count = Field(2048, description="Largest workspace that is graded, in MiB.")
    min_free_mib: Annotated[int, Field(ge=0, le=1_000_000_000)] = Field(
        512,
        description="Free space in the state folder, in MiB, below which no episode starts and the logs of "
        "running episodes stay under 1 MiB.",
    )

    state: PathSetting = Field(
        default_factory=default_state, description="Folder for trajectories, verdicts and the signing key."
    )
    tokens: PathSetting | None = Field(
        None, description="File of tokens. Each line has a name, a SHA-256 digest and a role."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged."
    )
    log_format: Literal["text", "json"] = Field("text", description="Format of the log on stderr.")

    @field_validator("suite")
    @classmethod
    def _check_suites(cls, suites: tuple[str, ...]) -> tuple[str, ...]:
        for suite in suites:
            _check_text(suite)
        return suites

    def of(self, part: type[Part]) -> Part:
        """The settings of a plug-in; their defaults where these were read without the plug-in."""
        return self if isinstance(self, part) else part()


@cache
def plugin_settings() -> tuple[type[PluginSettings], ...]:
    """The settings of all plug-ins that have some. Raises SettingsError."""
    found: list[type[PluginSettings]] = []
    for plugin in plugins():
        if plugin.settings:
            try:
                found.append(load(plugin.settings))
            except Exception as error:  # whatever its module raises when it is imported
                raise broken(plugin.name, error) from error
    return tuple(found)


@cache
def all_settings() -> type[Settings]:
    """The settings of the core and of all plug-ins, as one model. Raises SettingsError."""
    # The fields of the last base come first.
    bases = (*reversed(plugin_settings()), Settings)
    return cast("type[Settings]", create_model("AllSettings", __base__=bases))


def read_settings(values: Mapping[str, Any]) -> Settings:
    """The settings with these values, by name. Raises SettingsError naming each wrong value."""
    model = all_settings()
    try:
        return model.model_validate(dict(values))
    except ValidationError as error:
        problems = find_problems(error, dict(values), TypeAdapter(model))
        raise SettingsError(
            "; ".join(f"{problem.field}: {problem.message}" for problem in problems)
        ) from None
