"""A suite: a checkout in Toolathlon's layout, its tasks ready to be prompted, packed and started."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import cast

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites import checkout as archives
from decathlon_mcp.suites.checkout import revision
from decathlon_mcp.suites.credentials import credentials_of
from decathlon_mcp.suites.host import HostInfo
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.programs import probe_command
from decathlon_mcp.suites.prompts import Prompt, read_prompt
from decathlon_mcp.suites.requirements import MissingRequirement
from decathlon_mcp.suites.resources import SuiteResources
from decathlon_mcp.suites.servers import FOLDER as SERVERS
from decathlon_mcp.suites.servers import ServerConfig
from decathlon_mcp.suites.sharing import Shared
from decathlon_mcp.suites.suite_file import FILE, Service
from decathlon_mcp.suites.tasks import FOLDER, Task
from decathlon_mcp.suites.tokens import SOURCES, VALUES_SCRIPT
from decathlon_mcp.types import JsonObject, Language, Names


@dataclass(frozen=True)
class Suite:
    """All as it was when the checkout was read, but prompts and archives: those are read when asked for."""

    name: str
    path: Path
    profile: SuiteProfile
    tasks: Mapping[str, Task] = field(repr=False)
    resources: SuiteResources = field(repr=False)
    _shared: Mapping[str, tuple[Shared, ...]] = field(repr=False)
    here: HostInfo = field(default_factory=HostInfo)

    @property
    def language(self) -> Language:
        """In which its tasks are told."""
        return self.here.language

    @property
    def servers(self) -> Mapping[str, ServerConfig]:
        """Those whose files can be read, by name."""
        return self.resources.servers

    @cached_property
    def revision(self) -> str:
        """Which state the checkout is in; computed once."""
        return revision(self.path, [*self.profile.common, PurePosixPath(FOLDER), PurePosixPath(FILE)])

    @property
    def sealed_names(self) -> tuple[str, ...]:
        """Names that no folder of a task may hold once an agent can reach it."""
        return self.profile.sealed

    def task(self, task_id: str) -> Task:
        """Raises SuiteError where the task is broken, KeyError where there is none."""
        task = self.tasks[task_id]
        if task.errors:
            raise task.errors[0]
        return task

    def lacks(self, task: Task) -> list[MissingRequirement]:
        """What keeps a task from running; nothing where it can."""
        return [*self.here.lacks(task, self.resources.pages), *self.resources.lacks(task)]

    def missing(self, task: Task) -> list[str]:
        """The same, a sentence each."""
        return [lack.sentence for lack in self.lacks(task)]

    def shared(self, task_id: str) -> tuple[Shared, ...]:
        """What a task must have to itself, or one of few slots of, while it runs and is graded."""
        return self._shared.get(task_id, ())

    def services(self, task: Task) -> dict[str, Service]:
        """What a task speaks to beside its sandboxes, by name."""
        return {name: self.resources.service(name) for name in task.needs.services}

    def credentials(self, task: Task, slots: Mapping[str, str]) -> list[tuple[PurePosixPath, bytes]]:
        """Archives that are laid over a task's sandboxes, each with the folder it belongs in: the root of the
        suite (a path of no parts) or of the machine.

        `slots`: which it has, by the accounts' names. Raises SuiteError for a file that cannot be read.
        """
        return credentials_of(self.resources, task, slots)

    def launch_time(self, when: datetime) -> str:
        """As `--launch_time` and the prompt have it."""
        return when.strftime(self.profile.launch_time_format)

    def task_dir(self, task: Task) -> str:
        """What Toolathlon calls the task's `task_dir`."""
        return str(task.folder.relative_to(self.profile.task_base))

    def prompt(self, task: Task, *, root: PurePosixPath, launch_time: datetime, names: Names) -> Prompt:
        """What the agent is told. Raises SuiteError where the task's files cannot be read."""
        return read_prompt(
            self.path / task.folder,
            self.profile,
            root=root,
            time=self.launch_time(launch_time),
            names=names,
            servers=task.needs.servers,
            language=self.language,
        )

    def common_archive(self, into: Path) -> None:
        """Tar of what every sandbox needs, and of what stands in for files that the checkout lacks."""
        for part in self.profile.common:
            archives.inside(self.path, part)
        parts = [*self.profile.common]
        ways = [path for part in parts for path in archives.packages_above(self.path, part)]
        aliases = {
            PurePosixPath(name): source
            for name, source in self.profile.stand_ins
            if not (self.path / name).exists() and archives.inside(self.path, source).is_file()
        }
        members = [*ways, *(path for part in parts for path in archives.walk(self.path, part))]
        archives.write(into, self.path, members, aliases)

    def task_archive(self, task: Task, into: Path, *, sealed: bool) -> None:
        """Tar of the task's folder and of the packages on the way to it, no other task's; added to `into`.

        `sealed` false leaves out what only grading needs: right for a task without a preprocess, which may
        read those files or write to them.
        """
        archives.inside(self.path, task.folder)
        without = () if sealed else self.profile.grading
        members = archives.walk(self.path, task.folder, without)
        archives.write(into, self.path, [*archives.packages_above(self.path, task.folder), *members], {})

    def sealed(
        self, task: Task, *, root: PurePosixPath, values: Mapping[str, str], made: Collection[str] = ()
    ) -> tuple[str, ...]:
        """Names in the task's folder that must go before an agent can reach it: all that no server needs,
        of what the checkout has there and of what was `made` since.

        What a server needs is what the profile keeps, and what one of the `values` points to.
        """
        folder = root / task.folder
        needed = set(self.profile.kept)
        for value in values.values():
            place = PurePosixPath(value) if value.startswith("/") else root / value
            if place.is_relative_to(folder) and place != folder:
                needed.add(place.relative_to(folder).parts[0])
        return tuple(sorted({*self.sealed_names, *task.names, *made} - (needed - {*self.sealed_names})))

    def withheld(
        self, task: Task, *, root: PurePosixPath, values: Mapping[str, str]
    ) -> Mapping[PurePosixPath, PurePosixPath | None]:
        """The profile's secrets that this task's agent must not find, with what stands in for each.

        Local tools read the suite's token files by themselves: where one needs a credential, these stay.
        """
        needed = {PurePosixPath(name) for name in task.needs.credentials}
        if any(self.resources.wants_values("local_tools", name) for name in task.needs.local_tools):
            needed |= {PurePosixPath(file) for file, _ in SOURCES.values()}
        pointed = [PurePosixPath(root, value) for value in values.values()]
        stand_ins = dict(self.profile.stand_ins)
        return {
            secret: stand_ins.get(str(secret))
            for secret in self.profile.secrets
            if secret not in needed and not any(path.is_relative_to(root / secret) for path in pointed)
        }

    def wanted_values(self, task: Task) -> frozenset[str]:
        """The names `config.x` and `token.x` that the yaml of the task's servers use."""
        return self.resources.wanted_values(task.needs.servers)

    def values_command(self, task: Task) -> list[str]:
        """What the suite's own Python runs, in `root` and with a channel, to compute the wanted values.

        It must run after preprocess, which may write what a task's token file reads, and before sealing,
        since some read it from the groundtruth.
        """
        return [
            *self.profile.python,
            "-c",
            VALUES_SCRIPT,
            str(task.folder),
            *sorted(self.wanted_values(task)),
        ]

    def parse_values(self, channel: str) -> dict[str, str]:
        """What `values_command` wrote to its channel. Raises SuiteError where that is nothing of the kind."""
        try:
            values = json.loads(channel)
        except ValueError:
            values = None
        if not isinstance(values, dict) or not all(
            isinstance(v, str) for v in cast("JsonObject", values).values()
        ):
            raise SuiteError(f"suite {self.name}: its token files gave no values")
        return cast("dict[str, str]", values)

    def server_specs(self, task: Task, *, root: PurePosixPath, values: Mapping[str, str]) -> list[JsonObject]:
        """The SERVER objects of the wire's `start`, in the task's order.

        Raises SuiteError for a server that the checkout does not describe, or describes wrongly.
        """
        known = {**values, **self._paths(root, task.folder)}
        return [self._server(name).spec(self.profile, root=root, values=known) for name in task.needs.servers]

    def probe(self, *, root: PurePosixPath) -> list[str]:
        """What tells, run where the suite's servers would run, which of their programs are not there."""
        paths = self._paths(root, PurePosixPath(FOLDER))
        specs = [
            server.spec(self.profile, root=root, values={**dict.fromkeys(server.templates, ""), **paths})
            for server in self.servers.values()
        ]
        own = (self.profile.local_servers, self.profile.local_binaries)
        return probe_command(specs, root=root, own=[PurePosixPath(path) for path in own])

    def server_folders(self, task: Task) -> list[PurePosixPath]:
        """The folders that the task's servers want to find, relative to the workspace."""
        folders = dict(self.profile.folders)
        return [folders[name] for name in task.needs.servers if name in folders]

    def _paths(self, root: PurePosixPath, folder: PurePosixPath) -> dict[str, str]:
        """Names of templates that stand for places in a sandbox."""
        paths = {
            "agent_workspace": self.profile.workspace,
            "local_servers_paths": self.profile.local_servers,
            "local_binary_paths": self.profile.local_binaries,
            "task_dir": folder,
        }
        return {name: str(root / path) for name, path in paths.items()}

    def _server(self, name: str) -> ServerConfig:
        if name in self.servers:
            return self.servers[name]
        if name in self.resources.server_errors:
            raise self.resources.server_errors[name]
        raise SuiteError(f"no file in {self.path / SERVERS} describes a server {name!r}")
