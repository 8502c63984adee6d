"""`suite.yaml`, which any checkout may have: its dialect and what this server must know of its tasks.

Every field is optional. At its top stand, beside the fields below, those of `Dialect` that differ from the
dialect it names:

    name: my-suite                      # what the suite is called; default: the folder's
    dialect: toolathlon                 # or gym, starter; default: the one called as the suite, else by marks
    root: /workspace                    # ... any field of Dialect; a mapping is laid over the dialect's
    deadlines: {evaluation_seconds: 60}
    splits: {train: [find-alita-paper, "canvas-*"], test: [...]}
    conflicts: [[one-task, another]]    # never run side by side, nor with themselves
    accounts: {notion: ["notion-*"]}    # tasks that share an account: the same
    services: {canvas: {available: true}}
    servers: {my-server: {network: true, credentials: [token.my_key], services: [canvas]}}
    tasks: {"k8s-*": {in_place: true, spared: ["kubectl port-forward*"], deadlines: {...}}}

Names of tasks and servers may be patterns (`*`, `?`, `[...]`): all that match count, in the file's order,
the exact name last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from decathlon_mcp.model import JsonObject
from decathlon_mcp.suites.dialect import Dialect, merge, packaged, recognise
from decathlon_mcp.suites.documents import broken, check, read_yaml

FILE = "suite.yaml"

Words = tuple[str, ...]
Seconds = Annotated[float, Field(gt=0)]


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
    address says.
    """

    network: bool | None = None
    credentials: Words = ()
    services: Words = ()


class Service(Model):
    """Something hosted beside the sandboxes. `cure` says how to get it."""

    ports: tuple[int, ...] = ()
    available: bool = False
    cure: str = ""


class TaskSettings(Model):
    """What a suite says of a task beyond the task's own files. None: not said."""

    in_place: bool | None = None
    spared: Words | None = None
    network: bool | None = None
    grader_network: bool | None = None
    credentials: Words | None = None
    services: Words | None = None
    deadlines: Deadlines = Deadlines()


class SuiteFile(Model):
    """What is not a dialect's: names of tasks and servers may be patterns."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] | None = None
    dialect: str | None = None
    marks: Words = ()
    deadlines: Deadlines = Deadlines()
    splits: dict[str, Words] = {}
    conflicts: tuple[Words, ...] = ()
    accounts: dict[str, Words] = {}
    services: dict[str, Service] = {}
    servers: dict[str, Wants] = {}
    local_tools: dict[str, Wants] = {}
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


_DIALECT = TypeAdapter(Dialect)
_FILE = TypeAdapter(SuiteFile)
_DIALECT_FIELDS = frozenset(field.name for field in fields(Dialect)) - {"name"}


def read_suite_file(checkout: Path) -> tuple[Dialect, SuiteFile]:
    """The dialect and the settings of a checkout, whether or not it has a `suite.yaml`.

    Raises SuiteError naming file, line and field.
    """
    path = checkout / FILE
    said = read_yaml(path) if path.exists() else {}
    own = check(path, _FILE, {key: value for key, value in said.items() if key not in _DIALECT_FIELDS})
    base = own.dialect or (own.name if own.name in packaged() else None) or recognise(checkout)
    if base not in packaged():
        raise broken(path, f"one of {', '.join(packaged())} was expected, not {base!r}", field="dialect")
    whole = merge(packaged()[base], said)
    words = {key: value for key, value in whole.items() if key in _DIALECT_FIELDS}
    rest = {key: value for key, value in whole.items() if key not in _DIALECT_FIELDS}
    return check(path, _DIALECT, {**words, "name": base}), check(path, _FILE, rest)
