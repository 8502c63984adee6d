"""`suite.yaml`, the optional settings of a checkout: the reference of its format.

Every field is optional; docs/writing-tasks.md has an example. Besides the fields below, any field of
`SuiteProfile` is allowed at the top level and overrides the profile's value; mappings are merged with it.

Keys of `tasks`, `servers` and `local_tools` may be patterns (`*`, `?`, `[...]`). The settings of all matching
keys are merged in the file's order, the exact name's last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Annotated, TypeVar, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    model_validator,
)

from decathlon_mcp.suites.documents import file_error, read_yaml, validate
from decathlon_mcp.suites.profile import SuiteProfile, detect_profile, merge, packaged_profiles
from decathlon_mcp.types import JsonObject, PreprocessSandbox
from decathlon_mcp.validation import quoted, similar

FILE = "suite.yaml"

Strings = tuple[str, ...]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


def _normalise_address(value: object) -> object:
    text = f"localhost:{value}" if str(value).isdecimal() else str(value)
    _split_address(text)
    return text


def _split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("host:port, or just a port, was expected")
    return host.strip("[]"), int(port)


def _ports_as_mapping(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return {port: port for port in cast("list[object]", value)}


def _check_sandbox_path(path: str) -> str:
    # In a container /tmp is mounted, and an archive unpacked there would land beneath the mount.
    place = PurePosixPath(path)
    if ".." in place.parts or place in (PurePosixPath(), PurePosixPath("/")) or place.is_relative_to("/tmp"):
        raise ValueError("a path of a sandbox was expected, not below /tmp")
    return path


def _check_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("letters, digits and ._- were expected, a letter or a digit first")
    return name


def _check_credential(name: str) -> str:
    if not re.fullmatch(r"(token|config)\.[A-Za-z_]\w*", name):
        raise ValueError("token.NAME or config.NAME was expected as the name")
    return name


Address = Annotated[str, BeforeValidator(_normalise_address)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")]
Files = dict[Annotated[str, AfterValidator(_check_sandbox_path)], str]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Deadlines(Model):
    """Time limits. None: the server's setting of that name."""

    servers_seconds: Seconds | None = None
    preprocess_seconds: Seconds | None = None
    set_up_seconds: Seconds | None = None
    evaluation_seconds: Seconds | None = None


class ExternalNeeds(Model):
    """What a server or a local tool needs besides its own code.

    A credential is `token.x`, `config.x` or a path of the checkout. `files`: as in `Credentials`.
    """

    network: bool = False
    credentials: Strings = ()
    services: Strings = ()
    files: Files = {}


class ServerNeeds(ExternalNeeds):
    """The same for a server. `eager`: it starts at set-up, also with `--servers lazy`.

    For servers whose start changes something that the agent or the evaluator can see. `task_files` maps a
    JSON file of the task's folder to keys without whose values the server does not start; a task without that
    file needs none of them.
    """

    eager: bool = False
    task_files: dict[str, Strings] = {}


class Credentials(Model):
    """One set of credentials. `values` override the suite's token files.

    `files` maps paths in the sandbox (relative to the suite's root, or absolute) to files or folders on this
    host (relative to the checkout, or absolute). They replace what the sandbox has there.
    """

    values: dict[Annotated[str, AfterValidator(_check_credential)], str] = {}
    files: Files = {}


class Account(Model):
    """An account that `tasks` and all tasks that need one of `servers` work on; both may be patterns.

    `slots` is the number of tasks that may use it at once, or one set of credentials for each of them; by
    default one task at a time. `told_by` names a token: tasks with different values of it use different
    accounts. `service` names the service that has it: not shared while each episode has one of its own.
    """

    servers: Strings = ()
    tasks: Strings = ()
    told_by: str | None = None
    service: str | None = None
    slots: Annotated[int, Field(ge=1)] | dict[str, Credentials] = {}

    @model_validator(mode="before")
    @classmethod
    def _only_tasks(cls, value: object) -> object:
        return {"tasks": cast("list[object]", value)} if isinstance(value, list | tuple) else value

    @property
    def slot_names(self) -> tuple[str, ...]:
        if isinstance(self.slots, int):
            return tuple(map(str, range(1, self.slots + 1)))
        return tuple(self.slots)

    def is_of(self, task_id: str, servers: Iterable[str]) -> bool:
        """Whether a task with these servers works on this account."""
        if any(fnmatchcase(task_id, pattern) for pattern in self.tasks):
            return True
        return any(fnmatchcase(server, pattern) for server in servers for pattern in self.servers)

    def credentials(self, slot: str) -> Credentials:
        return self.slots.get(slot, Credentials()) if isinstance(self.slots, dict) else Credentials()


class Service(Model):
    """A service outside of the sandbox that tasks connect to."""

    ports: Annotated[dict[Port, Address], BeforeValidator(_ports_as_mapping)] = {}
    """Ports of the sandbox's `localhost`, to `host:port` or a port of the server's own `localhost`. Without
    ports it is reached over the sandbox's network."""
    available: bool = False
    cure: str = ""
    """How to make it available."""
    image: str | None = None
    """With it, each episode gets its own instance in a sandbox of this image."""
    start: Strings = ()
    """Command of such an instance, which leaves processes running that listen at `ports`."""
    files: dict[FileName, str] = {}
    """Its working folder: names, to files of this host (relative to the checkout, or absolute)."""
    private: Service | None = None
    """An instance for each episode, used unless this service is `available`."""

    @model_validator(mode="after")
    def _private_has_an_image(self) -> Service:
        if self.private is not None and self.private.image is None:
            raise ValueError("`private` names no image")
        return self

    @property
    def in_use(self) -> Service:
        """This service, or the private service that is used in its place."""
        return self if self.available or self.private is None else self.private

    @property
    def targets(self) -> dict[int, tuple[str, int]]:
        """Host and port on the server's side, by port of the sandbox."""
        return {port: _split_address(address) for port, address in self.ports.items()}


class TaskSettings(Model):
    """A suite's settings for a task. None: the default, which the task's servers and profile determine."""

    in_place: bool | None = None
    """Whether it is graded in the agent's own sandbox."""
    spared: Strings | None = None
    """Command lines (patterns) of processes that keep running while it is graded in place."""
    network: bool | None = None
    """Whether the agent's sandbox has one; the grader's by `grader_network`."""
    grader_network: bool | None = None
    credentials: Strings | None = None
    """Needed besides the servers' own."""
    services: Strings | None = None
    """Needed in place of the servers' own."""
    optional: Strings = ()
    """Credentials of these without which it can be played, too."""
    leaves_running: bool | None = None
    """Whether processes that its preprocess started keep running while the agent plays."""
    preprocess_sandbox: PreprocessSandbox | None = None
    kept: Strings = ()
    """Entries of its folder that are not removed, besides the profile's."""
    eager: bool | None = None
    """Whether all of its servers start at set-up, also with `--servers lazy`."""
    deadlines: Deadlines = Deadlines()


class SuiteFile(Model):
    """The fields of suite.yaml that are not fields of the profile."""

    name: Annotated[str, AfterValidator(_check_name)] | None = None
    profile: str | None = None
    marks: Strings = ()
    """Files by which the profile is recognised."""
    task_marks: Strings = ()
    """Texts in tasks' scripts by which the profile is recognised."""
    fallback: bool = False
    """Whether it is the profile of a checkout without marks."""
    deadlines: Deadlines = Deadlines()
    splits: dict[str, Strings] = {}
    conflicts: tuple[Strings, ...] = ()
    accounts: dict[str, Account] = {}
    services: dict[str, Service] = {}
    servers: dict[str, ServerNeeds] = {}
    local_tools: dict[str, ExternalNeeds] = {}
    pages: dict[str, str] = {}
    needed_to_record: Strings = ()
    """Credentials that only the live web asks for; a recording answers without them."""
    tasks: dict[str, TaskSettings] = {}

    def task(self, task_id: str) -> TaskSettings:
        """The settings of a task, merged from all patterns that match it."""
        settings = settings_for(self.tasks, task_id, TaskSettings)
        deadlines = self.deadlines.model_copy(update=settings.deadlines.model_dump(exclude_none=True))
        return settings.model_copy(update={"deadlines": deadlines})


M = TypeVar("M", bound=Model)


def settings_for(table: Mapping[str, M], name: str, model: type[M]) -> M:
    """The settings of a name in a table of patterns, merged in the table's order, the exact name last."""
    merged: JsonObject = {}
    for key in (*(key for key in table if key != name and fnmatchcase(name, key)), name):
        if key in table:
            merged = merge(merged, table[key].model_dump(exclude_none=True, exclude_unset=True))
    return model.model_validate(merged)


_PROFILE = TypeAdapter(SuiteProfile)
_FILE = TypeAdapter(SuiteFile)
_PROFILE_FIELDS = frozenset(field.name for field in fields(SuiteProfile)) - {"name"}


def read_suite_file(checkout: Path) -> tuple[SuiteProfile, SuiteFile]:
    """The profile and the settings of a checkout, with or without a `suite.yaml`.

    Raises SuiteError naming file, line and field.
    """
    path = checkout / FILE
    content = read_yaml(path) if path.exists() else {}
    # The checkout's own settings are validated before they are merged, so that an error names its own file.
    own_fields = {key: value for key, value in content.items() if key not in _PROFILE_FIELDS}
    own = validate(path, _FILE, own_fields, more_names=_PROFILE_FIELDS)
    profiles = packaged_profiles()
    base = own.profile or (own.name if own.name in profiles else None) or detect_profile(checkout)
    if base not in profiles:
        close = similar(base, profiles, count=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        problem = f"one of {', '.join(profiles)} was expected, not {quoted(base)}{hint}"
        raise file_error(path, problem, field="profile")
    merged = merge(profiles[base], content)
    profile_fields = {key: value for key, value in merged.items() if key in _PROFILE_FIELDS}
    other_fields = {key: value for key, value in merged.items() if key not in _PROFILE_FIELDS}
    profile = validate(path, _PROFILE, {**profile_fields, "name": base})
    settings = validate(path, _FILE, other_fields)
    _check_credential_files(path, profile, settings)
    return profile, settings


def _check_credential_files(path: Path, profile: SuiteProfile, settings: SuiteFile) -> None:
    """Raise SuiteError for a credential file that would be put into the agent's workspace."""
    accounts = settings.accounts.values()
    slots = [account.credentials(slot) for account in accounts for slot in account.slot_names]
    for item in (*settings.servers.values(), *settings.local_tools.values(), *slots):
        for target in item.files:
            if (profile.root / target).is_relative_to(profile.root / profile.workspace):
                raise file_error(path, f"{target} is in the agent's workspace", field="files")
