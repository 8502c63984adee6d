"""Profiles: how kinds of suites differ. Plug-ins have some, and a suite.yaml overrides their fields."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal, cast

from pydantic import AfterValidator

from decathlon_mcp.hooks import plugins
from decathlon_mcp.storage.disk import open_regular
from decathlon_mcp.suites.documents import read_yaml
from decathlon_mcp.types import JsonObject, Names, PreprocessSandbox


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

PLAIN_PROFILE = "starter"
"""The core's own: for suites that were made for this server."""
SEARCHED_TASKS = 20
SEARCHED_BYTES = 1 << 16
"""How many tasks are looked at to find out a checkout's profile, and how much of each of their scripts."""
log = logging.getLogger("decathlon.suites")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteProfile:
    """Where and how the tasks of a suite run. Paths are relative to `root` unless they are absolute."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012  (pydantic's own convention)

    name: str
    root: Absolute
    """The suite's folder inside a sandbox."""
    workspace: Inside
    log_file: Inside
    run_module: tuple[str, ...]
    """The command that runs a module of the suite; the module's name is appended."""
    python: tuple[str, ...]
    common: tuple[Inside, ...]
    """Files and folders of the checkout that every sandbox gets, if they exist."""
    task_base: Inside
    """The folder that Toolathlon's `task_dir` is relative to."""
    local_servers: PurePosixPath
    """The folder `${local_servers_paths}` of servers' files."""
    local_binaries: PurePosixPath
    """The folder `${local_binary_paths}` of servers' files."""
    sealed: tuple[str, ...]
    """Entries of a task's folder that are removed before an agent can reach the sandbox."""
    grading: tuple[str, ...]
    """Entries among `sealed` that an agent's sandbox gets only if preprocess or token files may read them."""
    stand_ins: dict[str, Inside] = field(default_factory=dict[str, PurePosixPath])
    """Files of the checkout that need not exist, each with the file that is used in its place."""
    overlays: dict[str, Inside] = field(default_factory=dict[str, PurePosixPath])
    """Paths of the suite's folder in a sandbox, each with the file of the checkout that is put there if the
    checkout has it. They replace files of the image."""
    image: str | None = None
    launch_time_format: str = "%Y-%m-%d %H:%M:%S %A"
    """Of the prompt and of the evaluator's `--launch_time`, for `strftime`."""
    preprocess_launch_time_format: str | None = None
    """Of preprocess's `--launch_time`; None: the same."""
    names: Names = "decathlon"
    coerces_arguments: bool = False
    """Whether arguments that are JSON in a string become the objects, arrays, numbers and booleans that the
    tool's schema asks for, as in Toolathlon since June 2026. Verdicts say so."""
    cuts_overlong: bool = False
    """Whether replies that are too long for a conversation are cut."""
    overlong_characters: int = 100_000
    """Length to which overlong replies are cut."""
    saves_overlong: bool = True
    """Whether the whole text of an overlong reply is saved in the workspace, as in Toolathlon. If not, what
    is cut off is dropped, as in toolathlon_gym."""
    grades_truncated: bool = True
    """Whether an attempt that a limit ended is graded; if not, its reward is 0."""
    local_code: dict[str, str] = field(default_factory=dict[str, str])
    """The suite's own code of each local tool, by its name in `task_config.json`: `module:name`, or
    `module:name(workspace)` for a function that makes the tools."""
    claim_required: bool = False
    """Whether an attempt succeeds only with a claim."""
    preprocess_must_succeed: bool = True
    """Whether a failed preprocess ends the episode."""
    leaves_running: bool = False
    """Whether processes that a preprocess started keep running while the agent plays."""
    preprocess_sandbox: PreprocessSandbox = "auto"
    servers_inherit: Literal["minimal", "all"] = "minimal"
    """Which variables of the sandbox servers get."""
    environment: dict[str, str] = field(default_factory=dict[str, str], repr=False)
    """Environment variables of preprocess, evaluation and MCP servers."""
    environment_wins: bool = False
    """Whether `environment` overrides the `env` in a server's YAML file."""
    server_cwd: Literal["root", "workspace"] = "root"
    """The working directory of servers whose YAML file has no `cwd`."""
    launchers_at_root: bool = False
    """Whether npx and uv look for programs in `root` for servers that start in the workspace, in which they
    would look otherwise."""
    request_seconds: float = 60.0
    """Limit for one request to a server whose YAML file has no `client_session_timeout_seconds`."""
    extra_args: dict[str, tuple[str, ...]] = field(default_factory=dict[str, tuple[str, ...]])
    """Arguments that a server needs when it runs as root, by the server's name."""
    absent_servers: tuple[str, ...] = ()
    """Servers that tasks list and upstream has no file for: its runner goes on without them."""
    folders: dict[str, Inside] = field(default_factory=dict[str, PurePosixPath])
    """A folder of the workspace that must exist when a server starts, by the server's name."""
    kept: tuple[str, ...] = ()
    """Entries of a task's folder that are not removed, because MCP servers may need them during play."""
    purged: tuple[Inside, ...] = ()
    """Files and folders that the image may contain and that are removed from every sandbox."""
    secrets: tuple[Inside, ...] = ()
    """Files with credentials of the whole suite. They are removed from an agent's sandbox unless one of the
    task's servers needs them, or a token value is their path."""
    placeholders: tuple[str, ...] = ("",)
    """Token values that mean that nothing is filled in."""


@cache
def packaged_profiles() -> Mapping[str, JsonObject]:
    """The content of the profile files of the core and its plug-ins, by the profile's name."""
    files = (file for folder in profile_folders() for file in folder.glob("*.yaml"))
    return {file.stem: read_yaml(file) for file in sorted(files, key=lambda file: file.stem)}


def profile_folders() -> list[Path]:
    """The folders with the profile files of the core and its plug-ins."""
    packages = [package for plugin in plugins() for package in plugin.profiles]
    return [Path(str(resources.files(package).joinpath("profiles"))) for package in packages]


def detect_profile(checkout: Path) -> str:
    """The first profile one of whose `marks` exists in the checkout, or whose `task_marks` its tasks contain.

    If there is none, the profile that is the `fallback`, or the plain one, with a warning.
    """
    profiles = packaged_profiles()
    fallback = next((name for name, content in profiles.items() if content.get("fallback")), PLAIN_PROFILE)
    for name, content in profiles.items():
        if any((checkout / mark).exists() for mark in content.get("marks", ())):
            # Forks of toolathlon_gym may keep the scripts of Toolathlon, which is the fallback.
            return _profile_by_tasks(checkout) or name if name == fallback else name
    if name := _profile_by_tasks(checkout):
        return name
    log.warning(
        "Nothing in a checkout says of what kind it is: it is taken for the usual one; suite.yaml can say it",
        extra={"fields": {"checkout": str(checkout), "profile": fallback, "profiles": ", ".join(profiles)}},
    )
    return fallback


def _profile_by_tasks(checkout: Path) -> str | None:
    """The profile that the scripts of the first tasks belong to."""
    marks = {
        mark.encode(): name
        for name, content in packaged_profiles().items()
        for mark in content.get("task_marks", ())
    }
    scripts = (
        script
        for folder in islice(checkout.glob("tasks/*/*/"), SEARCHED_TASKS)
        for script in (folder / "evaluation/main.py", folder / "preprocess/main.py")
    )
    for script in scripts:
        try:
            with open_regular(script) as file:
                beginning = file.read(SEARCHED_BYTES)
        except OSError:
            continue
        for mark, name in marks.items():
            if mark in beginning:
                return name
    return None


def merge(base: JsonObject, override: JsonObject) -> JsonObject:
    """`base` overridden by `override`: mappings are merged at any depth, other values are replaced."""
    merged = dict(base)
    for key, value in override.items():
        current = merged.get(key)
        if isinstance(current, dict) and isinstance(value, dict):
            merged[key] = merge(cast("JsonObject", current), cast("JsonObject", value))
        else:
            merged[key] = value
    return merged
