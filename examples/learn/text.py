"""Text and tokens: the tokenizer, and a conversation as the model sees it.

A conversation is the prompt, then for each turn CALL, what the model writes up to END, REPLY and the tool's
reply. What the model writes is a tool's name, a space, and the arguments as JSON.
"""

import json
import re
import string
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from decathlon_client import Tool

CALL, REPLY, END = 0, 1, 2
SPECIAL = ("<call>", "<reply>", "<end>")
PIECE = re.compile(r"\w+|\W+")


class Tokenizer:
    """Words, and what is between words, of some texts; any other text is spelt in characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        pieces = {piece for text in texts for piece in PIECE.findall(text)}
        self.tokens = [*SPECIAL, *sorted({*string.printable, *pieces})]
        self._ids = {token: number for number, token in enumerate(self.tokens) if number >= len(SPECIAL)}

    def __len__(self) -> int:
        return len(self.tokens)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text. A character that no text had is a question mark."""
        ids: list[int] = []
        for piece in PIECE.findall(text):
            known = self._ids.get(piece)
            ids += [known] if known is not None else [self._ids.get(c, self._ids["?"]) for c in piece]
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens."""
        return "".join(self.tokens[token] for token in ids)


def prompt_text(prompt: str, tools: Sequence[Tool]) -> str:
    """The task, which is the prompt's last paragraph, and, a line each, the tools.

    What the prompt says before it, of agents that talk, is lost on a model without a language.
    """
    lines = [f"{tool.name}({', '.join(parameters(tool))}) {first_sentence(tool)}" for tool in tools]
    return "\n".join([prompt.strip().split("\n\n")[-1], *lines, ""])


def parameters(tool: Tool) -> list[str]:
    return list(tool.function["function"]["parameters"].get("properties", {}))


def first_sentence(tool: Tool) -> str:
    return tool.function["function"]["description"].split(".")[0]


def transcript_texts(attempts: Iterable[tuple[str, list[tuple[str, str]]]], count: int) -> Iterator[str]:
    """The calls and replies of some transcripts."""
    for _, turns in islice(attempts, count):
        for call, reply in turns:
            yield from (call, reply)


def call_text(name: str, arguments: dict[str, str]) -> str:
    """A call as the model writes it."""
    return f"{name} {json.dumps(arguments)}"


def split_call(text: str) -> tuple[str, str]:
    """The name of the tool, and the text of the arguments."""
    name, _, arguments = text.partition(" ")
    return name, arguments
