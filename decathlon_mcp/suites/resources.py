"""A suite's servers, settings and token files, and what each task needs of them and from outside.

The token files `configs/global_configs.py` and `configs/token_key_session.py` are Python modules:
`all_token_key_session = Dict(key="...")`. The real values are computed in the sandbox, by the payload
`token_values`, because only there are the suite's own Python and the files that preprocess wrote and token
files read. They are read here, without running them, to tell which values are not filled in.
"""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path, PurePosixPath
from typing import TypeAlias, cast

from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.documents import read_bytes, read_text
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.suites.servers import ServerConfig
from decathlon_mcp.suites.suite_file import (
    Account,
    Credentials,
    ExternalNeeds,
    ServerNeeds,
    Service,
    SuiteFile,
    TaskSettings,
    settings_for,
)
from decathlon_mcp.suites.tasks import TOKEN_FILE, Needs, Task
from decathlon_mcp.types import as_object

SOURCES = {
    "config": ("configs/global_configs.py", "global_configs"),
    "token": ("configs/token_key_session.py", "all_token_key_session"),
}
"""The token files of a suite and the variable in each, by the prefix of their names in templates."""

TokenValues: TypeAlias = Mapping[str, str | None]
"""Values by name (`token.x`, `config.x`); None where the file computes the value."""

_TOKEN_PREFIXES = tuple(f"{prefix}." for prefix in SOURCES)
KEY_SEPARATOR = "#"
"""Between a file and a key in it, in the name of a credential."""


@dataclass(frozen=True)
class SuiteResources:
    """What a checkout has to run its tasks with."""

    checkout: Path
    profile: SuiteProfile
    settings: SuiteFile
    servers: Mapping[str, ServerConfig]
    server_errors: Mapping[str, SuiteError]
    """Servers whose files cannot be read."""

    @cached_property
    def token_values(self) -> TokenValues:
        """The values in the suite's own token files."""
        return {
            f"{prefix}.{key}": value
            for prefix, (file, variable) in SOURCES.items()
            for key, value in read_tokens(self._token_file(file), variable).items()
        }

    def _token_file(self, file: str) -> Path:
        """A file of `SOURCES` in the checkout, or the profile's replacement of a missing file."""
        path = self.checkout / file
        return path if path.exists() else self.checkout / self.profile.stand_ins.get(file, file)

    def token_values_for(self, task: Task) -> TokenValues:
        """The suite's token values, overridden by the task's own token file."""
        return {**self.token_values, **self.own_token_values(task)}

    def own_token_values(self, task: Task) -> TokenValues:
        """The values in a task's own token file; empty if it has none."""
        if not task.has_token_file:
            return {}
        values = read_tokens(self.checkout / task.folder / TOKEN_FILE, SOURCES["token"][1])
        return {f"token.{key}": value for key, value in values.items()}

    def token_names(self, servers: Iterable[str]) -> frozenset[str]:
        """The names `config.x` and `token.x` that the YAML files of these servers use."""
        names = frozenset[str]().union(*(self.servers[s].templates for s in servers if s in self.servers))
        return frozenset(name for name in names if name.startswith(_TOKEN_PREFIXES))

    def needs_token(self, local_tool: str) -> bool:
        """Whether suite.yaml lists a value of a token file among the needs of a local tool."""
        credentials = self.local_tool_needs(local_tool).credentials
        return any(credential.startswith(_TOKEN_PREFIXES) for credential in credentials)

    def needs(self, task: Task, settings: TaskSettings) -> Needs:
        """The needs of a task as its folder describes it, with these settings.

        Template values that are not filled in count as credentials, too.
        """
        absent = {*self.profile.absent_servers} - {*self.servers, *self.server_errors}
        servers = tuple(name for name in task.needs.servers if name not in absent)
        local_tools = task.needs.local_tools
        external = self._all_external_needs(servers, local_tools)
        services = settings.services
        if services is None:
            services = _unique(needs.services for needs in external)
        # A service without ports can only be reached over a network of the sandbox's own.
        network = settings.network
        if network is None:
            without_ports = any(not self.service(name).ports for name in services)
            network = without_ports or any(needs.network for needs in external)
        listed = [*_unique(needs.credentials for needs in external), *(settings.credentials or ())]
        values = [self.token_values, self.own_token_values(task)]
        unfilled = [
            name
            for name in sorted(self.token_names(servers))
            if not any(is_filled_in(name, each, self.profile.placeholders) for each in values)
        ]
        unfilled += self._unfilled_keys(servers, task)
        return Needs(
            servers=servers,
            local_tools=local_tools,
            network=network,
            credentials=tuple(
                name for name in dict.fromkeys([*listed, *unfilled]) if name not in settings.optional
            ),
            services=services,
        )

    def service(self, name: str) -> Service:
        """The service of that name, or the private service in its place; defaults for an unknown name."""
        return self.settings.services.get(name, Service()).in_use

    def accounts(self, task: Task) -> dict[str, Account]:
        """The accounts that a task works on, by name."""
        return {
            name: account
            for name, account in self.settings.accounts.items()
            if account.is_of(task.id, task.needs.servers)
            and (account.service is None or self.service(account.service).image is None)
        }

    def credentials(self, task: Task, slots: Mapping[str, str]) -> Credentials:
        """The credentials that a task's sandboxes get. `slots`: the slot it holds, by account.

        Source paths of files are absolute.
        """
        sources = self._all_external_needs(task.needs.servers, task.needs.local_tools)
        sets = [self.settings.accounts[name].credentials(slot) for name, slot in slots.items()]
        files = {target: path for item in (*sources, *sets) for target, path in item.files.items()}
        return Credentials(
            values={name: value for item in sets for name, value in item.values.items()},
            files={target: str(self.checkout / path) for target, path in files.items()},
        )

    def credential_archives(self, task: Task, slots: Mapping[str, str]) -> list[tuple[PurePosixPath, bytes]]:
        """Tar archives of the credentials that a task's sandboxes get, each with the folder to unpack it in.

        The folder is the suite's root (an empty path) or `/`. `slots`: the slot it holds, by account. Blocks.
        Raises SuiteError for a file that cannot be read.
        """
        credentials = self.credentials(task, slots)
        contents = {PurePosixPath(): dict(self._token_files(credentials)), PurePosixPath("/"): {}}
        for target, path in credentials.files.items():
            goal = PurePosixPath(target)
            top = PurePosixPath("/" if goal.is_absolute() else "")
            contents[top] |= _contents(goal.relative_to(top), Path(path))
        return [(top, pack_files(files, mode=0o600)) for top, files in contents.items() if files]

    def _token_files(self, credentials: Credentials) -> Iterator[tuple[str, bytes]]:
        """The suite's token files with the credentials' values appended, for each file that gets any."""
        for prefix, (file, variable) in SOURCES.items():
            values = {key: value for key, value in credentials.values.items() if key.startswith(f"{prefix}.")}
            if values:
                path = self._token_file(file)
                lines = [
                    f"{variable}[{key.partition('.')[2]!r}] = {value!r}\n" for key, value in values.items()
                ]
                yield file, b"".join([_read(path), _HEADING.encode(), *map(str.encode, lines)])

    def service_archive(self, service: Service) -> bytes:
        """A tar archive of the files in a service's working folder. Blocks. Raises SuiteError."""
        files: dict[str, bytes] = {}
        for name, path in service.files.items():
            files |= _contents(PurePosixPath(name), self.checkout / path)
        return pack_files(files, mode=0o600)

    def provided_credentials(self, task: Task) -> set[str]:
        """The credentials that a task gets from suite.yaml, whichever slots it holds."""
        provided: set[str] = set()
        for account in self.accounts(task).values():
            slots = [account.credentials(slot) for slot in account.slot_names]
            if slots:
                first, *others = ({*slot.values, *slot.files} for slot in slots)
                provided |= first.intersection(*others)
        return provided | {*self.credentials(task, {}).files}

    def credential_files(self, task: Task) -> dict[str, Path]:
        """Every file that a task may get with any of its slots: path in the sandbox to path on this host."""
        sets = [
            self.credentials(task, {name: slot})
            for name, account in self.accounts(task).items()
            for slot in account.slot_names
        ]
        sets.append(self.credentials(task, {}))
        return {target: Path(path) for credentials in sets for target, path in credentials.files.items()}

    def has_credential(self, credential: str, values: TokenValues) -> bool:
        """Whether a token has a value among `values`, or a credential file exists in the checkout."""
        if credential.startswith(_TOKEN_PREFIXES):
            return is_filled_in(credential, values, self.profile.placeholders)
        file, _, key = credential.partition(KEY_SEPARATOR)
        if key:
            return self._has_key(file, key)
        return (self.checkout / file).exists()

    # Matching patterns and validating the result takes most of the time of loading a suite of 500 tasks.
    @cached_property
    def server_needs(self) -> Callable[[str], ServerNeeds]:
        """Returns what suite.yaml says of a server."""
        return cache(partial(settings_for, self.settings.servers, model=ServerNeeds))

    @cached_property
    def local_tool_needs(self) -> Callable[[str], ExternalNeeds]:
        """Returns what suite.yaml says of a local tool."""
        return cache(partial(settings_for, self.settings.local_tools, model=ExternalNeeds))

    def _all_external_needs(self, servers: Iterable[str], local_tools: Iterable[str]) -> list[ExternalNeeds]:
        return [*map(self.server_needs, servers), *map(self.local_tool_needs, local_tools)]

    def _unfilled_keys(self, servers: Iterable[str], task: Task) -> list[str]:
        """`PATH#KEY` for each key that a server needs in a file of the task's folder, if it has no value."""
        credentials = [
            f"{task.folder / file}{KEY_SEPARATOR}{key}"
            for name in servers
            for file, keys in self.server_needs(name).task_files.items()
            if file in task.names
            for key in keys
        ]
        return [name for name in credentials if not self.has_credential(name, {})]

    def _has_key(self, file: str, key: str) -> bool:
        """Whether a key of a JSON file has a value. Of a list, the first entry counts, as for emails-mcp."""
        try:
            content = json.loads(read_text(self.checkout / file))
        except (SuiteError, ValueError, RecursionError):
            return False
        entries = cast("list[object]", content) if isinstance(content, list) else [content]
        entry = as_object(entries[0]) if entries else None
        return entry is not None and bool(entry.get(key))


def _unique(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))


_HEADING = "\n# The values of this episode's account (suite.yaml):\n"


def _contents(goal: PurePosixPath, path: Path) -> dict[str, bytes]:
    """The content of a file, or of all files below a folder, by their paths at or below `goal`."""
    # Symbolic links are followed: the operator made these folders, not a checkout from elsewhere.
    places = [path]
    if path.is_dir():
        places = [
            Path(folder, name) for folder, _, names in os.walk(path, followlinks=True) for name in names
        ]
    return {str(goal / place.relative_to(path)): _read(place) for place in sorted(places)}


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SuiteError(f"{path} cannot be read: {error.strerror}", file=str(path)) from None


def read_tokens(path: Path, variable: str) -> TokenValues:
    """The entries of `variable = Dict(key=value, ...)` or `variable = {...}`, without values None.

    Empty where the file does not exist or has another form.
    """
    values: dict[str, str | None] = {}
    try:
        for statement in ast.parse(read_bytes(path)).body:
            if isinstance(statement, ast.Assign) and any(
                isinstance(target, ast.Name) and target.id == variable for target in statement.targets
            ):
                values.update(_entries(statement.value))
    except (SuiteError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return values


def is_filled_in(name: str, values: TokenValues, placeholders: Collection[str]) -> bool:
    """Whether a name has a value other than a placeholder. A computed value counts as filled in."""
    return name in values and values[name] not in placeholders


def _entries(value: ast.expr) -> dict[str, str | None]:
    pairs: list[tuple[str, ast.expr]] = []
    if isinstance(value, ast.Call):
        pairs = [(keyword.arg, keyword.value) for keyword in value.keywords if keyword.arg]
    elif isinstance(value, ast.Dict):
        pairs = [
            (key.value, entry)
            for key, entry in zip(value.keys, value.values, strict=True)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
        ]
    return {key: text for key, entry in pairs for text in _constant(entry)}


def _constant(value: ast.expr) -> tuple[str | None, ...]:
    """The text of a constant, nothing for the constant None, and None for a computed value."""
    # The sandbox does not have the operator's environment: `os.environ.get("X", "XX")` is its default.
    if isinstance(value, ast.Call) and ast.unparse(value.func) == "os.environ.get" and len(value.args) == 2:
        return _constant(value.args[1])
    if isinstance(value, ast.Constant):
        return () if value.value is None else (str(value.value),)
    return (None,)
