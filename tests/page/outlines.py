"""The tree of branches on a page, as lines of text."""

from __future__ import annotations

import re
from collections.abc import Mapping


def outline(page: str, names: Mapping[str, str]) -> list[str]:
    """What the tree has, a line for each episode, call and rest; each level is two spaces further in.

    `names`: what stands for public ids in the lines.
    """
    found = re.search(r'<div class="tree".*?</section>', page, re.DOTALL)
    if found is None:
        return []
    lines: list[str] = []
    opened: list[bool] = []
    for piece in re.split(r"(<ul[^>]*>|</ul>)", found[0].partition(">")[2]):
        if piece.startswith("<ul"):
            opened.append("level" in piece)
        elif piece == "</ul>":
            opened.pop()
        else:
            texts = (" ".join(re.sub(r"<[^>]*>", " ", row).split()) for row in re.split("</li>", piece))
            lines += ["  " * sum(opened) + text for text in texts if text]
    assert not opened
    return [re.sub(r"\b[0-9a-f]{16}\b", lambda match: names.get(match[0], match[0]), line) for line in lines]
