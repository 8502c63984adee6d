"""Reads the agent's messages from the log that an evaluator gets."""

import json
from pathlib import Path

from utils.evaluation import Wrong


def final_answer(log: Path | None) -> str:
    """Return the text of the assistant's last message. Raises Wrong if there is none.

    The server writes the log, not the agent, so an unreadable log is an error of the evaluator and not Wrong.
    """
    if log is None:
        raise Wrong("there is no log, and so no answer")
    messages = json.loads(log.read_text("utf-8")).get("messages") or []
    replies = [message for message in messages if message.get("role") == "assistant"]
    text = _text(replies[-1].get("content")) if replies else ""
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
