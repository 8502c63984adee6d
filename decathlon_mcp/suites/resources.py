"""What a task needs, from its own words and the suite's tables, and what of it is not there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.requirements import MissingRequirement, Pages
from decathlon_mcp.suites.servers import FOLDER, ServerConfig
from decathlon_mcp.suites.suite_file import (
    FILE,
    Account,
    Credentials,
    Service,
    SuiteFile,
    TaskSettings,
    Wants,
    settings_for,
)
from decathlon_mcp.suites.tasks import Folder, Needs, Task
from decathlon_mcp.suites.tokens import TASK_FILE, Reading, filled, read_checkout, read_task

_VALUES = ("token.", "config.")


@dataclass(frozen=True)
class SuiteResources:
    """What a checkout has to run its tasks with."""

    checkout: Path
    profile: SuiteProfile
    settings: SuiteFile
    servers: Mapping[str, ServerConfig]
    server_errors: Mapping[str, SuiteError]
    _wants: dict[tuple[str, str], Wants] = field(default_factory=dict, repr=False)

    @cached_property
    def tokens(self) -> Reading:
        """The suite-wide names."""
        return read_checkout(self.checkout, self.profile)

    def wanted_values(self, servers: Iterable[str]) -> frozenset[str]:
        """The names `config.x` and `token.x` that these servers' yaml use."""
        names = frozenset[str]().union(*(self.servers[s].templates for s in servers if s in self.servers))
        return frozenset(name for name in names if name.startswith(_VALUES))

    def wants_values(self, table: Literal["servers", "local_tools"], name: str) -> bool:
        """Is a server, or a local tool, said to need a value of a token file?"""
        return any(credential.startswith(_VALUES) for credential in self._want(table, name).credentials)

    def needs(self, folder: Folder, said: TaskSettings) -> Needs:
        """A task's needs; a template's value that nobody has filled in is a credential too."""
        wants = [self._want("servers", name) for name in folder.said.servers]
        wants += [self._want("local_tools", name) for name in folder.said.local_tools]
        services = said.services if said.services is not None else _ordered(w.services for w in wants)
        by_network = [name for name in services if not self.service(name).ports]
        credentials = [*_ordered(want.credentials for want in wants), *(said.credentials or ())]
        values = self.wanted_values(folder.said.servers)
        unfilled = [name for name in sorted(values) if not self._there(name, folder)] if values else []
        network = bool(by_network) or any(want.network for want in wants)
        return Needs(
            servers=folder.said.servers,
            local_tools=folder.said.local_tools,
            network=network if said.network is None else said.network,
            credentials=tuple(dict.fromkeys([*credentials, *unfilled])),
            services=services,
        )

    def errors(self, servers: Iterable[str]) -> tuple[SuiteError, ...]:
        """What is broken about the servers that a task needs."""
        return tuple(self.server_errors[name] for name in servers if name in self.server_errors)

    def lacks(self, task: Task) -> list[MissingRequirement]:
        """Why a task cannot run: what is not there and what to do about it."""
        return [
            *(self.pages.lack("broken", error.data.get("file", ""), error.message) for error in task.errors),
            *self._without_code(task),
            *self._without_credentials(task),
            *(
                self.pages.lack(
                    "service", name, _unavailable(name, self.service(name)), called=f"service.{name}"
                )
                for name in task.needs.services
                if not self.service(name).available
            ),
        ]

    @property
    def pages(self) -> Pages:
        """Where to read on."""
        return Pages(self.checkout, self.settings.pages)

    def _without_code(self, task: Task) -> Iterator[MissingRequirement]:
        """Servers that no file describes, local tools that the suite has no code of."""
        for name in task.needs.servers:
            if name not in self.servers and name not in self.server_errors:
                said = (
                    f"needs the MCP server {name!r}: add a file that describes it to {self.checkout / FOLDER}"
                )
                yield self.pages.lack("server", name, said, called=f"server.{name}")
        code = dict(self.profile.local_code)
        for name in task.needs.local_tools:
            if name not in code:
                said = f"needs the local tool {name!r}, whose code the suite does not name: say where it is"
                yield self.pages.lack(
                    "local tool", name, f"{said} under `local_code` in {self.checkout / FILE}"
                )

    def _without_credentials(self, task: Task) -> Iterator[MissingRequirement]:
        """Values that nobody has filled in, and files that are not there."""
        own: Reading = read_task(self.checkout / task.folder) if task.has_token_file else {}
        given = self._given(task)
        for name in task.needs.credentials:
            if name not in given and not self._filled(name, {**self.tokens, **own}):
                short = name.partition(".")[2] if name.startswith(_VALUES) else name
                yield self.pages.lack("credential", short, self._cure(name), called=name)
        for goal, place in self._places(task).items():
            if not place.exists():
                said = f"needs the file {place} (which goes to {goal} in its sandbox), which is not there"
                yield self.pages.lack("credential", goal, said)

    def service(self, name: str) -> Service:
        """What is said of a service; nothing, of one that is not known."""
        return self.settings.services.get(name, Service())

    def accounts(self, task: Task) -> dict[str, Account]:
        """Those that a task works on, by their names."""
        accounts = self.settings.accounts.items()
        return {name: account for name, account in accounts if account.is_of(task.id, task.needs.servers)}

    def credentials(self, task: Task, slots: Mapping[str, str]) -> Credentials:
        """What is laid over a task's sandboxes where it has these slots, by the accounts' names.

        Its files come from where they are on this machine.
        """
        wants = [self._want("servers", name) for name in task.needs.servers]
        wants += [self._want("local_tools", name) for name in task.needs.local_tools]
        sets = [self.settings.accounts[name].credentials(slot) for name, slot in slots.items()]
        files = {goal: path for each in (*wants, *sets) for goal, path in each.files.items()}
        return Credentials(
            values={name: value for each in sets for name, value in each.values.items()},
            files={goal: str(self.checkout / path) for goal, path in files.items()},
        )

    def _given(self, task: Task) -> set[str]:
        """The credentials that a task gets whichever slots it has."""
        given: set[str] = set()
        for account in self.accounts(task).values():
            slots = [account.credentials(slot) for slot in account.slot_names]
            if slots:
                first, *others = ({*slot.values, *slot.files} for slot in slots)
                given |= first.intersection(*others)
        return given | {*self.credentials(task, {}).files}

    def _places(self, task: Task) -> dict[str, Path]:
        """The files that a task may get, where they go and where they are."""
        accounts = self.accounts(task).items()
        every = [
            self.credentials(task, {name: slot}).files
            for name, account in accounts
            for slot in account.slot_names
        ]
        files = [*every, self.credentials(task, {}).files]
        return {goal: Path(path) for each in files for goal, path in each.items()}

    def _want(self, table: str, name: str) -> Wants:
        if (known := self._wants.get((table, name))) is not None:
            return known
        said = settings_for(
            self.settings.servers if table == "servers" else self.settings.local_tools, name, Wants
        )
        server = self.servers.get(name) if table == "servers" else None
        if said.network is None and server is not None:
            said = said.model_copy(update={"network": server.remote})
        self._wants[table, name] = said
        return said

    def _there(self, name: str, folder: Folder) -> bool:
        if filled(name, self.tokens, self.profile.placeholders):
            return True
        own: Reading = read_task(self.checkout / folder.path) if TASK_FILE in folder.names else {}
        return filled(name, own, self.profile.placeholders)

    def _filled(self, credential: str, reading: Reading) -> bool:
        if credential.startswith(_VALUES):
            return filled(credential, reading, self.profile.placeholders)
        return (self.checkout / credential).exists()

    def _cure(self, credential: str) -> str:
        prefix, dot, name = credential.partition(".")
        files = {"token": "configs/token_key_session.py", "config": "configs/global_configs.py"}
        if dot and prefix in files:
            return f"needs {name}, which nobody has filled in: set it in {self.checkout / files[prefix]}"
        return f"needs the file {credential}, which is not there: put it at {self.checkout / credential}"


def _ordered(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))


def _unavailable(name: str, service: Service) -> str:
    ports = f" (port{'s' if len(service.ports) > 1 else ''} {', '.join(map(str, service.ports))})"
    cure = f"{service.cure}, then " if service.cure else ""
    return (
        f"needs the service {name}{ports if service.ports else ''}, which is not said to be there: {cure}"
        f"say `services: {{{name}: {{available: true}}}}` in suite.yaml"
    )
