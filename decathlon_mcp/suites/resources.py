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
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TypeAlias, cast

from decathlon_mcp.archives.writing import pack_files
from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.documents import read_text
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
from decathlon_mcp.suites.tasks import Needs, Task, TaskFolder
from decathlon_mcp.types import as_object

SOURCES = {
    "config": ("configs/global_configs.py", "global_configs"),
    "token": ("configs/token_key_session.py", "all_token_key_session"),
}
"""The token files of a suite and the variable in each, by the prefix of their names in templates."""
TASK_FILE = "token_key_session.py"
"""A task's own token file, in its folder."""

TokenValues: TypeAlias = Mapping[str, str | None]
"""Values by name (`token.x`, `config.x`); None where the file computes the value."""

_TOKEN_PREFIXES = tuple(f"{prefix}." for prefix in SOURCES)
KEY_SEPARATOR = "#"
"""Between a file and a key in it, in the name of a credential."""


@dataclass(frozen=True)
class SuiteResources:
    """What a checkout has to run its tasks with. `server_errors`: servers whose files cannot be read."""

    checkout: Path
    profile: SuiteProfile
    settings: SuiteFile
    servers: Mapping[str, ServerConfig]
    server_errors: Mapping[str, SuiteError]
    # Matching patterns and validating the result takes most of the time of loading a suite of 500 tasks.
    _server_needs: dict[str, ServerNeeds] = field(default_factory=dict, repr=False)
    _local_tool_needs: dict[str, ExternalNeeds] = field(default_factory=dict, repr=False)

    @cached_property
    def token_values(self) -> TokenValues:
        """The values in the suite's own token files."""
        return read_checkout_tokens(self.checkout, self.profile)

    def token_values_for(self, task: Task) -> TokenValues:
        """The suite's token values, overridden by those of the task's own token file."""
        return {**self.token_values, **self.own_token_values(task)}

    def own_token_values(self, task: Task) -> TokenValues:
        """The values in a task's own token file; empty if it has none."""
        return read_task_tokens(self.checkout / task.folder) if task.has_token_file else {}

    def token_names(self, servers: Iterable[str]) -> frozenset[str]:
        """The names `config.x` and `token.x` that the YAML files of these servers use."""
        names = frozenset[str]().union(*(self.servers[s].templates for s in servers if s in self.servers))
        return frozenset(name for name in names if name.startswith(_TOKEN_PREFIXES))

    def needs_token(self, local_tool: str) -> bool:
        """Whether suite.yaml lists a value of a token file among the needs of a local tool."""
        credentials = self.local_tool_needs(local_tool).credentials
        return any(credential.startswith(_TOKEN_PREFIXES) for credential in credentials)

    def needs(self, folder: TaskFolder, settings: TaskSettings) -> Needs:
        """A task's needs. Template values that are not filled in count as credentials, too."""
        absent = {*self.profile.absent_servers} - {*self.servers, *self.server_errors}
        servers = tuple(name for name in folder.config.servers if name not in absent)
        local_tools = folder.config.local_tools
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
        unfilled = [name for name in sorted(self.token_names(servers)) if not self._has_value(name, folder)]
        unfilled += self._unfilled_keys(servers, folder)
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
        """The service of that name, or the private one in its place; defaults for an unknown one."""
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

    def server_needs(self, name: str) -> ServerNeeds:
        """What suite.yaml says of a server."""
        if (needs := self._server_needs.get(name)) is None:
            needs = self._server_needs[name] = settings_for(self.settings.servers, name, ServerNeeds)
        return needs

    def local_tool_needs(self, name: str) -> ExternalNeeds:
        """What suite.yaml says of a local tool."""
        if (needs := self._local_tool_needs.get(name)) is None:
            needs = settings_for(self.settings.local_tools, name, ExternalNeeds)
            self._local_tool_needs[name] = needs
        return needs

    def _all_external_needs(self, servers: Iterable[str], local_tools: Iterable[str]) -> list[ExternalNeeds]:
        return [*map(self.server_needs, servers), *map(self.local_tool_needs, local_tools)]

    def _unfilled_keys(self, servers: Iterable[str], folder: TaskFolder) -> list[str]:
        """`PATH#KEY` for each key that a server needs in a file of the task's folder, if it has no value."""
        credentials = [
            f"{folder.path / file}{KEY_SEPARATOR}{key}"
            for name in servers
            for file, keys in self.server_needs(name).task_files.items()
            if file in folder.names
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

    def _has_value(self, name: str, folder: TaskFolder) -> bool:
        placeholders = self.profile.placeholders
        if is_filled_in(name, self.token_values, placeholders):
            return True
        return TASK_FILE in folder.names and is_filled_in(
            name, read_task_tokens(self.checkout / folder.path), placeholders
        )


def _unique(groups: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))


SUITE_ROOT = PurePosixPath()
FILE_SYSTEM_ROOT = PurePosixPath("/")
_HEADING = "\n# The values of this episode's account (suite.yaml):\n"


def credential_archives(
    resources: SuiteResources, task: Task, slots: Mapping[str, str]
) -> list[tuple[PurePosixPath, bytes]]:
    """Tar archives, each with the folder to unpack it in; see `Suite.credentials`."""
    credentials = resources.credentials(task, slots)
    files = {PurePosixPath(target): Path(path) for target, path in credentials.files.items()}
    relative = {target: path for target, path in files.items() if not target.is_absolute()}
    absolute = {target.relative_to("/"): path for target, path in files.items() if target.is_absolute()}
    token_files = dict(_token_files(resources, credentials))
    archives: list[tuple[PurePosixPath, bytes]] = []
    if relative or token_files:
        archives.append((SUITE_ROOT, _pack(relative, token_files)))
    if absolute:
        archives.append((FILE_SYSTEM_ROOT, _pack(absolute, {})))
    return archives


def service_archive(resources: SuiteResources, service: Service) -> bytes:
    """A tar archive of the files in a service's working folder; see `Suite.service_files`."""
    return _pack({PurePosixPath(name): resources.checkout / path for name, path in service.files.items()}, {})


def _token_files(resources: SuiteResources, credentials: Credentials) -> Iterator[tuple[PurePosixPath, str]]:
    """The suite's token files with the credentials' values appended, for each file that gets any."""
    for prefix, (file, variable) in SOURCES.items():
        values = {key: value for key, value in credentials.values.items() if key.startswith(f"{prefix}.")}
        if values:
            path = token_file(resources.checkout, resources.profile, file)
            lines = [f"{variable}[{key.partition('.')[2]!r}] = {value!r}\n" for key, value in values.items()]
            yield PurePosixPath(file), "".join([_read(path).decode(), _HEADING, *lines])


def _pack(files: Mapping[PurePosixPath, Path], texts: Mapping[PurePosixPath, str]) -> bytes:
    """A tar archive of the files, readable only by the sandbox's user."""
    contents = {str(goal): text.encode() for goal, text in texts.items()}
    for goal, path in files.items():
        for place in _below(path):
            contents[str(goal / place.relative_to(path))] = _read(place)
    return pack_files(contents, mode=0o600)


def _below(path: Path) -> Iterator[Path]:
    """A file itself, or all files below a folder, sorted."""
    # Symbolic links are followed: the operator made these folders, not a checkout from elsewhere.
    if not path.is_dir():
        yield path
        return
    for folder, folders, names in os.walk(path, followlinks=True):
        folders.sort()
        yield from (Path(folder, name) for name in sorted(names))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SuiteError(f"{path} cannot be read: {error.strerror}", file=str(path)) from None


def read_tokens(path: Path, variable: str) -> TokenValues:
    """The entries of `variable = Dict(key=value, ...)` or `variable = {...}`, without those that are None.

    Empty where the file does not exist or has another form.
    """
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return {}
    values: dict[str, str | None] = {}
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == variable for target in statement.targets
        ):
            values.update(_entries(statement.value))
    return values


def read_checkout_tokens(checkout: Path, profile: SuiteProfile) -> TokenValues:
    """The values of the suite's token files."""
    values: dict[str, str | None] = {}
    for prefix, (file, variable) in SOURCES.items():
        tokens = read_tokens(token_file(checkout, profile, file), variable)
        values.update({f"{prefix}.{key}": value for key, value in tokens.items()})
    return values


def token_file(checkout: Path, profile: SuiteProfile, file: str) -> Path:
    """A file of `SOURCES` in the checkout, or the one that the profile has in its place if it is missing."""
    path = checkout / file
    return path if path.exists() else checkout / dict(profile.stand_ins).get(file, file)


def read_task_tokens(folder: Path) -> TokenValues:
    """The values of a task's own token file, which override the suite's."""
    values = read_tokens(folder / TASK_FILE, SOURCES["token"][1])
    return {f"token.{key}": value for key, value in values.items()}


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
