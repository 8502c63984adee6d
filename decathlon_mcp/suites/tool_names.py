"""Tool names as players see them, in one of four spellings.

`decathlon`: `arxiv_local__search`. `toolathlon`: `arxiv_local-search`, upstream's spelling until June 2026
(`utils/openai_agents_monkey_patch/custom_mcp_util.py`). `verified`: `arxiv_local_search`, upstream's since
commit 18fcc2e7, in which every `-` is `_` (`tool_name_aliases.py` there). `raw`: `search`, toolathlon_gym's.
"""

from __future__ import annotations

import hashlib

from decathlon_mcp.types import Names

MAX_CHARACTERS = 64
"""The limit of model APIs for the name of a function."""
LOCAL = "local"
"""The server of Toolathlon's local tools, and of `claim_done` and `evaluate`."""
CLAIM = "claim_done"
EVALUATE = "evaluate"

_HASH_CHARACTERS = 8


def spell(names: Names, server: str, tool: str) -> str:
    """The name of a tool, at most 64 characters long; see `shorten`.

    `evaluate` (which Toolathlon does not have) never gets a prefix, `claim_done` only in its spellings.
    """
    if server == LOCAL and (tool == EVALUATE or (tool == CLAIM and names in ("decathlon", "raw"))):
        return tool
    match names:
        case "decathlon":
            return shorten(f"{server}__{tool}")
        case "toolathlon":
            return shorten(f"{server}-{tool}")
        case "verified":
            return shorten(f"{server}-{tool}".replace("-", "_"))
        case "raw":
            return shorten(tool)


def shorten(name: str) -> str:
    """The name, cut to 64 characters if it is longer; a cut name ends in a hash of the whole."""
    if len(name) <= MAX_CHARACTERS:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_HASH_CHARACTERS]
    return f"{name[: MAX_CHARACTERS - _HASH_CHARACTERS - 1]}_{digest}"
