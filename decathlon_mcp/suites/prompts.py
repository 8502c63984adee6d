"""A task's prompt: Toolathlon's system prompt and task text, filled in for this server; names of tools.

Placeholders and the sentence on independence are upstream's (`utils/data_structures/task_config.py`,
`SystemPrompts.apply` in single-turn mode). Upstream ends an attempt when the model answers without a tool
call. Such an answer never reaches a server, so the prompt says instead that `claim_done` ends the attempt.

Players see tool names in one of four spellings. `decathlon`: `arxiv_local__search`. `toolathlon`:
`arxiv_local-search`, upstream's until June 2026 (`utils/openai_agents_monkey_patch/custom_mcp_util.py`).
`verified`: `arxiv_local_search`, upstream's since commit 18fcc2e7, in which every `-` is `_`
(`tool_name_aliases.py` there). `raw`: `search`, toolathlon_gym's.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from decathlon_mcp.suites.documents import read_text
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.types import Language, Names

MAX_CHARACTERS = 64
"""The limit of model APIs for the name of a function."""
LOCAL = "local"
"""The server of Toolathlon's local tools, and of `claim_done` and `evaluate`."""
CLAIM = "claim_done"
EVALUATE = "evaluate"

_HASH_CHARACTERS = 8
INDEPENDENCE = (
    "Please complete the given task independently. Do not seek confirmation or additional feedback from "
    "the user. You should handle all situations on your own, as the user will not provide any further "
    "information."
)

LOCAL_TOOLS = (
    CLAIM,
    "python-execute",
    "sleep",
    "web_search",
    "search_overlong_tooloutput",
    "search_overlong_tooloutput_navigate",
    "view_overlong_tooloutput",
    "view_overlong_tooloutput_navigate",
)
"""The local tools that this server offers, as Toolathlon's models see them without the prefix `local-`."""

_VERIFIED_LOCAL_TOOLS = (
    *LOCAL_TOOLS,
    "ai_webpage_summary",
    "browse_history",
    "check_context_status",
    "claim-done",
    "history_stats",
    "manage_context",
    "search_history",
    "search_in_turn",
    "smart_context_truncate",
    "view_history_turn",
)
"""The local tools whose names upstream rewrites in a system prompt, with a misspelling of its prompts."""


def _any_of(names: Collection[str]) -> str:
    """A regular expression for any of the names, the longest first."""
    return "|".join(sorted(map(re.escape, names), key=len, reverse=True))


_VERIFIED_NAME = re.compile(rf"(?<![A-Za-z0-9_-]){LOCAL}-({_any_of(_VERIFIED_LOCAL_TOOLS)})(?![A-Za-z0-9_-])")
_CLAIM_SENTENCE = re.compile(
    r"If you believe the task is completed, you can either call the `?[\w-]*claim_done`? tool "
    r"or respond without calling any tool to indicate completion\."
    r"|若你认为任务已完成，可以调用`?[\w-]*claim[_-]done`?工具，来(?:表明|claim)自己已经完成了给定的任务",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """The text for the agent. `system` None: no system prompt."""

    system: str | None
    task: str

    @property
    def instructions(self) -> str:
        """System prompt and task as one text."""
        return self.task if self.system is None else f"{self.system}\n\n{self.task}"


def read_prompt(
    folder: Path,
    profile: SuiteProfile,
    *,
    root: PurePosixPath,
    time: str,
    names: Names,
    servers: Collection[str],
    language: Language = "en",
) -> Prompt:
    """The prompt of the task in `folder`, with paths below `root`. Raises SuiteError if it has no text.

    In language `cn` it is read from `task_cn.md` and `agent_system_prompt_cn.md`.
    """
    suffix = language_suffix(language)
    system_file = folder / "docs" / f"agent_system_prompt{suffix}.md"
    task = read_text(folder / "docs" / f"task{suffix}.md")
    if names != "verified":
        # Upstream's runner of Toolathlon-Verified rewrites the system prompt only.
        task = respell(task, names, servers)
    if not system_file.exists():
        return Prompt(_claim_sentence(names, language), task)
    values = {
        "current_working_dir": str(root),
        "workspace_dir": str(root / profile.workspace),
        "workspace_dir_rela": str(profile.workspace),
        "time": time,
    }
    system = read_text(system_file)
    for name, value in values.items():
        system = system.replace(f"!!<<<<||||{name}||||>>>>!!", value)
    claim_sentence = _claim_sentence(names, language)
    system, replaced = _CLAIM_SENTENCE.subn(lambda _: claim_sentence, system)
    # Upstream adds this sentence in English to a Chinese prompt, too.
    system = f"{respell(system, names, servers)}\n{INDEPENDENCE}"
    return Prompt(system if replaced else f"{system}\n{claim_sentence}", task)


def respell(text: str, names: Names, servers: Collection[str]) -> str:
    """Rewrite tool names in a text from Toolathlon's spelling or our default one to the spelling `names`.

    `verified` rewrites what upstream does (`rewrite_tool_name_references`): the full names of local tools.
    In the other spellings, rewritten are the full names of local tools, and in backticks `claim_done`,
    `<server>__<tool>` for the task's servers, and `<server>-<tool>` where the tool's name contains an
    underscore (`read_file`). Anything else may be an ordinary word.
    """

    def local_tool(match: re.Match[str]) -> str:
        return spell(names, LOCAL, match.group(1))

    def server_tool(match: re.Match[str]) -> str:
        return f"`{spell(names, match.group(1), match.group(2) or match.group(3))}`"

    if names == "verified":
        return _VERIFIED_NAME.sub(local_tool, text)
    text = text.replace(f"`{CLAIM}`", f"`{spell(names, LOCAL, CLAIM)}`")
    text = re.sub(
        rf"(?<![\w-]){LOCAL}(?:-|__)({_any_of(LOCAL_TOOLS)})(?![\w-])", local_tool, text, flags=re.ASCII
    )
    if servers:
        text = re.sub(
            rf"`({_any_of(servers)})(?:-([a-z0-9]+(?:_[a-z0-9]+)+)|__([\w-]+))`",
            server_tool,
            text,
            flags=re.ASCII,
        )
    return text


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


def language_suffix(language: Language) -> str:
    """The suffix of the names of a language's files."""
    return "" if language == "en" else f"_{language}"


def _claim_sentence(names: Names, language: Language) -> str:
    if language == "cn":
        return (
            f"只有调用`{spell(names, LOCAL, CLAIM)}`工具才会结束本次任务：当你认为任务已完成时请调用它，"
            "并将最后要说的话（如果任务要求给出答案，则为答案）写入`answer`参数"
        )
    return (
        f"Nothing but the `{spell(names, LOCAL, CLAIM)}` tool ends your attempt: call it when you believe "
        "that the task is completed, with your final message (the answer, if the task asks for one) in "
        "`answer`."
    )
