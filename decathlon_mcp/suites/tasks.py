"""A task as its folder has it: `tasks/<split>/<task>/`, read without its prompts."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.documents import broken, check, read_json
from decathlon_mcp.suites.prompts import suffix_of
from decathlon_mcp.suites.suite_file import Deadlines
from decathlon_mcp.suites.tool_names import CLAIM
from decathlon_mcp.types import JsonObject, Language

log = logging.getLogger("decathlon.suites")

FOLDER = "tasks"
CONFIG = "task_config.json"

OURS = frozenset({CLAIM, "manage_context", "history"})
"""Local tools that are none here: the first is this server's own, the others work on a conversation, and a
client has its own."""

Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a task wants. `credentials`: `token.x`, `config.x` or a path of the checkout, filled in or not."""

    servers: tuple[str, ...] = ()
    local_tools: tuple[str, ...] = ()
    network: bool = False
    credentials: tuple[str, ...] = ()
    services: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Parts:
    """Which of its files a task is made of in a language: modules and folders in the task's own folder."""

    has_text: bool = True
    preprocess: str | None = None
    """`preprocess.main`, where it has one."""
    evaluation: str = "evaluation.main"
    groundtruth: str | None = None
    initial_workspace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task. `folder` is relative to the checkout, and to the suite's root inside a sandbox."""

    id: str
    suite: str
    folder: PurePosixPath
    needs: Needs = Needs()
    splits: tuple[str, ...] = ()
    parts: Parts = Parts()
    has_token_file: bool = False
    in_place: bool = False
    """Is it evaluated on the agent's own machine?"""
    spared: tuple[str, ...] = ()
    """There, the processes that go on running, by their command lines: its evaluator is about them."""
    leaves_running: bool = False
    """May what its preprocess has started run on while the agent plays?"""
    grader_network: bool = False
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_turns: int | None = None
    meta: JsonObject = field(default_factory=dict)
    config: JsonObject = field(default_factory=dict)
    """`task_config.json` as it is."""
    names: tuple[str, ...] = ()
    """What lies in its folder, sorted."""
    errors: tuple[SuiteError, ...] = ()
    """What is broken about it; such a task is listed, and cannot be started."""

    @property
    def has_preprocess(self) -> bool:
        return self.parts.preprocess is not None


class TaskConfig(BaseModel):
    """What `task_config.json` must say; what else it says is in `Task.config`."""

    model_config = ConfigDict(frozen=True)

    needed_mcp_servers: tuple[Name, ...]
    needed_local_tools: tuple[Name, ...] = ()
    max_turns: int | None = None
    meta: JsonObject | None = None

    @property
    def servers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.needed_mcp_servers))

    @property
    def local_tools(self) -> tuple[str, ...]:
        return tuple(tool for tool in dict.fromkeys(self.needed_local_tools) if tool not in OURS)


_CONFIG = TypeAdapter(TaskConfig)


@dataclass(frozen=True, slots=True)
class Folder:
    """A task's folder and what it says by itself, before the suite has had its word."""

    path: PurePosixPath
    names: tuple[str, ...]
    config: JsonObject
    said: TaskConfig
    errors: tuple[SuiteError, ...]


def find_folders(checkout: Path) -> list[PurePosixPath]:
    """The tasks' folders, sorted: those that hold a `task_config.json` or `docs`. Links are not followed."""
    return [
        PurePosixPath(FOLDER, split, name)
        for split in _folders(checkout / FOLDER)
        for name in _folders(checkout / FOLDER / split)
        if any((checkout / FOLDER / split / name / mark).exists() for mark in (CONFIG, "docs"))
    ]


def ids_of(folders: Sequence[PurePosixPath]) -> list[str]:
    """Their ids: the folder's name, or `<split>.<name>` for those that more than one split has."""
    names = [folder.name for folder in folders]
    shared = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set[str]()
    return [
        f"{folder.parent.name}.{folder.name}" if folder.name in shared else folder.name for folder in folders
    ]


def read_folder(checkout: Path, path: PurePosixPath) -> Folder:
    """What a task's folder says. What is broken about it is in `errors`."""
    folder = checkout / path
    names = tuple(sorted(entry.name for entry in os.scandir(folder)))
    errors: list[SuiteError] = []
    config: JsonObject = {}
    said = TaskConfig(needed_mcp_servers=())
    try:
        config = read_json(folder / CONFIG)
        said = check(folder / CONFIG, _CONFIG, config)
    except SuiteError as error:
        errors.append(error)
    errors += [
        broken(folder / part, "every task has this file, and here it is not")
        for part in ("docs/task.md", "evaluation/main.py")
        if not (folder / part).is_file()
    ]
    return Folder(path, names, config, said, tuple(errors))


def parts_of(checkout: Path, folder: Folder, language: Language) -> Parts:
    """As Toolathlon takes them (`utils/data_structures/task_config.py`, `cn_mode`): texts of that language or
    none, of all else that of the language where it is there, else the one that has no language.
    """
    suffix = suffix_of(language)

    def first(package: str, *names: str) -> str | None:
        there = (name for name in names if (checkout / folder.path / package / f"{name}.py").is_file())
        found = next(there, None) if package in folder.names else None
        return f"{package}.{found}" if found else None

    def either(name: str) -> str | None:
        return next((each for each in (f"{name}{suffix}", name) if each in folder.names), None)

    return Parts(
        has_text=(checkout / folder.path / "docs" / f"task{suffix}.md").is_file(),
        preprocess=first("preprocess", f"main{suffix}", "main"),
        evaluation=first("evaluation", f"main{suffix}", "main") or "evaluation.main",
        groundtruth=either("groundtruth_workspace"),
        initial_workspace=either("initial_workspace"),
    )


def _folders(parent: Path) -> Iterator[str]:
    """The names of the folders in one, sorted; those that start with `.` or `_` are nobody's tasks."""
    try:
        entries = sorted(os.scandir(parent), key=lambda entry: entry.name)
    except OSError:
        return
    for entry in entries:
        if entry.name.startswith((".", "_")):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield entry.name
        elif entry.is_symlink() and entry.is_dir():
            log.warning("a link among the tasks is not followed", extra={"fields": {"path": entry.path}})
