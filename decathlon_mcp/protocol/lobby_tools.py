"""The lobby's tools as pydantic models; their schemas, descriptions and argument errors come from these.

Here is also how an episode starts as `start_episode` asks for it, and what its starter learns about it. A
plug-in adds tools, and arguments of tools of the lobby.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from functools import cache
from typing import Annotated, Any, ClassVar, Self, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from decathlon_mcp.catalogue.draws import TaskFilter
from decathlon_mcp.episodes.episode import Episode, EpisodeAccess
from decathlon_mcp.episodes.registry import EpisodeRegistry
from decathlon_mcp.episodes.specification import Principal
from decathlon_mcp.errors import AccessDeniedError, SettingsError
from decathlon_mcp.grading.attempt import MAX_COUNT
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.labels import MAX_LABELS, check_labels, merge_labels
from decathlon_mcp.protocol.requests import episode_address, page_address
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.storage.trajectory import MAX_NOTE_LINE_BYTES
from decathlon_mcp.types import JsonObject, NoteRole
from decathlon_mcp.validation import read_arguments

HANDLE = "The episode's handle, as returned by `start_episode`."
OPTIONAL_HANDLE = f"{HANDLE} Default: the episode that this MCP session started last."
SAMPLE_LIMIT = 10_000
"""Bounds the size of a `list_tasks` result."""
MAX_PROMPTS = 1_000
"""Prompts in a `list_tasks` result; each has some kilobytes."""
Labels = Annotated[dict[str, str], AfterValidator(check_labels)]
MAX_REASON_CHARACTERS = 500
"""Limit on the reason for which an episode is closed: the store keeps as much of a cause."""
MAX_USAGE_NAMES = 16
UsageName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,63}$")]
UsageCount = Annotated[int | float, Field(ge=0, le=MAX_COUNT, allow_inf_nan=False)]


class LobbyTool(BaseModel):
    """The arguments of one tool of the lobby. The docstring is the description in `tools/list`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tool: ClassVar[str]
    read_only: ClassVar[bool] = False
    max_bytes: ClassVar[int | None] = None
    """Longest JSON text of the arguments."""

    @classmethod
    @cache
    def definition(cls) -> JsonObject:
        """The tool as `tools/list` shows it. Schemas take pydantic 2 ms each, so they are made once."""
        schema = cls.model_json_schema()
        for key in ("title", "description"):
            schema.pop(key, None)
        for field in schema.get("properties", {}).values():
            field.pop("title", None)
        return {
            "name": cls.tool,
            "description": " ".join((cls.__doc__ or "").split()),
            "inputSchema": {"properties": {}, **schema},
            "annotations": {"readOnlyHint": cls.read_only, "openWorldHint": False},
        }

    @classmethod
    def from_arguments(cls, arguments: JsonObject | None) -> Self:
        """Raises BadRequestError naming each argument that does not fit."""
        return read_arguments(cls, cls.tool, arguments or {})


class EpisodeTool(LobbyTool):
    """A tool about one episode."""

    episode: str = Field(description=HANDLE)


class ListTasks(TaskFilter, LobbyTool):
    """List tasks: id, suite, splits, what each task needs and whether it can run on this server."""

    tool = "list_tasks"
    read_only = True
    sample: int | None = Field(
        None,
        ge=1,
        le=SAMPLE_LIMIT,
        description="Draw this many runnable tasks instead of listing all. They differ if there are enough.",
    )
    prompts: bool = Field(
        False,
        description="Include each task's prompt, as in an episode with the `launch_time` next to it. With "
        "`prompt_is_provisional`, each episode has other paths in its prompt.",
    )

    @model_validator(mode="after")
    def _check_sample(self) -> Self:
        if self.prompts and self.sample is not None and self.sample > MAX_PROMPTS:
            raise ValueError(f"with `prompts`, `sample` is at most {MAX_PROMPTS}")
        if self.seed is not None and self.sample is None:
            raise ValueError("`seed` requires `sample`")
        return self


class _TaskName(BaseModel):
    # A base class of its own, so that `task` comes before the fields of `TaskFilter` in the schema.
    task: str | None = Field(None, description="The task's id. Default: a task is drawn.")


class StartEpisode(TaskFilter, LobbyTool, _TaskName):
    """Start a task in a new sandbox. Returns the episode's handle, its address, the prompt and, once they are
    known, its tools; the first call waits until it is ready. `agent_address` is for an agent that plays the
    episode but cannot evaluate or close it. The handle is valid until the episode is closed, has not been
    used for `lease_seconds` (30 minutes by default), or was ready for `first_use_seconds` (5 minutes by
    default) without any use. Call `close_episode` when you are done."""

    tool = "start_episode"
    wait: bool = Field(
        True,
        description="Wait until the episode's tools are known, at the latest when it is ready. If false, "
        "return at once, without tools.",
    )
    launch_time: datetime | None = Field(
        None, description="The current time as the task sees it, ISO 8601. Default: now."
    )
    max_calls: int | None = Field(
        None, ge=1, description="Maximum number of tool calls. Default: the server's limit."
    )
    policy: RewardPolicy | None = Field(
        None,
        description="Who sees the reward; not more open than the server's policy. Default: the server's.",
    )
    labels: Labels = Field(
        {},
        description="Names and short texts by which the episode is found later, such as `run`, `model`, "
        f"`group`, `attempt`, `step`; at most {MAX_LABELS}. The agent does not see them.",
    )

    @model_validator(mode="after")
    def _task_excludes_draw(self) -> Self:
        filters = [f"`{name}`" for name in TaskFilter.model_fields if getattr(self, name) not in (None, ())]
        if self.task is not None and filters:
            raise ValueError(f"`task` cannot be combined with {', '.join(filters)}")
        return self

    def asked_of_plugins(self) -> dict[str, JsonObject]:
        """`EpisodeSpec.plugins` of the episode."""
        return {}

    async def start(
        self,
        registry: EpisodeRegistry,
        principal: Principal,
        *,
        operation: str | None = None,
        labels: Mapping[str, str] | None = None,
        ends_with_response: bool = False,
    ) -> Episode:
        """Start the episode, of a drawn task if none is named. Raises what `options` and `start` raise.

        `operation`: id of the request; a request that is sent again gets the episode that the first one
        started. `labels`: labels beside the call's own.
        """
        started = registry.task_started_by(operation, principal)
        options = await self.options(registry, principal, merge_labels(labels or {}, self.labels), started)
        return registry.start(
            principal=principal,
            operation=operation,
            ends_with_response=ends_with_response,
            plugins=self.asked_of_plugins(),
            **options,
        )

    async def options(
        self, registry: EpisodeRegistry, principal: Principal, labels: Labels, started: str | None
    ) -> dict[str, Any]:
        """What the call says about its episode, as arguments of `registry.start`. Raises what `draw` raises.

        `labels`: of the call and its request. `started`: the task of the episode that an earlier request with
        the same operation has started.
        """
        return {
            # A request that is sent again does not draw again.
            "task_id": self.task or started or registry.draw(self, principal),
            "launch_time": self.launch_time,
            "policy": self.policy,
            "max_calls": self.max_calls,
            "labels": labels,
        }


class ListEpisodes(LobbyTool):
    """List your own episodes with their labels, newest first."""

    tool = "list_episodes"
    read_only = True
    run: str | None = Field(None, description="Only the episodes with this label `run`.")
    labels: Labels = Field({}, description="Only the episodes with all of these labels.")

    def selects(self, labels: Mapping[str, str]) -> bool:
        """Whether an episode with these labels is listed."""
        return self.run in (None, labels.get("run")) and self.labels.items() <= labels.items()


class EpisodeStatus(EpisodeTool):
    """Return an episode's phase, its number of tool calls and, if it has ended, the reason."""

    tool = "episode_status"
    read_only = True


class ListTools(LobbyTool):
    """List an episode's tools with their schemas. Waits until they are known, at the latest when the episode
    is ready. With `task` instead, the tools that its episodes offer an agent; null if they are not known
    before the first one."""

    tool = "list_tools"
    read_only = True
    episode: str | None = Field(None, description=HANDLE)
    task: str | None = Field(None, description="The task's id, instead of an episode.")

    @model_validator(mode="after")
    def _is_of_an_episode_or_a_task(self) -> Self:
        if (self.episode is None) == (self.task is None):
            raise ValueError("give either `episode` or `task`")
        return self


class EvaluatorTool(EpisodeTool):
    """A tool for clients that may evaluate the episode. `action`: what it does, for a refusal."""

    action: ClassVar[str]

    async def run(self, registry: EpisodeRegistry, episode: Episode) -> JsonObject:
        """The tool's structured result. Raises DecathlonError."""
        raise NotImplementedError


class CallTool(EpisodeTool):
    """Call one of an episode's tools. Returns the tool's own result."""

    tool = "call_tool"
    name: str = Field(description="The tool's name, as returned by `start_episode` or `list_tools`.")
    arguments: dict[str, Any] | None = Field(None, description="The tool's arguments.")


class ClaimDone(LobbyTool):
    """Claim that an episode's task is done. This ends the attempt: its tools can no longer be called."""

    tool = "claim_done"
    episode: str | None = Field(None, description=OPTIONAL_HANDLE)
    answer: str | None = Field(None, description="The agent's final answer or summary.")
    truncated: bool = Field(
        False,
        description="Set to stop an attempt that its agent has not finished; recorded in the verdict.",
    )
    turns: int | None = Field(
        None,
        ge=0,
        le=MAX_COUNT,
        description="Number of turns the agent took, for rubrics that use it. Counted only from a "
        "controller: with policy `controller`, or a controller's token.",
    )


class Evaluate(LobbyTool):
    """Grade an episode and return the verdict with its reward. If the task was not claimed done, this ends
    the attempt first. Grading runs once; later calls return the same verdict. It can take minutes."""

    tool = "evaluate"
    episode: str | None = Field(None, description=OPTIONAL_HANDLE)


class AddNote(EpisodeTool):
    """Add a message of the model to an episode's record, for people who read it; the evaluator does not see
    it. Notes can be added until the episode ends."""

    tool = "add_note"
    max_bytes = 6 * MAX_NOTE_LINE_BYTES  # each character may be escaped
    text: str = Field(description="The message. A line of the record has at most 64 KiB.")
    role: NoteRole = Field("assistant", description="Whose message it is.")
    usage: dict[UsageName, UsageCount] | None = Field(
        None,
        max_length=MAX_USAGE_NAMES,
        description="Numbers that are summed over the episode: token counts, such as `input_tokens` and "
        "`output_tokens`, and `cost_usd`.",
    )
    calls: int | None = Field(
        None,
        ge=0,
        le=MAX_COUNT,
        description="How many tool calls came before the message. Default: all until now.",
    )


class CloseEpisode(EpisodeTool):
    """Close an episode and remove its sandbox. A claimed episode is graded first, in the background."""

    tool = "close_episode"
    reason: str | None = Field(
        None,
        max_length=MAX_REASON_CHARACTERS,
        description="The reason for closing before a grading, for people who look at the episode.",
    )


_CORE_TOOLS: tuple[type[LobbyTool], ...] = (
    ListTasks,
    StartEpisode,
    ListEpisodes,
    EpisodeStatus,
    ListTools,
    CallTool,
    ClaimDone,
    Evaluate,
    AddNote,
    CloseEpisode,
)


def require_evaluator(access: EpisodeAccess, action: str) -> None:
    """Raise AccessDeniedError unless the client may evaluate the episode."""
    if not access.can_evaluate:
        raise AccessDeniedError(f"this episode is its controller's: only a controller's token may {action}")


@cache
def lobby_tools() -> Mapping[str, type[LobbyTool]]:
    """The tools of the lobby and of plug-ins, by name. Raises SettingsError."""
    tools = {tool.tool: tool for tool in _CORE_TOOLS}
    for part in (part for plugin in plugins() for part in plugin.lobby_tools):
        tool: type[LobbyTool] = load(part)
        if not issubclass(tool, tools.get(tool.tool, LobbyTool)):
            raise SettingsError(f"two plug-ins have the tool {tool.tool}: uninstall one of them")
        tools[tool.tool] = tool
    return tools


def start_tool() -> type[StartEpisode]:
    """The tool `start_episode`, with the arguments that plug-ins add."""
    return cast("type[StartEpisode]", lobby_tools()[StartEpisode.tool])


def describe_start(
    registry: EpisodeRegistry, episode: Episode, base_url: str | None, *, has_page: bool
) -> JsonObject:
    """The result of `start_episode`, without tools. `base_url`: the server's; None without HTTP.

    `has_page`: people can look at the episode there.
    """
    return {
        "episode": episode.id,
        "public_id": episode.public_id,
        "page": page_address(base_url, episode.public_id, has_page=has_page),
        "task": episode.spec.task_name,
        "address": episode_address(base_url, episode.id),
        "agent": episode.spec.agent_id,
        "agent_address": episode_address(base_url, episode.spec.agent_id),
        "policy": episode.spec.policy,
        "phase": str(episode.state.phase),
        "prompt": episode.prompt.instructions,
        "first_use_seconds": episode.spec.limits.first_use_seconds,
        "lease_seconds": registry.options.limits.idle_seconds,
        **episode.reported,
    }
