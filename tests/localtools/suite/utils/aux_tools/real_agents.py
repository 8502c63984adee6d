"""A tool that uses a class which the stub of openai-agents does not have."""

from agents import Judge
from agents.tool import FunctionTool


async def judge(context, params_str: str) -> str:
    return Judge.__name__


tool = FunctionTool(
    name="local-judge", description="Judge.", params_json_schema={"type": "object"}, on_invoke_tool=judge
)
