"""Tools that are instances of `FunctionTool` from openai-agents."""

import json
import os
import sys
import time
from pathlib import Path

from agents.tool import FunctionTool, RunContextWrapper

print("noise while it is imported")


async def shout(context: RunContextWrapper, params_str: str) -> str:
    params = json.loads(params_str)
    print("noise while it runs")
    os.system("echo noise of a child; cat")  # `cat` ends at once, because stdin is not the server's
    (Path(context.context["_agent_workspace"]) / "shouted.txt").write_text(params["text"])
    return params["text"].upper() * params.get("times", 1)


async def fail(context: RunContextWrapper, params_str: str) -> str:
    raise ValueError("no voice left")


async def count(context: RunContextWrapper, params_str: str) -> list:
    return [1, 2, 3]


async def wait_for_a_shout(context: RunContextWrapper, params_str: str) -> str:
    while not (Path(context.context["_agent_workspace"]) / "shouted.txt").exists():
        time.sleep(0.01)  # blocks the event loop, as upstream's tools do
    return "heard"


async def leave(context: RunContextWrapper, params_str: str) -> str:
    sys.exit("gone")


async def die(context: RunContextWrapper, params_str: str) -> str:
    os._exit(7)


NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
SHOUT = {
    "type": "object",
    "properties": {"text": {"type": "string"}, "times": {"type": "integer", "minimum": 1}},
    "required": ["text"],
    "additionalProperties": False,
}

tools = [
    FunctionTool(
        name="local-shout",
        description="Say it louder.",
        params_json_schema=SHOUT,
        on_invoke_tool=shout,
        strict_json_schema=False,
    ),
    *(
        FunctionTool(
            name=f"local-{function.__name__}",
            description="Does what it is called.",
            params_json_schema=NOTHING,
            on_invoke_tool=function,
            strict_json_schema=False,
        )
        for function in (fail, count, leave, die, wait_for_a_shout)
    ),
]
