"""What an agent is told: Toolathlon's system prompt and task, filled in for this server.

Placeholders and the sentence on independence are upstream's (`utils/data_structures/task_config.py`,
`SystemPrompts.apply` in single-turn mode). What upstream says of an answer without a tool call does not reach
a proxy, so that an attempt ends with `claim_done` is said in its place.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from decathlon_mcp.suites.documents import read_text
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.tool_names import CLAIM, LOCAL, spell
from decathlon_mcp.types import Language, Names

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
"""Toolathlon's local tools that make sense behind a proxy, as its models see them but for `local-`."""

_UPSTREAM = re.compile(
    r"If you believe the task is completed, you can either call the `?[\w-]*claim_done`? tool "
    r"or respond without calling any tool to indicate completion\."
    r"|若你认为任务已完成，可以调用`?[\w-]*claim[_-]done`?工具，来(?:表明|claim)自己已经完成了给定的任务",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class Prompt:
    """`system` is None where the task has no system prompt and needs none."""

    system: str | None
    task: str

    @property
    def instructions(self) -> str:
        """Both, as one text."""
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
    """The prompt of the task in `folder`, its paths those below `root`. Raises SuiteError where it has none.

    In `cn` it is made of `task_cn.md` and `agent_system_prompt_cn.md`; as upstream has it, the sentence on
    independence stays as it is.
    """
    suffix = suffix_of(language)
    system_file = folder / "docs" / f"agent_system_prompt{suffix}.md"
    task = respell(read_text(folder / "docs" / f"task{suffix}.md"), names, servers)
    if not system_file.exists():
        return Prompt(_claim(names, language), task)
    values = {
        "current_working_dir": str(root),
        "workspace_dir": str(root / profile.workspace),
        "workspace_dir_rela": str(profile.workspace),
        "time": time,
    }
    system = read_text(system_file)
    for name, value in values.items():
        system = system.replace(f"!!<<<<||||{name}||||>>>>!!", value)
    claim = _claim(names, language)
    system, replaced = _UPSTREAM.subn(lambda _: claim, system)
    system = f"{respell(system, names, servers)}\n{INDEPENDENCE}"
    return Prompt(system if replaced else f"{system}\n{claim}", task)


def respell(text: str, names: Names, servers: Collection[str]) -> str:
    """The text with tools' names in the spelling in force, whether they stand in Toolathlon's or in ours.

    Only what is surely a tool is touched: a local one by its whole name, and between backticks `claim_done`
    and the tools of the task's servers: `<server>__<tool>`, and `<server>-<tool>` where the tool's name is of
    the kind that tools have (`read_file`).
    """

    def local(match: re.Match[str]) -> str:
        return spell(names, LOCAL, match.group(1))

    def other(match: re.Match[str]) -> str:
        return f"`{spell(names, match.group(1), match.group(2) or match.group(3))}`"

    text = text.replace(f"`{CLAIM}`", f"`{spell(names, LOCAL, CLAIM)}`")
    text = re.sub(rf"(?<![\w-]){LOCAL}(?:-|__)({_any(LOCAL_TOOLS)})(?![\w-])", local, text, flags=re.ASCII)
    if servers:
        text = re.sub(
            rf"`({_any(servers)})(?:-([a-z0-9]+(?:_[a-z0-9]+)+)|__([\w-]+))`", other, text, flags=re.ASCII
        )
    return text


def _any(words: Collection[str]) -> str:
    """A pattern for any of the words, the longest first."""
    return "|".join(sorted(map(re.escape, words), key=len, reverse=True))


def suffix_of(language: Language) -> str:
    """What the names of a language's files end with."""
    return "" if language == "en" else f"_{language}"


def _claim(names: Names, language: Language) -> str:
    if language == "cn":
        return (
            f"只有调用`{spell(names, LOCAL, CLAIM)}`工具才会结束本次任务：当你认为任务已完成时请调用它，"
            "并将最后要说的话（如果任务要求给出答案，则为答案）写入`answer`参数"
        )
    return (
        f"Nothing but the `{spell(names, LOCAL, CLAIM)}` tool ends your attempt: call it when you believe "
        "that the task is completed, with your last words (the answer, if the task asks for one) in `answer`."
    )
