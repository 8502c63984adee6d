"""`suite.yaml`, which any checkout may have: its profile and what this server must know of its tasks.

Every field is optional. Beside the fields below, any field of `SuiteProfile` may stand at the top level: it
overrides that of the named profile.

    name: my-suite                      # what the suite is called; default: the folder's
    profile: toolathlon                 # or gym, starter; default: the one called as the suite, else by marks
    root: /workspace                    # ... any field of SuiteProfile; a mapping is laid over the profile's
    deadlines: {evaluation_seconds: 60}
    splits: {train: [find-alita-paper, "canvas-*"], test: [...]}
    conflicts: [[one-task, another]]    # never run side by side, nor with themselves
    accounts:                           # tasks that share an account run one by one, each by itself too
      shop: ["shop-*"]                  # ... by their names
      notion: {servers: [notion], slots: {first: {values: {token.key: abc}}, second: {values: {...}}}}
    services:                           # hosted beside: at `localhost` inside, led to where they are
      canvas: {available: true, ports: {10001: 10001, 20001: "canvas.example.org:443"}}
    servers: {my-server: {network: true, credentials: [token.my_key], services: [canvas]}}
    pages: {token.my_key: docs/keys.md, "service.*": "https://..."}   # how to get what is missing
    tasks: {"k8s-*": {in_place: true, spared: ["kubectl port-forward*"], deadlines: {...}}}

Names of tasks and servers may be patterns (`*`, `?`, `[...]`): all that match count, in the file's order,
the exact name last.
"""

from __future__ import annotations

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

from decathlon_mcp.suites.documents import broken, check, read_yaml
from decathlon_mcp.suites.profile import SuiteProfile, merge, packaged, recognise
from decathlon_mcp.types import JsonObject

FILE = "suite.yaml"

Words = tuple[str, ...]
Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


def _address(value: object) -> object:
    text = f"localhost:{value}" if str(value).isdecimal() else str(value)
    _split(text)
    return text


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError("host:port, or just a port, was expected")
    return host.strip("[]"), int(port)


def _same_ports(value: object) -> object:
    if not isinstance(value, list | tuple):
        return value
    return {port: port for port in cast("list[object]", value)}


def _not_scratch(path: str) -> str:
    place = PurePosixPath(path)
    if ".." in place.parts or place in (PurePosixPath(), PurePosixPath("/")) or place.is_relative_to("/tmp"):
        raise ValueError("a path of a sandbox was expected, not below /tmp")
    return path


Address = Annotated[str, BeforeValidator(_address)]
Files = dict[Annotated[str, AfterValidator(_not_scratch)], str]


class Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Deadlines(Model):
    """None: the server's own setting of that name."""

    servers_seconds: Seconds | None = None
    preprocess_seconds: Seconds | None = None
    set_up_seconds: Seconds | None = None
    evaluation_seconds: Seconds | None = None


class Wants(Model):
    """What a server or a local tool needs from outside.

    A credential is `token.x` or `config.x`, or else a path of the checkout. `network` None: as the server's
    address says. `files`: as in `Credentials`.
    """

    network: bool | None = None
    credentials: Words = ()
    services: Words = ()
    files: Files = {}


class Credentials(Model):
    """A set of them. `values` are laid over the suite's token files; `files`, over all that a sandbox holds,
    go to a path (in the suite's root, unless it is absolute) from one (in the checkout, unless it is
    absolute), whole folders too."""

    values: dict[Annotated[str, Field(pattern=r"^(token|config)\.[A-Za-z_]\w*$")], str] = {}
    files: Files = {}


class Account(Model):
    """What tasks work on under one name, somewhere outside: those that need one of `servers`, and `tasks`.

    `slots`: how many of them at once, or the sets of credentials of which each of them has one; without,
    one at a time. `told_by`: the token by whose value several accounts of this kind are told apart.
    """

    servers: Words = ()
    tasks: Words = ()
    told_by: str | None = None
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
        """Is this one that a task with these servers works on?"""
        if any(fnmatchcase(task_id, word) for word in self.tasks):
            return True
        return any(fnmatchcase(server, word) for server in servers for word in self.servers)

    def credentials(self, slot: str) -> Credentials:
        return self.slots.get(slot, Credentials()) if isinstance(self.slots, dict) else Credentials()


class Service(Model):
    """Something that tasks speak to beside their sandbox. `cure` says how to get it.

    `ports`: those of the sandbox's `localhost` that lead to it, each with where the server reaches it
    (`host:port`; just a port: on the server's own `localhost`). One without ports is reached by the sandbox's
    own network. With `image` it is a sandbox of its own beside each episode's: what `start` leaves running
    there serves at these very ports.
    """

    ports: Annotated[dict[Port, Address], BeforeValidator(_same_ports)] = {}
    available: bool = False
    cure: str = ""
    image: str | None = None
    start: Words = ()

    @property
    def targets(self) -> dict[int, tuple[str, int]]:
        """Ports inside, with host and port as the server reaches them."""
        return {port: _split(address) for port, address in self.ports.items()}


class TaskSettings(Model):
    """What a suite says of a task beyond the task's own files. None: not said."""

    in_place: bool | None = None
    spared: Words | None = None
    network: bool | None = None
    grader_network: bool | None = None
    credentials: Words | None = None
    services: Words | None = None
    leaves_running: bool | None = None
    deadlines: Deadlines = Deadlines()


class SuiteFile(Model):
    """What is not a profile's: names of tasks and servers may be patterns."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    profile: str | None = None
    marks: Words = ()
    deadlines: Deadlines = Deadlines()
    splits: dict[str, Words] = {}
    conflicts: tuple[Words, ...] = ()
    accounts: dict[str, Account] = {}
    services: dict[str, Service] = {}
    servers: dict[str, Wants] = {}
    local_tools: dict[str, Wants] = {}
    pages: dict[str, str] = {}
    tasks: dict[str, TaskSettings] = {}

    def task(self, task_id: str) -> TaskSettings:
        """All that is said of a task."""
        said = settings_for(self.tasks, task_id, TaskSettings)
        deadlines = self.deadlines.model_copy(update=said.deadlines.model_dump(exclude_none=True))
        return said.model_copy(update={"deadlines": deadlines})


M = TypeVar("M", bound=Model)


def settings_for(said: Mapping[str, M], name: str, shape: type[M]) -> M:
    """What a table of patterns says of a name."""
    found: JsonObject = {}
    for pattern in (*(key for key in said if key != name and fnmatchcase(name, key)), name):
        if pattern in said:
            found = merge(found, said[pattern].model_dump(exclude_none=True, exclude_unset=True))
    return shape.model_validate(found)


_DIALECT = TypeAdapter(SuiteProfile)
_FILE = TypeAdapter(SuiteFile)
_DIALECT_FIELDS = frozenset(field.name for field in fields(SuiteProfile)) - {"name"}


def read_suite_file(checkout: Path) -> tuple[SuiteProfile, SuiteFile]:
    """The profile and the settings of a checkout, whether or not it has a `suite.yaml`.

    Raises SuiteError naming file, line and field.
    """
    path = checkout / FILE
    said = read_yaml(path) if path.exists() else {}
    own = check(path, _FILE, {key: value for key, value in said.items() if key not in _DIALECT_FIELDS})
    base = own.profile or (own.name if own.name in packaged() else None) or recognise(checkout)
    if base not in packaged():
        raise broken(path, f"one of {', '.join(packaged())} was expected, not {base!r}", field="profile")
    whole = merge(packaged()[base], said)
    words = {key: value for key, value in whole.items() if key in _DIALECT_FIELDS}
    rest = {key: value for key, value in whole.items() if key not in _DIALECT_FIELDS}
    profile, file = check(path, _DIALECT, {**words, "name": base}), check(path, _FILE, rest)
    _keep_from_workspace(path, profile, file)
    return profile, file


def _keep_from_workspace(path: Path, profile: SuiteProfile, said: SuiteFile) -> None:
    """Credentials are nothing of the agent's. Raises SuiteError for a file that would go to its workspace."""
    slots = [account.credentials(slot) for account in said.accounts.values() for slot in account.slot_names]
    for each in (*said.servers.values(), *said.local_tools.values(), *slots):
        for goal in each.files:
            if (profile.root / goal).is_relative_to(profile.root / profile.workspace):
                raise broken(path, f"{goal} is in the agent's workspace", field="files")
