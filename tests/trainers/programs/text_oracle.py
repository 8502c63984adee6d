"""What a model without tool calls of its own writes: the oracle's next call as text, in Hermes' format."""

import json
import re

from openai import OpenAI


def complete(oracle: OpenAI, text: str) -> str:
    """The continuation of a conversation's text, which has the tools as JSON and a mark for each reply."""
    names = re.findall(r'"name": "(\w+)", "description"', text)
    tool_messages = [{"role": "tool", "content": ""}] * text.count("<tool_response>")
    message = (
        oracle.chat.completions.create(
            model="oracle",
            messages=[{"role": "user", "content": text}, *tool_messages],
            tools=[{"type": "function", "function": {"name": name}} for name in names],
        )
        .choices[0]
        .message
    )
    if not message.tool_calls:
        return str(message.content)
    function = message.tool_calls[0].function
    call = json.dumps({"name": function.name, "arguments": json.loads(function.arguments)})
    return f"{message.content}\n<tool_call>\n{call}\n</tool_call>"
