"""How a tool of a task's server is called by those who play.

`decathlon`: `arxiv_local__search`. `toolathlon`: `arxiv_local-search`, as upstream has it
(`utils/openai_agents_monkey_patch/custom_mcp_util.py`). `raw`: `search`, as toolathlon_gym has it.
"""

from __future__ import annotations

import hashlib

from decathlon_mcp.types import Names

LONGEST = 64
"""Characters; what the models' own interfaces take for the name of a function."""
LOCAL = "local"
"""The server whose tools are Toolathlon's local ones, and ours."""
CLAIM = "claim_done"
EVALUATE = "evaluate"

_SUFFIX = 8


def spell(names: Names, server: str, tool: str) -> str:
    """The name of a tool, at most 64 characters; a longer one is cut and ends in a hash of the whole.

    `claim_done` stands bare but in Toolathlon's spelling, `evaluate` (not one of Toolathlon's) always.
    """
    if server == LOCAL and (tool == EVALUATE or (tool == CLAIM and names != "toolathlon")):
        return tool
    if names == "raw":
        return shorten(tool)
    return shorten(f"{server}__{tool}" if names == "decathlon" else f"{server}-{tool}")


def shorten(name: str) -> str:
    """The same name every time, at most 64 characters."""
    if len(name) <= LONGEST:
        return name
    return f"{name[: LONGEST - _SUFFIX - 1]}_{hashlib.sha256(name.encode()).hexdigest()[:_SUFFIX]}"
