"""Runs a rollout that exceeds its turn limit and one of an unknown task. Arguments: server URL, model URL."""

import asyncio
import sys

import verifiers.v1 as vf
from tool_decathlon import load_environment


async def main(url: str, endpoint: str) -> None:
    client = vf.EvalClientConfig(base_url=endpoint, api_key_var="OPENAI_API_KEY")
    policy = vf.ModelContext(model="gpt-5", client=client)
    env = load_environment(max_turns=2, url=url, tasks=["tune-reactor"])
    async with env.serving():
        (task,) = env.taskset
        (truncated,) = (await env.run_slot(*env.slots(task), policy)).traces
        missing = task.with_data(id="no-such-task")
        (failed,) = (await env.run_slot(*env.slots(missing), policy)).traces
    if truncated.ok and truncated.info["verdict"]["truncated"]:
        print("truncated", truncated.reward)  # noqa: T201
    if not failed.ok and failed.last_error.type == "TaskError" and not any(failed.rewards.values()):
        print("no task, no reward")  # noqa: T201


asyncio.run(main(*sys.argv[1:]))
