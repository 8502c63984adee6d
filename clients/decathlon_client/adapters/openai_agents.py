"""openai-agents: the runner's loop as a player of one episode, or of a batch.

The episode's tools are function tools here rather than an `MCPServerStreamableHttp`: the runner's time-out of
5 s does not apply, `evaluate` is not among them, and the run ends with the claim.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agents import Agent, FunctionTool, MaxTurnsExceeded, RunConfig, Runner, RunResult, StopAtTools
from agents.tool_context import ToolContext

from decathlon_client.episode import Episode
from decathlon_client.values import Tool


def function_tools(episode: Episode) -> list[FunctionTool]:
    """What the episode offers. A tool that fails, and a call that was a mistake, tell the model so."""
    return [_function_tool(episode, tool) for tool in episode.tools]


def player(
    agent: Agent[Any], *, max_turns: int = 100, run_config: RunConfig | None = None
) -> Callable[[Episode], Awaitable[RunResult | None]]:
    """A player for `Decathlon.batch`: a clone of `agent`, with the episode's tools beside its own.

    What it returns is the run's result; None where it was past `max_turns`, and the attempt truncated.
    """

    async def play(episode: Episode) -> RunResult | None:
        claims = [tool.name for tool in episode.tools if tool.name.endswith("claim_done")]
        playing = agent.clone(
            tools=[*agent.tools, *function_tools(episode)],
            tool_use_behavior=StopAtTools(stop_at_tool_names=claims),
        )
        try:
            return await Runner.run(playing, episode.prompt, max_turns=max_turns, run_config=run_config)
        except MaxTurnsExceeded:
            await episode.truncate(turns=max_turns)
            return None

    return play


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
