"""Tasks as their folders describe them: `tasks/<split>/<task>/`, without their prompts."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.checkout import inside
from decathlon_mcp.suites.documents import file_error, read_json, validate
from decathlon_mcp.suites.prompts import CLAIM, language_suffix
from decathlon_mcp.suites.suite_file import Deadlines
from decathlon_mcp.types import JsonObject, Language, PreprocessSandbox

log = logging.getLogger("decathlon.suites")

FOLDER = "tasks"
CONFIG = "task_config.json"
TOKEN_FILE = "token_key_session.py"
"""A task's own token file, in its folder."""

# The server itself provides `claim_done`. The other two act on the conversation of Toolathlon's scaffold, and
# a client has its own.
EXCLUDED_LOCAL_TOOLS = frozenset({CLAIM, "manage_context", "history"})

Name = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a task needs.

    `credentials`: `token.x`, `config.x`, a path of the checkout, or `PATH#KEY` for a key of a JSON file;
    filled in or not.
    """

    servers: tuple[str, ...] = ()
    local_tools: tuple[str, ...] = ()
    network: bool = False
    credentials: tuple[str, ...] = ()
    services: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TaskFiles:
    """The files of a task's folder that are used in one language.

    `preprocess` and `evaluation` are modules (`preprocess.main`), the others are folders.
    """

    has_text: bool = True
    preprocess: str | None = None
    evaluation: str = "evaluation.main"
    groundtruth: str | None = None
    initial_workspace: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One task of a suite."""

    id: str
    suite: str
    folder: PurePosixPath
    """Relative to the checkout, and to the suite's root inside a sandbox."""
    needs: Needs = Needs()
    splits: tuple[str, ...] = ()
    files: TaskFiles = TaskFiles()
    has_token_file: bool = False
    in_place: bool = False
    """Whether it is graded in the agent's own sandbox."""
    spared: tuple[str, ...] = ()
    """Command lines (patterns) of processes that keep running while it is graded in place."""
    leaves_running: bool = False
    """Whether processes that its preprocess started keep running while the agent plays."""
    preprocess_sandbox: PreprocessSandbox = "auto"
    kept: tuple[str, ...] = ()
    """Entries of its folder that are not removed, besides the profile's `kept`."""
    eager_servers: tuple[str, ...] = ()
    """The servers that start at set-up in any case, because their start changes something."""
    grader_network: bool = False
    deadlines: Deadlines = field(default_factory=Deadlines)
    max_turns: int | None = None
    meta: JsonObject = field(default_factory=dict)
    config: JsonObject = field(default_factory=dict)
    """The whole of `task_config.json`."""
    names: tuple[str, ...] = ()
    """The entries of its folder, sorted."""
    errors: tuple[SuiteError, ...] = ()
    """Errors in its files and in its servers' files. A task with errors is listed but cannot start."""


class TaskConfig(BaseModel):
    """The fields of `task_config.json` that this server uses; `Task.config` has all of them."""

    model_config = ConfigDict(frozen=True)

    needed_mcp_servers: tuple[Name, ...]
    needed_local_tools: tuple[Name, ...] | None = None
    """Toolathlon takes null for none."""
    max_turns: int | None = None
    meta: JsonObject | None = None


_CONFIG = TypeAdapter(TaskConfig)


def find_task_folders(checkout: Path) -> list[PurePosixPath]:
    """The tasks' folders, which have a `task_config.json` or `docs`, sorted. Links are not followed."""
    return [
        PurePosixPath(FOLDER, split, name)
        for split in _subfolders(checkout / FOLDER)
        for name in _subfolders(checkout / FOLDER / split)
        if any((checkout / FOLDER / split / name / entry).exists() for entry in (CONFIG, "docs"))
    ]


def task_ids(folders: Sequence[PurePosixPath]) -> list[str]:
    """The tasks' ids: the folder's name, or `<split>.<name>` if several splits have that name."""
    names = [folder.name for folder in folders]
    shared = {name for name in names if names.count(name) > 1} if len(set(names)) < len(names) else set[str]()
    return [
        f"{folder.parent.name}.{folder.name}" if folder.name in shared else folder.name for folder in folders
    ]


def read_task(task_id: str, suite: str, checkout: Path, path: PurePosixPath, language: Language) -> Task:
    """A task as its folder describes it, without the suite's settings.

    Errors in its files are in `errors`, so that one broken task hides no other.
    """
    folder = checkout / path
    entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    docs = folder / "docs"
    errors: list[SuiteError] = []
    raw_config: JsonObject = {}
    config = TaskConfig(needed_mcp_servers=())
    try:
        # What they contain, clients read.
        for entry in (*entries, *(os.scandir(docs) if docs.is_dir() else ())):
            if entry.is_symlink() and (entry.name in (CONFIG, "docs") or Path(entry.path).parent == docs):
                inside(checkout, PurePosixPath(entry.path))
        raw_config = read_json(folder / CONFIG)
        config = validate(folder / CONFIG, _CONFIG, raw_config)
    except SuiteError as error:
        errors.append(error)
    errors += [
        file_error(folder / file, "this file does not exist, and every task needs it")
        for file in ("docs/task.md", "evaluation/main.py")
        if not (folder / file).is_file()
    ]
    if unimportable := [part for part in path.parts if "." in part]:
        errors.append(
            file_error(
                folder,
                f"Python finds no module in a folder with a dot in its name: rename {unimportable[-1]}",
            )
        )
    names = tuple(entry.name for entry in entries)
    local_tools = (tool for tool in config.needed_local_tools or () if tool not in EXCLUDED_LOCAL_TOOLS)
    return Task(
        id=task_id,
        suite=suite,
        folder=path,
        needs=Needs(
            servers=tuple(dict.fromkeys(config.needed_mcp_servers)),
            local_tools=tuple(dict.fromkeys(local_tools)),
        ),
        files=_task_files(folder, names, language),
        has_token_file=TOKEN_FILE in names,
        max_turns=config.max_turns,
        meta=config.meta or {},
        config=raw_config,
        names=names,
        errors=tuple(errors),
    )


def _task_files(folder: Path, names: Collection[str], language: Language) -> TaskFiles:
    """Select files for a language, as Toolathlon does (utils/data_structures/task_config.py, `cn_mode`).

    The text must be in that language; everything else falls back to the variant without a language.
    """
    suffix = language_suffix(language)

    def module(package: str) -> str | None:
        if package not in names:
            return None
        for name in (f"main{suffix}", "main"):
            if (folder / package / f"{name}.py").is_file():
                return f"{package}.{name}"
        return None

    def entry(name: str) -> str | None:
        return next((variant for variant in (f"{name}{suffix}", name) if variant in names), None)

    return TaskFiles(
        has_text=(folder / "docs" / f"task{suffix}.md").is_file(),
        preprocess=module("preprocess"),
        evaluation=module("evaluation") or "evaluation.main",
        groundtruth=entry("groundtruth_workspace"),
        initial_workspace=entry("initial_workspace"),
    )


def _subfolders(parent: Path) -> Iterator[str]:
    """The names of its folders, sorted, without names that start with `.` or `_`."""
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
            log.warning(
                "a symbolic link below tasks/ is not followed", extra={"fields": {"path": entry.path}}
            )
