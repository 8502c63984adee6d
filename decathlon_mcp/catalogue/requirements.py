"""What a task lacks on this host: credentials, services, servers and their programs, a network, a text.

`missing_requirements` compares a task's needs (`SuiteResources.needs`) with the checkout and the host. The
programs of the MCP servers are looked for inside a sandbox: `probe_command` is run there, and
`parse_missing_programs` reads its output.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.payloads import source
from decathlon_mcp.suites.prompts import language_suffix
from decathlon_mcp.suites.resources import KEY_SEPARATOR
from decathlon_mcp.suites.servers import FOLDER as SERVERS_FOLDER
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.suite_file import FILE, Service
from decathlon_mcp.suites.tasks import Task
from decathlon_mcp.suites.tokens import SOURCES
from decathlon_mcp.types import JsonObject, Names

RequirementKind = Literal[
    "credential", "service", "server", "package", "local tool", "network", "recording", "text", "broken"
]

PLURALS: Mapping[RequirementKind, str] = {
    "credential": "missing credentials",
    "service": "missing services",
    "server": "missing MCP servers",
    "package": "missing server programs",
    "local tool": "local tools without code",
    "network": "networks switched off",
    "recording": "missing recordings of the web",
    "text": "missing translations",
    "broken": "broken files",
}
"""Headings for summaries by kind."""

OWN_PAGES = "docs/"
"""Prefix of this project's own pages. Any other page is a URL or a file of the checkout."""
DEFAULT_PAGES: Mapping[RequirementKind, str] = {
    "credential": "docs/toolathlon.md#which-tasks-run",
    "service": "docs/toolathlon.md#which-tasks-run",
    "server": "docs/writing-tasks.md",
    "package": "docs/toolathlon.md#play-it",
    "local tool": "docs/writing-tasks.md#suiteyaml",
    "network": "docs/operating.md#settings",
    "recording": "docs/recorded-web.md#record",
    "text": "docs/toolathlon.md#in-chinese",
    "broken": "docs/writing-tasks.md",
}
"""The page for a kind of requirement, where neither the suite nor its profile names one."""


@dataclass(frozen=True, slots=True)
class MissingRequirement:
    """One reason why a task cannot run. `message` says what is missing and what to do about it.

    `page` is documentation on the requirement: a URL, or a path with an optional anchor.
    """

    kind: RequirementKind
    name: str
    message: str
    page: str

    @property
    def sentence(self) -> str:
        """The message with its page. For a broken file, the error message alone."""
        return self.message if self.kind == "broken" else f"{self.message} (see {self.page})"

    def to_json(self) -> JsonObject:
        """The entry in the output of `tasks --check --json`."""
        return {"kind": self.kind, "name": self.name, "said": self.message, "page": self.page}


@dataclass(frozen=True, slots=True)
class DocPages:
    """The documentation pages of a suite, keyed by patterns for names such as `token.github_token`."""

    checkout: Path
    pages: Mapping[str, str]

    @classmethod
    def of(cls, suite: Suite) -> DocPages:
        return cls(suite.path, suite.resources.settings.pages)

    def requirement(
        self, kind: RequirementKind, name: str, message: str, *, key: str | None = None
    ) -> MissingRequirement:
        """A missing requirement with its page. `key` is matched against the patterns; default: `name`."""
        return MissingRequirement(kind, name, message, self._page(kind, key or name))

    def _page(self, kind: RequirementKind, key: str) -> str:
        matches = [page for pattern, page in self.pages.items() if fnmatchcase(key, pattern)]
        page = self.pages.get(key) or (matches[-1] if matches else DEFAULT_PAGES[kind])
        file = self.checkout / page.partition("#")[0]
        if page.startswith(OWN_PAGES) or "://" in page or not file.exists():
            return page
        return f"{self.checkout}/{page}"


@dataclass(frozen=True, slots=True)
class MissingProgram:
    """The program of an MCP server that a sandbox does not have.

    `downloadable`: npm or uv downloads it when the server starts, if the sandbox has a network. `cure` says
    where it was looked for and what to do.
    """

    description: str
    downloadable: bool
    cure: str


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What this host offers to sandboxes.

    `has_network`: a sandbox gets a network if its task needs one. `without_network`: suites whose provider
    gives none, and why. `varying_root`: suites of which every sandbox has another root. `tool_names`: the
    spelling in force; None: the suite's own. `missing_programs`: by suite, then by MCP server; a suite whose
    sandboxes were not probed is taken to have all of them. `zones`: by suite, the time zone of its sandboxes,
    if it is not this machine's. `has_web`: tasks get a recorded web in place of a network, and need none.
    `missing_recording`: with a web that only replays, why a task's recording is missing, empty if it is
    there. `recorded_launch_time`: with a recorded web, the launch time that a task's
    recording fixes, None without a recording. `service_images`: by suite, those images of services that are
    on its engine; a suite whose provider has no engine has no entry.
    """

    has_network: bool = True
    has_web: bool = False
    missing_recording: Callable[[Suite, Task], str] | None = None
    recorded_launch_time: Callable[[Suite, Task], datetime | None] | None = None
    without_network: Mapping[str, str] = field(default_factory=dict[str, str])
    varying_root: frozenset[str] = frozenset()
    tool_names: Names | None = None
    zones: Mapping[str, tzinfo] = field(default_factory=dict[str, tzinfo])
    missing_programs: Mapping[str, Mapping[str, MissingProgram]] = field(
        default_factory=dict[str, Mapping[str, MissingProgram]]
    )
    service_images: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])


def missing_requirements(suite: Suite, task: Task, host: HostInfo) -> list[MissingRequirement]:
    """Everything that keeps a task from running; empty where it can run."""
    pages = DocPages.of(suite)
    return [
        *_missing_text(suite, task, pages),
        *_missing_network(suite, task, pages, host),
        *_missing_recording(suite, task, pages, host),
        *_missing_programs(suite, task, pages, host),
        *(broken_file(suite, error) for error in task.errors),
        *_missing_servers(suite, task, pages),
        *_missing_local_tools(suite, task, pages),
        *_missing_credentials(suite, task, pages, host),
        *_missing_files(suite, task, pages),
        *_missing_services(suite, task, pages, host),
    ]


def broken_file(suite: Suite, error: SuiteError, default_name: str = "") -> MissingRequirement:
    """The requirement for an error in a file of the checkout; its name is that file."""
    return DocPages.of(suite).requirement(
        "broken", str(error.data.get("file") or default_name), error.message
    )


def _missing_text(suite: Suite, task: Task, pages: DocPages) -> Iterator[MissingRequirement]:
    # A missing English text is an error of the task itself, see `read_task_folder`.
    if suite.language != "en" and not task.files.has_text:
        file = f"docs/task{language_suffix(suite.language)}.md"
        message = (
            f"needs {file}, its text in the configured language {suite.language!r}, which does not exist"
        )
        yield pages.requirement("text", file, message)


def _missing_network(
    suite: Suite, task: Task, pages: DocPages, host: HostInfo
) -> Iterator[MissingRequirement]:
    reason = host.without_network.get(suite.name)
    if not host.has_network:
        reason = "`--network none` gives none to any sandbox"
    if task.needs.network and reason is not None and not host.has_web:
        yield pages.requirement("network", "network", f"needs a network, but {reason}")


def _missing_recording(
    suite: Suite, task: Task, pages: DocPages, host: HostInfo
) -> Iterator[MissingRequirement]:
    if host.missing_recording is None or not (task.needs.network or task.grader_network):
        return
    if reason := host.missing_recording(suite, task):
        yield pages.requirement("recording", "recording", reason)


def _missing_programs(
    suite: Suite, task: Task, pages: DocPages, host: HostInfo
) -> Iterator[MissingRequirement]:
    programs = host.missing_programs.get(suite.name, {})
    can_download = task.needs.network and host.has_network and suite.name not in host.without_network
    # The package's own web pages would have to be in the recording.
    can_download = can_download and not host.has_web
    for name in task.needs.servers:
        program = programs.get(name)
        if program is not None and not (program.downloadable and can_download):
            message = f"needs {program.description} for the MCP server {name!r}, which is missing"
            yield pages.requirement("package", name, f"{message}: {program.cure}", key=f"package.{name}")


def _missing_servers(suite: Suite, task: Task, pages: DocPages) -> Iterator[MissingRequirement]:
    for name in task.needs.servers:
        if name not in suite.servers and name not in suite.resources.server_errors:
            message = f"needs the MCP server {name!r}: add a file that describes it to"
            yield pages.requirement(
                "server", name, f"{message} {suite.path / SERVERS_FOLDER}", key=f"server.{name}"
            )


def _missing_local_tools(suite: Suite, task: Task, pages: DocPages) -> Iterator[MissingRequirement]:
    code = dict(suite.profile.local_code)
    for name in task.needs.local_tools:
        if name not in code:
            message = f"needs the local tool {name!r}, for which the suite names no code: set `local_code` in"
            yield pages.requirement("local tool", name, f"{message} {suite.path / FILE}")


def _missing_credentials(
    suite: Suite, task: Task, pages: DocPages, host: HostInfo
) -> Iterator[MissingRequirement]:
    resources = suite.resources
    values, provided = resources.token_values_for(task), resources.provided_credentials(task)
    unneeded = resources.settings.needed_to_record if host.missing_recording is not None else ()
    for name in task.needs.credentials:
        if name not in provided and name not in unneeded and not resources.has_credential(name, values):
            yield pages.requirement(
                "credential", _short_name(name), _credential_message(suite.path, name), key=name
            )


def _missing_files(suite: Suite, task: Task, pages: DocPages) -> Iterator[MissingRequirement]:
    for target, file in suite.resources.credential_files(task).items():
        if not file.exists():
            message = f"needs the file {file} (copied to {target} in its sandbox), which does not exist"
            yield pages.requirement("credential", target, message)


def _missing_services(
    suite: Suite, task: Task, pages: DocPages, host: HostInfo
) -> Iterator[MissingRequirement]:
    images = host.service_images.get(suite.name)
    for name, service in suite.services(task).items():
        message = None
        if service.image is None:
            message = None if service.available else _service_message(suite, name)
        elif not service.available and service.image not in (images or ()):
            message = _image_message(suite, name, service.image, has_engine=images is not None)
        elif absent := [file for file in service.files.values() if not (suite.path / file).exists()]:
            message = f"needs the service {name}, which starts with {' and '.join(absent)} of the checkout"
            message += f": put it at {suite.path / absent[0]}"
        if message is not None:
            yield pages.requirement("service", name, message, key=f"service.{name}")


def _short_name(credential: str) -> str:
    """`github_token` of `token.github_token`; of a key in a task's file without the folder."""
    prefix, _, name = credential.partition(".")
    if KEY_SEPARATOR in credential:
        return PurePosixPath(credential).name
    return name if prefix in SOURCES else credential


def _credential_message(checkout: Path, credential: str) -> str:
    prefix, _, name = credential.partition(".")
    if prefix in SOURCES:
        return f"needs {name}, which is not filled in: set it in {checkout / SOURCES[prefix][0]}"
    file, _, key = credential.partition(KEY_SEPARATOR)
    if key:
        return f"needs `{key}`, which is not filled in: set it in {checkout / file}"
    return f"needs the file {credential}, which does not exist: put it at {checkout / credential}"


def _service_message(suite: Suite, name: str) -> str:
    service = suite.resources.settings.services.get(name, Service())
    message = f"needs the service {_with_ports(name, service)}, which is not marked as available"
    return f"{message}: {_hosting(name, service)}"


def _image_message(suite: Suite, name: str, image: str, *, has_engine: bool) -> str:
    """The message for a service that runs in a sandbox of each episode, and whose image is missing."""
    declared = suite.resources.settings.services[name]
    service = declared.in_use
    where = "is not on the engine" if has_engine else "only `--provider docker` runs"
    message = f"needs the service {_with_ports(name, service)}, whose image {image} {where}"
    cures = [service.cure] if service.cure else []
    if declared is not service:
        cures.append(_hosting(name, declared))
    return f"{message}: {', or '.join(cures)}" if cures else message


def _hosting(name: str, service: Service) -> str:
    cure = f"{service.cure}, then " if service.cure else ""
    return f"{cure}set `services: {{{name}: {{available: true}}}}` in suite.yaml"


def _with_ports(name: str, service: Service) -> str:
    if not service.ports:
        return name
    return f"{name} (port{'s' if len(service.ports) > 1 else ''} {', '.join(map(str, service.ports))})"


_PROBE_OUTPUT = TypeAdapter(dict[str, tuple[str, bool]])


def probe_command(suite: Suite, *, root: PurePosixPath) -> list[str]:
    """A command that, run in one of the suite's sandboxes, prints which MCP servers' programs are missing.

    `root` is the suite's root in that sandbox.
    """
    servers = [
        {"name": spec["name"], "command": spec["command"], "args": spec["args"]}
        for spec in suite.all_server_specs(root=root)
    ]
    folders = (suite.profile.local_servers, suite.profile.local_binaries)
    order = {"root": str(root), "own": [f"{root / folder}/" for folder in folders], "servers": servers}
    return ["python3", "-c", source("program_probe"), json.dumps(order)]


def parse_missing_programs(output: str, cure: str) -> Mapping[str, MissingProgram]:
    """The missing programs by MCP server, from the output of `probe_command`.

    Raises SuiteError for any other output.
    """
    try:
        programs = _PROBE_OUTPUT.validate_json(output)
    except ValidationError:
        raise SuiteError("the check for the servers' programs printed no result") from None
    return {
        name: MissingProgram(description, downloadable, cure)
        for name, (description, downloadable) in programs.items()
    }
