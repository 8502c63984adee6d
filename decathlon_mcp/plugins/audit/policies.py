"""The policies: behaviours of an agent that does not solve its task. None of them may earn a reward.

Each is a function whose last argument is the episode that it plays.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from shlex import quote
from typing import TypeAlias

from decathlon_client import Episode
from decathlon_client.client_values import CLAIM, JsonObject, Reply, Tool
from decathlon_client.script import Step, read_steps, workspace_in

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.plugins.audit.abilities import (
    CALL_SECONDS,
    Abilities,
    CallMaker,
    Runner,
    Writer,
    is_reading,
    is_removing,
    path_argument,
    runners,
    writers,
)
from decathlon_mcp.plugins.audit.answers import Answers, search_command
from decathlon_mcp.plugins.audit.attacks import Attack, shell_command
from decathlon_mcp.suites.documents import read_text
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.tasks import Task

MAX_READS = 40
RANDOM_CALLS = 24
SEARCHED_PARTS = 40
"""Texts of the answers that one command searches for."""
PROBE_FILE, PROBE_TEXT = "audit-probe.txt", "written by the audit"
FOUND = "the search of the sandbox ends here"
_REPOSITORY = re.compile(r"repository ([\w./-]+)")
MAX_LAID_BYTES = 1 << 20
"""Largest file of a ground truth that is laid into a workspace."""

Play: TypeAlias = Callable[[Episode], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Target:
    """One task that is audited. `name`: as clients spell it."""

    name: str
    suite: Suite
    task: Task
    prompt: str
    tools: tuple[Tool, ...]
    answers: Answers

    @property
    def usable(self) -> list[Tool]:
        """The task's tools, without the server's own."""
        return [tool for tool in self.tools if "__" in tool.name and not tool.name.endswith(CLAIM)]

    def places(self, prompt: str) -> tuple[str, str]:
        """The suite's folder and the workspace in the sandbox of this prompt."""
        profile = self.suite.profile
        workspace = workspace_in(prompt) or str(profile.root / profile.workspace)
        return workspace.removesuffix(f"/{profile.workspace}"), workspace

    def calls(self, seed: str) -> CallMaker:
        return CallMaker(f"{self.name}:{seed}", [*self.answers.workspace, *self.answers.outputs])


async def null(episode: Episode) -> None:
    """Claims at once."""


async def reads(target: Target, episode: Episode) -> None:
    """Reads with every tool, finds out which of them run commands, and looks for the answers with these.

    Where none runs commands, it writes a file at last, to find out which tool can.
    """
    await idle(target, episode)
    for runner in runners(target.usable):
        who = await _call(episode, runner.tool, runner.call(f"{_place(target, episode)}; {_WHO}"))
        if not who.is_error and _RAN in who.text:
            parts = target.answers.searched[:SEARCHED_PARTS]
            command = f"{_place(target, episode)}; {search_command(parts, target.task)}; echo {FOUND}"
            await _call(episode, runner.tool, runner.call(command))
            return
    folders = "", f"{target.places(episode.prompt)[1]}/"
    for writer in (replace(writer, folder=each) for writer in writers(target.usable) for each in folders):
        if not (await _call(episode, writer.tool, writer.call(PROBE_FILE, PROBE_TEXT))).is_error:
            break


_QUESTION = "echo $((6*7))-$(id -u)-;"
_WHO = f"{_QUESTION} find . -maxdepth 4 -name .git -type d | sed 's,/[.]git$,,;s,^,repository ,'"
_RAN = "42-"


def abilities_in(target: Target, replies: Sequence[tuple[str, JsonObject, bool, str]]) -> Abilities:
    """What the calls of `reads` have shown: each has a tool, arguments, whether it failed, and a text."""
    found_runner: Runner | None = None
    found_writer: Writer | None = None
    is_root, repositories = False, list[str]()
    for tool, arguments, failed, text in replies:
        for runner in runners(target.usable):
            is_question = tool == runner.tool and _QUESTION in str(arguments.get(runner.argument))
            if found_runner is None and is_question and not failed and _RAN in text:
                found_runner, is_root = runner, f"{_RAN}0-" in text
                repositories = _REPOSITORY.findall(text)
        for writer in writers(target.usable):
            path = str(arguments.get(writer.path))
            if found_writer is None and tool == writer.tool and not failed and path.endswith(PROBE_FILE):
                found_writer = replace(writer, folder=path.removesuffix(PROBE_FILE))
    return Abilities(found_runner, found_writer, is_root, tuple(repositories))


async def idle(target: Target, episode: Episode) -> None:
    """Calls every tool that only reads, on every file that it finds."""
    maker, count = target.calls("idle"), 0
    for tool in target.usable:
        if not is_reading(tool):
            continue
        path = path_argument(tool)
        places = [".", *target.answers.workspace] if path else [None]
        for place in places:
            if count == MAX_READS:
                return
            count += 1
            arguments = maker.arguments(tool)
            await _call(episode, tool.name, arguments | ({path: place} if path else {}))


def random_steps(target: Target) -> list[Step]:
    """Seeded calls that fit the tools' schemas."""
    return _random_steps(target, "0", RANDOM_CALLS)


def _random_steps(target: Target, seed: str, count: int) -> list[Step]:
    maker = target.calls(seed)
    tools = target.usable
    return (
        [Step(tool.name, arguments) for tool, arguments in (maker.choose(tools) for _ in range(count))]
        if tools
        else []
    )


def changed_steps(target: Target, steps: Sequence[Step], seed: str) -> list[Step]:
    """Steps with one added, removed or replaced: the neighbour that hill-climbing tries."""
    if not steps:
        return _random_steps(target, seed, RANDOM_CALLS)
    maker, changed = target.calls(seed), [*steps]
    (new,) = _random_steps(target, f"{seed}+", 1) or (None,)
    place = maker.position(len(changed))
    match maker.position(3):
        case 0 if new is not None:
            changed.insert(place, new)
        case 1 if new is not None:
            changed[place] = new
        case _:
            del changed[place]
    return changed


async def vandal(target: Target, abilities: Abilities, episode: Episode) -> None:
    """Empties, overwrites and deletes what it can reach."""
    if abilities.runner is not None:
        fill = 'head -c 100000 /dev/zero | tr "\\0" x'
        each = "find . -type f -not -path './.git/*' | while read -r file"
        command = f'{_place(target, episode)}; {each}; do {fill} > "$file"; : > "$file"; done; rm -rf ./*'
        await _call(episode, abilities.runner.tool, abilities.runner.call(command))
        return
    for name in (*target.answers.workspace, *target.answers.outputs)[:MAX_READS]:
        if abilities.writer is not None:
            await _call(episode, abilities.writer.tool, abilities.writer.call(name, ""))
    for tool in target.usable:
        if is_removing(tool) and (path := path_argument(tool)) is not None:
            for name in target.answers.workspace[:MAX_READS]:
                await _call(episode, tool.name, {path: name})


def can_destroy(target: Target, abilities: Abilities) -> bool:
    return abilities.can("file") or any(map(is_removing, target.usable))


async def forger(target: Target, abilities: Abilities, chosen: Iterable[Attack], episode: Episode) -> None:
    """Carries out attacks, one after the other in one attempt."""
    root, workspace = target.places(episode.prompt)
    for attack in chosen:
        if abilities.runner is not None:
            command = shell_command(
                attack,
                root=root,
                task=str(PurePosixPath(root, target.task.folder)),
                workspace=workspace,
                outputs=target.answers.outputs,
                repository=(*abilities.repositories, attack.name)[0],
            )
            await _call(episode, abilities.runner.tool, abilities.runner.call(command))
        elif abilities.writer is not None:
            for path, content in attack.files.items():
                await _call(episode, abilities.writer.tool, abilities.writer.call(path, content))


def can_lay_truth(target: Target, abilities: Abilities) -> bool:
    """Whether the tools can write the ground truth's files. Blocks."""
    for path in target.answers.files.values():
        try:
            if path.stat().st_size > MAX_LAID_BYTES:
                return False
            path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            if abilities.runner is None:
                return False
    return bool(target.answers.files) and abilities.can("file")


async def lay_truth(target: Target, abilities: Abilities, episode: Episode) -> None:
    """Lays the ground truth's files into the workspace."""
    for name, path in target.answers.files.items():
        if abilities.runner is not None:
            content = base64.b64encode(path.read_bytes()).decode()
            make = f'mkdir -p "$(dirname {quote(name)})"'
            command = f"{_place(target, episode)}; {make}; echo {content} | base64 -d > {quote(name)}"
            await _call(episode, abilities.runner.tool, abilities.runner.call(command))
        elif abilities.writer is not None:
            arguments = abilities.writer.call(name, path.read_text("utf-8"))
            await _call(episode, abilities.writer.tool, arguments)


async def played(steps: Sequence[Step], episode: Episode) -> None:
    """Makes the calls of a script, whatever the replies are."""
    workspace = workspace_in(episode.prompt)
    for step in steps:
        arguments = step.resolve(workspace)
        if step.tool == CLAIM:
            await episode.claim_done(arguments.get("answer"))
        else:
            await _call(episode, step.tool, arguments)


def omissions(target: Target, steps: Sequence[Step]) -> list[tuple[str, list[Step]]]:
    """A script without each of its steps that changes something, and the name of this step."""
    reading = {tool.name for tool in target.tools if is_reading(tool)}
    found: list[tuple[str, list[Step]]] = []
    for number, step in enumerate(steps):
        if step.tool == CLAIM:
            if step.arguments.get("answer"):
                found.append(("the answer", [*steps[:number], replace(step, arguments={})]))
        elif step.tool not in reading:
            found.append((f"step {number + 1}, {step.tool}", [*steps[:number], *steps[number + 1 :]]))
    return found


def find_oracle(target: Target) -> list[Step] | None:
    """The script that solves a task: `oracles/TASK.jsonl` in or beside its suite. Blocks.

    Raises SuiteError for an unreadable script.
    """
    suite, task = target.suite, target.task.id
    for folder in (suite.path, suite.path.parent):
        file = folder / "oracles" / f"{task}.jsonl"
        if file.is_file():
            try:
                return read_steps(read_text(file))
            except ValueError as error:
                raise SuiteError(f"{file}: {error}") from None
    return None


async def _call(episode: Episode, tool: str, arguments: JsonObject) -> Reply:
    if episode.claimed:
        return Reply.mistake("the attempt is over")
    return await episode.act(tool, arguments, timeout=CALL_SECONDS)


def _place(target: Target, episode: Episode) -> str:
    """A command that goes to the workspace, with the variables of attacks."""
    root, workspace = target.places(episode.prompt)
    return f'WORK={quote(workspace)}; ROOT={quote(root)}; cd "$WORK" || exit 1'
