"""Reading what the agent said and did, from the log that an evaluator is given."""

import json
from pathlib import Path

from utils.evaluation import Wrong


def final_answer(log: Path | None) -> str:
    """The agent's last words: the text of the last of the assistant's messages. Wrong without any.

    The log is written by whoever runs the episode, not by the agent: one that cannot be read is no fault of
    the attempt.
    """
    if log is None:
        raise Wrong("there is no log, and so no answer")
    messages = json.loads(log.read_text("utf-8")).get("messages") or []
    said = [message for message in messages if message.get("role") == "assistant"]
    text = _text(said[-1].get("content")) if said else ""
    if not text.strip():
        raise Wrong("the attempt ended without an answer")
    return text


def _text(content: object) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(
            part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
        )
    return ""
