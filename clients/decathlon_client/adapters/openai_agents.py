"""openai-agents: its runner as the player of an episode or a batch."""

# The episode's tools are function tools and not an `MCPServerStreamableHttp`, because that has a time-out of
# 5 s, would offer `evaluate` to the model, and would not end the run with the claim.

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agents import (
    Agent,
    FunctionTool,
    ItemHelpers,
    MaxTurnsExceeded,
    ModelResponse,
    RunConfig,
    RunContextWrapper,
    RunHooks,
    Runner,
    RunResult,
    StopAtTools,
)
from agents.tool_context import ToolContext

from decathlon_client.client_episode import Episode
from decathlon_client.client_values import Tool
from decathlon_client.notes import NoteSender, sending_notes


def function_tools(episode: Episode) -> list[FunctionTool]:
    """The episode's tools. Failures of tools and mistakes of the model are replies for the model to read."""
    return [_function_tool(episode, tool) for tool in episode.tools]


def player(
    agent: Agent[Any], *, max_turns: int = 100, run_config: RunConfig | None = None
) -> Callable[[Episode], Awaitable[RunResult | None]]:
    """A player for `Decathlon.batch`: a clone of `agent` with the episode's tools in addition to its own.

    It returns the run's result; None if the attempt was truncated after `max_turns`.
    """

    async def play(episode: Episode) -> RunResult | None:
        claims = [tool.name for tool in episode.tools if tool.name.endswith("claim_done")]
        player_agent = agent.clone(
            tools=[*agent.tools, *function_tools(episode)],
            tool_use_behavior=StopAtTools(stop_at_tool_names=claims),
        )
        async with sending_notes(episode) as notes:
            try:
                return await Runner.run(
                    player_agent,
                    episode.prompt,
                    max_turns=max_turns,
                    run_config=run_config,
                    hooks=_Notes(notes),
                )
            except MaxTurnsExceeded:
                await episode.truncate(turns=max_turns)
                return None

    return play


class _Notes(RunHooks[Any]):
    """Adds each answer of the model to the episode's record."""

    def __init__(self, sender: NoteSender) -> None:
        self._sender = sender

    async def on_llm_end(
        self, context: RunContextWrapper[Any], agent: Agent[Any], response: ModelResponse
    ) -> None:
        usage = {
            "input_tokens": response.usage.input_tokens,
            "output_tokens": response.usage.output_tokens,
        }
        text = "\n".join(filter(None, map(ItemHelpers.extract_text, response.output)))
        self._sender.add(text, usage=usage)


def _function_tool(episode: Episode, tool: Tool) -> FunctionTool:
    async def invoke(context: ToolContext[Any], arguments: str) -> str:
        return (await episode.act(tool.name, arguments)).text

    return FunctionTool(
        name=tool.name,
        description=tool.description,
        params_json_schema=dict(tool.input_schema),
        on_invoke_tool=invoke,
        strict_json_schema=False,
    )
