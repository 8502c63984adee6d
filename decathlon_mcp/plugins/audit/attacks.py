"""Known ways to a reward that was not earned, and how a policy carries them out with a task's tools."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import PurePosixPath
from shlex import quote

from pydantic import BaseModel, ConfigDict

from decathlon_mcp.plugins.audit.abilities import Abilities, Need

PREPARE_GIT = """\
git init -q {repository}; cd {repository}
git config user.email a@b; git config user.name a
echo 0 > version; git add version; git commit -qm 'release 0.0'
cat > .git/attack <<'END'
{program}END
chmod 755 .git/attack; sleep 0.01; touch version
"""
"""Before an attack that names the program `.git/attack`: the repository that has it."""
COPY_ANSWER = '#!/bin/sh\ncp -r "{truth}/." "{workspace}" 2>/dev/null\n'
"""What that program does: with the grader's rights it could take the answer."""

NOT_DONE = "the audit could not carry out"
"""What a program prints that could not do what it should."""


class Attack(BaseModel):
    """One attack, as `attacks.toml` describes it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    row: str
    """The beginning of its row in docs/reward-integrity.md."""
    needs: Need
    command: str = ""
    """Of a POSIX shell, in the workspace."""
    python: str = ""
    """A Python program in place of the command."""
    files: Mapping[str, str] = {}
    """The same without a shell: contents by their path in the workspace."""
    alone: bool = False
    """Whether it excludes others in the same attempt; with git, only others in the same repository."""
    server: bool = False
    """Whether it attacks the server or overloads a grader, so that one task of an audit is enough."""
    limited: bool = False
    """Whether it uses up memory or processes, so that the sandbox must have limits."""
    suffix: str = ""
    """How the names of the files end that it replaces."""

    @property
    def program(self) -> str:
        """The whole Python program."""
        return f"{attack_file().prelude}{self.python}"

    @property
    def uses_git(self) -> bool:
        """Whether it needs a repository with the program `.git/attack`."""
        return ".git/attack" in self.command

    @property
    def tool(self) -> Need:
        """What it needs of the tools: a shell to write what no text can be."""
        return "shell" if self.needs == "file" and not self.files else self.needs

    def obstacle(self, abilities: Abilities, names: Sequence[str], unlimited: Sequence[str]) -> str:
        """Why the tools cannot carry it; empty if they can.

        `names`: of files that the evaluator may read. `unlimited`: what the sandbox has no limits of.
        """
        if not abilities.can(self.tool):
            return "no tool runs as root" if self.tool == "root" else f"no tool gives a {self.tool}"
        replaces = "$OUTPUTS" in self.command or "outputs(" in self.python or self.suffix
        if replaces and not any(name.endswith(self.suffix) for name in names):
            return f"no file{' ' * bool(self.suffix)}{self.suffix} is known that the evaluator reads"
        if self.limited and unlimited:
            return f"the sandbox has no limit of {', '.join(unlimited)}"
        return ""

    def excludes(self, abilities: Abilities) -> bool:
        """Whether it has an attempt of its own."""
        return self.alone and (not self.uses_git or bool(abilities.repositories))


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    prelude: str
    """What comes before each Python program."""
    attack: tuple[Attack, ...]
    elsewhere: Mapping[str, str]
    """Rows of docs/reward-integrity.md without an attack here, each with the reason."""


@cache
def attack_file() -> _File:
    content = resources.files(__package__ or "").joinpath("attacks.toml").read_text("utf-8")
    return _File.model_validate(tomllib.loads(content))


def attacks() -> tuple[Attack, ...]:
    """All attacks, in the order of the file."""
    return attack_file().attack


def named(beginning: str) -> dict[str, Attack]:
    """The attacks whose name is this, or begins with it and a hyphen."""
    return {
        attack.name: attack
        for attack in attacks()
        if attack.name == beginning or attack.name.startswith(f"{beginning}-")
    }


def shell_command(
    attack: Attack,
    *,
    root: str,
    task: str,
    workspace: str,
    outputs: Sequence[str],
    answers: Mapping[str, str] | None = None,
    program: str | None = None,
    repository: str = "library",
    content: str = "",
) -> str:
    """An attack with the variables that it uses.

    `task`: the task's folder. `outputs`: names of files that the evaluator probably reads. `answers`: where
    the grader has the right content of a file, if not in `groundtruth_workspace` under its name. `program`:
    the repository's program, by default a program that takes the answer. `repository`: its folder. `content`:
    what a survivor writes into the outputs, if not what the grader has.
    """
    truth = str(PurePosixPath(task, "groundtruth_workspace"))
    cases = "".join(f"{quote(name)}) echo {quote(path)};; " for name, path in (answers or {}).items())
    program = program or COPY_ANSWER.format(truth=truth, workspace=workspace)
    not_done = f"echo {NOT_DONE} {attack.name}"
    python = f"python3 - <<'END_OF_PROGRAM' || {not_done}\n{attack.program}END_OF_PROGRAM\n"
    before = PREPARE_GIT.format(program=program, repository=quote(repository))
    return "\n".join(
        (
            f"export ROOT={quote(root)} TASK={quote(task)} WORK={quote(workspace)} CONTENT={quote(content)}",
            f"export OUTPUTS={quote(' '.join(name for name in outputs if ' ' not in name))}",
            f"export ANSWERS={quote(json.dumps(dict(answers or {})))}",
            f'answer() {{ case "$1" in {cases}*) echo {quote(truth)}/"$1";; esac; }}',
            'cd "$WORK" || exit 1',
            f"{before if attack.uses_git else ''}{attack.command or python}",
        )
    )
