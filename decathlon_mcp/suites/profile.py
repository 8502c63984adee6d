"""What differs between suites, as values: three packaged profiles, and a checkout's own words over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, TypeVar, cast

from pydantic import AfterValidator, BeforeValidator

from decathlon_mcp.suites.documents import read_yaml
from decathlon_mcp.types import JsonObject, Names

T = TypeVar("T")


def _pairs(value: object) -> object:
    return tuple(cast("Mapping[object, object]", value).items()) if isinstance(value, Mapping) else value


Pairs = Annotated[tuple[tuple[str, T], ...], BeforeValidator(_pairs)]
"""A mapping of the YAML file, kept as pairs: hashable, in the file's order."""


def _absolute(path: PurePosixPath) -> PurePosixPath:
    if not path.is_absolute():
        raise ValueError("an absolute path was expected")
    return path


def _inside(path: PurePosixPath) -> PurePosixPath:
    if path.is_absolute() or ".." in path.parts or path == PurePosixPath():
        raise ValueError("a path that leads further in was expected")
    return path


Absolute = Annotated[PurePosixPath, AfterValidator(_absolute)]
Inside = Annotated[PurePosixPath, AfterValidator(_inside)]

PACKAGED = Path(__file__).parent / "profiles"


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteProfile:
    """Where and how the tasks of a suite run. Paths are relative to `root` unless they are absolute."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (pydantic's own convention)

    name: str
    root: Absolute
    """Where the suite lives inside a sandbox."""
    workspace: Inside
    log_file: Inside
    run_module: tuple[str, ...]
    """What runs a module of the suite: this, then the module's name."""
    python: tuple[str, ...]
    common: tuple[Inside, ...]
    """What of the checkout every sandbox needs. What is not there is left out."""
    task_base: Inside
    """What Toolathlon's `task_dir` is relative to."""
    local_servers: PurePosixPath
    local_binaries: PurePosixPath
    sealed: tuple[str, ...]
    """Names in a task's folder that must be gone before an agent can reach anything."""
    grading: tuple[str, ...]
    """Those of `sealed` that a task without a preprocess never needs beside the agent."""
    stand_ins: Pairs[Inside] = ()
    """Files that a checkout need not have, each with the one that is taken in its place."""
    image: str | None = None
    launch_time_format: str = "%Y-%m-%d %H:%M:%S %A"
    names: Names = "decathlon"
    cuts_overlong: bool = False
    """Are replies cut that are too long for a conversation? `--overlong` outweighs it."""
    local_code: Pairs[str] = ()
    """Where the suite's own code of a local tool is, by the tool's name in `task_config.json`: `module:name`,
    or `module:name(workspace)` for what makes it."""
    claim_required: bool = False
    preprocess_must_succeed: bool = True
    leaves_running: bool = False
    """May what a preprocess has started run on while the agent plays?"""
    servers_inherit: Literal["minimal", "all"] = "minimal"
    environment: Pairs[str] = field(default=(), repr=False)
    """For preprocess, evaluation and servers."""
    environment_wins: bool = False
    """Does it outweigh what a server's yaml says?"""
    server_cwd: Literal["root", "workspace"] = "root"
    """Where a server starts whose yaml names no `cwd`."""
    request_seconds: float = 60.0
    """For one request to a server whose yaml names no `client_session_timeout_seconds`."""
    extra_args: Pairs[tuple[str, ...]] = ()
    """Arguments that a server gets when it runs as root, by its name."""
    folders: Pairs[Inside] = ()
    """A folder of the workspace that a server wants to find, by its name."""
    kept: tuple[str, ...] = ()
    """Names in a task's folder that the task's servers may need while the agent plays."""
    purged: tuple[Inside, ...] = ()
    """What the image may have brought along and no sandbox may keep."""
    secrets: tuple[Inside, ...] = ()
    """Files with credentials of the whole suite. An agent's sandbox keeps those that the task's servers are
    pointed to, or are said to need."""
    placeholders: tuple[str, ...] = ("",)
    """Values of a token that mean that nobody has filled it in."""


@cache
def packaged() -> Mapping[str, JsonObject]:
    """The profiles that come with this package, by name, as their files have them."""
    return {path.stem: read_yaml(path) for path in sorted(PACKAGED.glob("*.yaml"))}


def recognise(checkout: Path) -> str:
    """The profile of a checkout that does not say it: the first that finds one of its `marks` there.

    toolathlon_gym's marks are files that only it has; a checkout without any is taken for Toolathlon itself.
    """
    for name, words in packaged().items():
        if any((checkout / mark).exists() for mark in words.get("marks", ())):
            return name
    return "toolathlon"


def merge(base: JsonObject, over: JsonObject) -> JsonObject:
    """`base` with `over` laid on it: mappings are merged, at any depth; anything else is replaced."""
    merged = dict(base)
    for key, value in over.items():
        mine = merged.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            merged[key] = merge(cast("JsonObject", mine), cast("JsonObject", value))
        else:
            merged[key] = value
    return merged
