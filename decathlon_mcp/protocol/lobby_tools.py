"""The lobby's tools: what each takes, in pydantic's words, from which its schema and its errors are made."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, ClassVar, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from decathlon_mcp.catalogue.draws import Draw
from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.settings import RewardPolicy
from decathlon_mcp.types import JsonObject

HANDLE = "The handle that `start_episode` gave."
SAMPLE_LIMIT = 10_000
OPTIONAL_HANDLE = "The handle that `start_episode` gave; without it, the episode this session started last."


class LobbyTool(BaseModel):
    """The arguments of one tool of the lobby; the docstring is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    tool: ClassVar[str]
    read_only: ClassVar[bool] = False

    @classmethod
    def described(cls) -> JsonObject:
        """The tool as `tools/list` has it."""
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
    def parsed(cls, arguments: JsonObject | None) -> Any:
        """Raises BadRequestError naming each argument that does not fit, and how."""
        return parsed(cls, cls.tool, arguments or {})


Shape = TypeVar("Shape", bound=BaseModel)


def parsed(shape: type[Shape], what: str, said: Mapping[str, Any]) -> Shape:
    """What was said as the shape has it. Raises BadRequestError naming what does not fit, and how."""
    try:
        return shape.model_validate(said)
    except ValidationError as error:
        faults = "; ".join(
            f"`{'.'.join(str(part) for part in fault['loc']) or 'arguments'}`: {fault['msg'].lower()}"
            for fault in error.errors(include_url=False, include_context=False, include_input=False)
        )
        takes = ", ".join(f"`{name}`" for name in shape.model_fields) or "no arguments"
        raise BadRequestError(f"{what}: {faults}; it takes {takes}") from None


class ListTasks(Draw, LobbyTool):
    """List the tasks there are: id, suite, splits, what each needs, whether it can run here."""

    tool = "list_tasks"
    read_only = True
    sample: int | None = Field(
        None,
        ge=1,
        le=SAMPLE_LIMIT,
        description="Instead of all, draw so many of those that can run, all different if there are enough.",
    )
    prompts: bool = Field(False, description="Give each task's prompt as well.")

    @model_validator(mode="after")
    def _seeds_are_for_samples(self) -> Self:
        if self.seed is not None and self.sample is None:
            raise ValueError("`seed` is for a `sample`")
        return self


class _Named(BaseModel):
    """Its field stands before those of the draw."""

    task: str | None = Field(None, description="The task's id; without it, one is drawn.")


class StartEpisode(Draw, LobbyTool, _Named):
    """Start a task in a fresh sandbox of its own. Gives the episode's handle, its address, the prompt and the
    tools, and `agent_address`, where it can be played and no more: neither evaluated nor closed. The handle
    stays good until the episode is closed, or has not been used for its lease (30 minutes unless the server
    says otherwise); close it with `close_episode` when you are done."""

    tool = "start_episode"
    wait: bool = Field(True, description="Wait until the episode is ready; if false, answer at once.")
    launch_time: datetime | None = Field(None, description="What time it is for the task, ISO 8601. [now]")
    max_calls: int | None = Field(None, ge=1, description="Tool calls the episode may make.")
    policy: RewardPolicy | None = Field(
        None, description="Who sees the reward; not more open than the server's own. [the server's]"
    )

    @model_validator(mode="after")
    def _named_or_drawn(self) -> Self:
        said = [name for name in Draw.model_fields if getattr(self, name) not in (None, ())]
        if self.task is not None and said:
            raise ValueError(f"`task` names one, {', '.join(f'`{name}`' for name in said)} would draw one")
        return self


class ListEpisodes(LobbyTool):
    """List your own episodes, the newest first."""

    tool = "list_episodes"
    read_only = True


class EpisodeStatus(LobbyTool):
    """Tell where an episode stands: its phase, its calls, why it ended."""

    tool = "episode_status"
    read_only = True
    episode: str = Field(description=HANDLE)


class ListTools(LobbyTool):
    """List an episode's tools with their schemas, waiting until it is ready."""

    tool = "list_tools"
    read_only = True
    episode: str = Field(description=HANDLE)


class CallTool(LobbyTool):
    """Call one of an episode's tools; the reply is the tool's own."""

    tool = "call_tool"
    episode: str = Field(description=HANDLE)
    name: str = Field(description="The tool's name, as `start_episode` or `list_tools` gives it.")
    arguments: dict[str, Any] | None = Field(None, description="The tool's arguments.")


class ClaimDone(LobbyTool):
    """Claim that an episode's task is done. This ends the attempt: none of its tools works any more."""

    tool = "claim_done"
    episode: str | None = Field(None, description=OPTIONAL_HANDLE)
    answer: str | None = Field(None, description="The last words on the task: the answer, a summary.")
    truncated: bool = Field(
        False, description="The agent has not claimed anything: its client gives up. The verdict says so."
    )
    turns: int | None = Field(None, ge=0, description="Turns the agent took, for a rubric that weighs them.")


class Evaluate(LobbyTool):
    """Grade an episode and give the verdict with its reward. If it was not claimed, this ends the attempt
    first. Grading runs once; later calls give the same verdict. It can take minutes."""

    tool = "evaluate"
    episode: str | None = Field(None, description=OPTIONAL_HANDLE)


class CloseEpisode(LobbyTool):
    """Close an episode and remove its sandbox. One that was claimed is graded first, behind your back."""

    tool = "close_episode"
    episode: str = Field(description=HANDLE)


LOBBY_TOOLS: dict[str, type[LobbyTool]] = {
    kind.tool: kind
    for kind in (
        ListTasks,
        StartEpisode,
        ListEpisodes,
        EpisodeStatus,
        ListTools,
        CallTool,
        ClaimDone,
        Evaluate,
        CloseEpisode,
    )
}
