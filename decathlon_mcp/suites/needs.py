"""What a task needs, from its own words and the suite's tables, and what of it is not there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.dialect import Dialect
from decathlon_mcp.suites.servers import FOLDER, ServerConfig
from decathlon_mcp.suites.suitefile import FILE, Service, SuiteFile, TaskSettings, Wants, settings_for
from decathlon_mcp.suites.tasks import Folder, Needs, Task
from decathlon_mcp.suites.tokens import TASK_FILE, Reading, filled, read_checkout, read_task

_VALUES = ("token.", "config.")


@dataclass(frozen=True)
class Means:
    """What a checkout has to run its tasks with."""

    checkout: Path
    dialect: Dialect
    settings: SuiteFile
    servers: Mapping[str, ServerConfig]
    server_errors: Mapping[str, SuiteError]
    _wants: dict[tuple[str, str], Wants] = field(default_factory=dict, repr=False)

    @cached_property
    def tokens(self) -> Reading:
        """The suite-wide names."""
        return read_checkout(self.checkout, self.dialect)

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
        credentials = [*_ordered(want.credentials for want in wants), *(said.credentials or ())]
        values = self.wanted_values(folder.said.servers)
        unfilled = [name for name in sorted(values) if not self._there(name, folder)] if values else []
        network = bool(services) or any(want.network for want in wants)
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

    def missing(self, task: Task) -> list[str]:
        """Why a task cannot run: what is not there and what to do about it, a sentence each."""
        sentences = [error.message for error in task.errors]
        unknown = [s for s in task.needs.servers if s not in self.servers and s not in self.server_errors]
        sentences += [
            f"needs the MCP server {name!r}: add a file that describes it to {self.checkout / FOLDER}"
            for name in unknown
        ]
        code = dict(self.dialect.local_code)
        sentences += [
            f"needs the local tool {name!r}, whose code the suite does not name: say where it is under "
            f"`local_code` in {self.checkout / FILE}"
            for name in task.needs.local_tools
            if name not in code
        ]
        own: Reading = read_task(self.checkout / task.folder) if task.has_token_file else {}
        sentences += [
            self._cure(name)
            for name in task.needs.credentials
            if not self._filled(name, {**self.tokens, **own})
        ]
        services = self.settings.services
        sentences += [
            _unavailable(name, services.get(name, Service()))
            for name in task.needs.services
            if not services.get(name, Service()).available
        ]
        return sentences

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
        if filled(name, self.tokens, self.dialect.placeholders):
            return True
        own: Reading = read_task(self.checkout / folder.path) if TASK_FILE in folder.names else {}
        return filled(name, own, self.dialect.placeholders)

    def _filled(self, credential: str, reading: Reading) -> bool:
        if credential.startswith(_VALUES):
            return filled(credential, reading, self.dialect.placeholders)
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
