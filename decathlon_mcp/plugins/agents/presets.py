"""The agent programs that are known: how each is started, and which version was checked.

Checked means that a scripted model was offered no tool but the task's and those that
`docs/agent-programs.md` lists: `configuration` switches the program's own tools off by name, and
another version may have others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

DEFAULT_TURNS = 100
"""Answers that a model without a program may give in one attempt."""
VERSION_SECONDS = 30.0
"""How long a program may take to print its version; Node's take a second or two."""
VERSION_BYTES = 4096
"""How much of what it prints is read."""
_VERSION = re.compile(rb"\d+(?:\.\d+){1,3}(?:-[0-9A-Za-z.]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One known program, which is named as its file is."""

    command: Sequence[str]
    """Its command line, with the placeholders of `configuration.configure`."""
    words: int = 1
    """How many words of it name the program and its subcommand: options follow them."""
    version: str
    """The version that was checked."""
    package: str
    """Its package on npm."""
    variables: Sequence[str]
    """Beginnings of the variables that it gets beside those of every program: its model's address and key."""

    def command_for(self, model: str | None) -> list[str]:
        """The command line, with the model if one is named."""
        chosen = [] if model is None else ["--model", model]
        return [*self.command[: self.words], *chosen, *self.command[self.words :]]


PRESETS: Mapping[str, Preset] = {
    "claude": Preset(
        command=(
            "claude",
            "-p",
            "{prompt}",
            "--mcp-config",
            "{mcp_config}",
            "--strict-mcp-config",
            "--tools",
            "",
        ),
        version="2.1.332",
        package="@anthropic-ai/claude-code",
        variables=("ANTHROPIC_", "CLAUDE_CODE_"),
    ),
    "codex": Preset(
        command=("codex", "exec", "--skip-git-repo-check", "{prompt}"),
        words=2,
        version="0.171.0",
        package="@openai/codex",
        variables=("OPENAI_", "CODEX_"),
    ),
    "opencode": Preset(
        command=("opencode", "run", "{prompt}"),
        words=2,
        version="1.18.33",
        package="opencode-ai",
        variables=("OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_GENERATIVE_AI_", "OPENROUTER_"),
    ),
    "gemini": Preset(
        command=("gemini", "-p", "{prompt}"),
        version="0.61.0",
        package="@google/gemini-cli",
        variables=("GEMINI_", "GOOGLE_GEMINI_", "GOOGLE_GENAI_", "GOOGLE_API_KEY"),
    ),
}


def version_in(output: bytes) -> str | None:
    """The version in what a program printed; None if there is none."""
    found = _VERSION.search(output)
    return None if found is None else found[0].decode()
