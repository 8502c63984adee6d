"""Runs a harness without MCP, and one that fails after the episode is open. Argument: server URL."""

import asyncio
import os
import sys

import verifiers.v1 as vf
from tool_decathlon import load_environment


async def main(url: str) -> None:
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    policy = vf.ModelContext(model="gpt-5", client=client)
    env = load_environment(url=url, tasks=["tune-reactor"], harness="mini_swe_agent")
    async with env.serving():
        (task,) = env.taskset
        episode = await env.run_slot(*env.slots(task), policy)
        if not episode.traces and "does not support MCP tools" in str(episode.errors):
            print("no MCP, no rollout")  # noqa: T201
    os.environ["PATH"] = "/nowhere"  # no uv: the harness cannot start
    env = load_environment(url=url, tasks=["tune-reactor"], harness="null")
    async with env.serving():
        (trace,) = (await env.run_slot(*env.slots(task), policy)).traces
        if not trace.ok and trace.last_error.type == "HarnessError" and not any(trace.rewards.values()):
            print("no harness, no reward")  # noqa: T201


asyncio.run(main(*sys.argv[1:]))
