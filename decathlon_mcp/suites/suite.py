"""A suite: a checkout in Toolathlon's layout, and what an episode needs to start one of its tasks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.payloads import source
from decathlon_mcp.suites import checkout as archives
from decathlon_mcp.suites.checkout import revision
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.prompts import Prompt, read_prompt
from decathlon_mcp.suites.resources import SOURCES, SuiteResources
from decathlon_mcp.suites.servers import FOLDER as SERVERS
from decathlon_mcp.suites.servers import ServerConfig
from decathlon_mcp.suites.suite_file import FILE, Service
from decathlon_mcp.suites.tasks import FOLDER, Task
from decathlon_mcp.types import JsonObject, Language, Names

SINGLE_SLOT = ("",)
"""The slots of a resource that one task uses at a time."""
_VALUES = TypeAdapter(dict[str, str])


class Release(NamedTuple):
    """Which release of its kind a checkout has. `description`: for people."""

    name: str
    description: str


@dataclass(frozen=True, slots=True)
class SharedResource:
    """An account or a conflict group. Each running task that uses it holds one of its slots.

    `key` identifies it, `name` is for messages; `account` is the name of its account in the suite's settings.
    """

    key: str
    name: str
    slots: tuple[str, ...] = SINGLE_SLOT
    account: str | None = None


@dataclass(frozen=True)
class Suite:
    """A loaded suite. Prompts and archives are read from the checkout when they are requested."""

    name: str
    path: Path
    profile: SuiteProfile
    tasks: Mapping[str, Task] = field(repr=False)
    resources: SuiteResources = field(repr=False)
    language: Language
    _shared: Mapping[str, tuple[SharedResource, ...]] = field(repr=False)

    @property
    def servers(self) -> Mapping[str, ServerConfig]:
        """The servers whose files can be read, by name."""
        return self.resources.servers

    @cached_property
    def revision(self) -> str:
        """The revision of the files of all tasks; computed once. A verdict has `revision_of` its task."""
        return revision(self.path, [*self._common, PurePosixPath(FOLDER)], self.profile.secrets)

    def revision_of(self, task: Task) -> str:
        """The revision of the files that an episode of this task uses, as they are now. Blocks: runs git."""
        return revision(self.path, [*self._common, task.folder], self.profile.secrets)

    @cached_property
    def release(self) -> Release | None:
        """The release of the checkout, None for a kind of suites without any; computed once. Blocks."""
        releases = {name: part for plugin in plugins() for name, part in plugin.releases.items()}
        part = releases.get(self.profile.name)
        return None if part is None else load(part)(self.path)

    @property
    def version_text(self) -> str:
        """The revision and the release, for people. Blocks: runs git."""
        return self.revision if self.release is None else f"{self.revision}; {self.release.description}"

    def common_digest(self) -> str:
        """A digest of the files that every task uses, as they are now. Blocks."""
        return archives.digest(self.path, self._common, self.profile.secrets)

    @property
    def _common(self) -> list[PurePosixPath]:
        return [*self.profile.common, PurePosixPath(FILE)]

    def task(self, task_id: str) -> Task:
        """Raises SuiteError if the task has errors, KeyError if there is no such task."""
        task = self.tasks[task_id]
        if task.errors:
            raise task.errors[0]
        return task

    def shared_resources(self, task_id: str) -> tuple[SharedResource, ...]:
        """The resources of which a task holds one slot each while it runs and is graded."""
        return self._shared.get(task_id, ())

    def services(self, task: Task) -> dict[str, Service]:
        """The services that a task needs, by name, as they are used here."""
        return {name: self.resources.service(name) for name in task.needs.services}

    @cached_property
    def service_images(self) -> frozenset[str]:
        """The images of the services that tasks have for themselves."""
        services = (service for task in self.tasks.values() for service in self.services(task).values())
        return frozenset(service.image for service in services if service.image is not None)

    def launch_time(self, when: datetime) -> str:
        """A time in the format of the prompt and of the evaluator's `--launch_time`."""
        return when.strftime(self.profile.launch_time_format)

    def preprocess_launch_time(self, when: datetime) -> str:
        """A time in the format of preprocess's `--launch_time`."""
        return when.strftime(self.profile.preprocess_launch_time_format or self.profile.launch_time_format)

    def task_dir(self, task: Task) -> str:
        """The task's `task_dir` in Toolathlon's terms."""
        return str(task.folder.relative_to(self.profile.task_base))

    def prompt(self, task: Task, *, root: PurePosixPath, launch_time: datetime, names: Names) -> Prompt:
        """The task's prompt. Raises SuiteError if its files cannot be read."""
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
        """Write a tar archive of the files that every sandbox needs.

        Files that the checkout lacks are replaced as the profile's `stand_ins` say, and its existing
        `overlays` are added.
        """
        parts = self.profile.common
        for part in parts:
            archives.inside(self.path, part)
        packages = [path for part in parts for path in archives.packages_above(self.path, part)]
        aliases = {
            PurePosixPath(name): source
            for name, source in self.profile.stand_ins.items()
            if not (self.path / name).exists() and archives.inside(self.path, source).is_file()
        }
        aliases |= {
            PurePosixPath(name): source
            for name, source in self.profile.overlays.items()
            if archives.inside(self.path, source).is_file()
        }
        members = [*packages, *(path for part in parts for path in archives.walk(self.path, part))]
        archives.write(into, self.path, members, aliases)

    def task_archive(self, task: Task, into: Path, *, sealed: bool) -> None:
        """Write a tar archive of a task's folder, with the `__init__.py` files above it.

        `sealed` False leaves out the profile's `grading` entries. A task whose preprocess or token file may
        read or write them needs them.
        """
        archives.inside(self.path, task.folder)
        without = () if sealed else self.profile.grading
        members = archives.walk(self.path, task.folder, without)
        archives.write(into, self.path, [*archives.packages_above(self.path, task.folder), *members], {})

    def names_to_seal(
        self, task: Task, *, root: PurePosixPath, values: Mapping[str, str], created: Collection[str] = ()
    ) -> tuple[str, ...]:
        """The entries of the task's folder to remove before an agent can reach it.

        These are all entries of the checkout and all `created` by preprocess, except for `kept` of the
        profile and of the task, and entries that one of the token `values` points to. The profile's `sealed`
        are always among them.
        """
        folder = root / task.folder
        needed = {*self.profile.kept, *task.kept}
        for value in values.values():
            place = PurePosixPath(value) if value.startswith("/") else root / value
            if place.is_relative_to(folder) and place != folder:
                needed.add(place.relative_to(folder).parts[0])
        sealed = {*self.profile.sealed}
        return tuple(sorted({*sealed, *task.names, *created} - (needed - sealed)))

    def secrets_to_remove(
        self, task: Task, *, root: PurePosixPath, values: Mapping[str, str]
    ) -> Mapping[PurePosixPath, PurePosixPath | None]:
        """The profile's secrets that the task does not need, each with the file that replaces it, if any."""
        needed = {PurePosixPath(name) for name in task.needs.credentials}
        # Local tools import the suite's token files themselves, so these stay if one of them needs a token.
        if any(map(self.resources.needs_token, task.needs.local_tools)):
            needed |= {PurePosixPath(file) for file, _ in SOURCES.values()}
        targets = [PurePosixPath(root, value) for value in values.values()]
        return {
            secret: self.profile.stand_ins.get(str(secret))
            for secret in self.profile.secrets
            if secret not in needed and not any(path.is_relative_to(root / secret) for path in targets)
        }

    def token_names(self, task: Task) -> frozenset[str]:
        """The names `config.x` and `token.x` that the YAML files of the task's servers use."""
        return self.resources.token_names(task.needs.servers)

    def values_command(self, task: Task) -> list[str]:
        """The command that computes the token values; it runs in `root` and writes to a channel.

        It must run after preprocess, which may write files that a task's token file reads, and before the
        sealing, since some token files read the groundtruth.
        """
        names = sorted(self.token_names(task))
        return [*self.profile.python, "-c", source("token_values"), str(task.folder), *names]

    def parse_values(self, channel: str) -> dict[str, str]:
        """The token values, from the channel of `values_command`. Raises SuiteError for any other content."""
        try:
            return _VALUES.validate_json(channel)
        except ValidationError:
            raise SuiteError(f"suite {self.name}: its token files gave no values") from None

    def server_specs(self, task: Task, *, root: PurePosixPath, values: Mapping[str, str]) -> list[JsonObject]:
        """The SERVER objects for the driver's `start`, in the task's order.

        Raises SuiteError for a server whose file is missing in the checkout, or has errors.
        """
        for name in task.needs.servers:
            if name not in self.servers:
                no_file = SuiteError(f"no file in {self.path / SERVERS} describes a server {name!r}")
                raise self.resources.server_errors.get(name, no_file)
        known = {**values, **self._paths(root, task.folder)}
        return [self.servers[name].spec(self.profile, root=root, values=known) for name in task.needs.servers]

    def all_server_specs(self, *, root: PurePosixPath) -> list[JsonObject]:
        """The SERVER objects of every server of the suite, with token values left empty."""
        paths = self._paths(root, PurePosixPath(FOLDER))
        return [
            server.spec(self.profile, root=root, values={**dict.fromkeys(server.templates, ""), **paths})
            for server in self.servers.values()
        ]

    def server_folders(self, task: Task) -> list[PurePosixPath]:
        """The folders that must exist when the task's servers start, relative to the workspace."""
        folders = self.profile.folders
        return [folders[name] for name in task.needs.servers if name in folders]

    def _paths(self, root: PurePosixPath, task_folder: PurePosixPath) -> dict[str, str]:
        """The values of the template names that are paths in a sandbox."""
        paths = {
            "agent_workspace": self.profile.workspace,
            "local_servers_paths": self.profile.local_servers,
            "local_binary_paths": self.profile.local_binaries,
            "task_dir": task_folder,
        }
        return {name: str(root / path) for name, path in paths.items()}
