"""A tool that needs more of openai-agents than is stood in for."""

from agents import Judge
from agents.tool import FunctionTool


async def judge(context, params_str: str) -> str:
    return Judge.__name__


tool = FunctionTool(
    name="local-judge", description="Judge.", params_json_schema={"type": "object"}, on_invoke_tool=judge
)
