"""Drives the environments of a page as SkyRL's generator does. Argument: the program's file.

`init`, `step` and `close` are called in threads. The texts are an oracle's, those of a limited rollout too.
"""

import runpy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import skyrl_gym
from decathlon_client import ClientError
from openai import OpenAI
from text_oracle import complete

ORACLE = OpenAI()


def rollout(row: dict[str, Any]) -> tuple[float, int]:
    env = skyrl_gym.make(row["env_class"], env_config={}, extras=row)
    try:
        messages, _ = env.init(row["prompt"])
        for turn in range(1, 100):
            action = complete(ORACLE, "".join(message["content"] for message in messages))
            output = env.step(action)
            messages = [*messages, {"role": "assistant", "content": action}, *output["observations"]]
            if output["done"]:
                return output["reward"], turn
        raise AssertionError("it does not end")
    finally:
        env.close()


runpy.run_path(sys.argv[1])
row = {"prompt": [], "env_class": "toolathlon"}
rows = [
    {**row, "task": "tune-reactor"},
    {**row, "task": "audit-expenses"},
    {**row, "task": "tune-reactor", "max_turns": 2},
]
with ThreadPoolExecutor(2) as pool:
    print(list(pool.map(rollout, rows)))  # noqa: T201
try:
    rollout({**row, "task": "no-such-task"})
except ClientError:
    print("no task, no reward")  # noqa: T201
