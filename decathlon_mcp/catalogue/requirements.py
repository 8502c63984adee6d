"""Requirements that a task lacks on this host: credentials, services, servers, programs, a network, a text.

`missing_requirements` compares a task's needs (`SuiteResources.needs`) with the checkout and the host, of
which plug-ins record what they found inside of sandboxes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, tzinfo
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Literal

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.prompts import language_suffix
from decathlon_mcp.suites.resources import KEY_SEPARATOR, SOURCES
from decathlon_mcp.suites.servers import FOLDER as SERVERS_FOLDER
from decathlon_mcp.suites.suite import Suite
from decathlon_mcp.suites.suite_file import FILE, Service
from decathlon_mcp.suites.tasks import Task
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
    "package": "docs/writing-tasks.md#a-server-from-npm-or-pypi",
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


def _requirement(
    suite: Suite, kind: RequirementKind, name: str, message: str, *, key: str | None = None
) -> MissingRequirement:
    """A missing requirement with its page. `key` is looked for among the suite's `pages`; default: `name`."""
    pages, key = suite.resources.settings.pages, key or name
    matches = [page for pattern, page in pages.items() if fnmatchcase(key, pattern)]
    page = pages.get(key) or (matches[-1] if matches else DEFAULT_PAGES[kind])
    is_of_checkout = not page.startswith(OWN_PAGES) and "://" not in page
    if is_of_checkout and (suite.path / page.partition("#")[0]).exists():
        page = f"{suite.path}/{page}"
    return MissingRequirement(kind, name, message, page)


def broken_file(suite: Suite, error: SuiteError, default_name: str = "") -> MissingRequirement:
    """The requirement for an error in a file of the checkout; its name is that file."""
    return _requirement(suite, "broken", str(error.data.get("file") or default_name), error.message)


@dataclass(frozen=True, slots=True)
class MissingProgram:
    """The program of an MCP server that a sandbox does not have.

    `downloadable`: npm or uv downloads it when the server starts, if the sandbox has a network. `cure` says
    where it was looked for and what to do. `hidden`: this machine has it, where its sandboxes see nothing.
    """

    description: str
    downloadable: bool
    cure: str
    hidden: bool = False


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What this host offers to sandboxes."""

    has_network: bool = True
    """Whether a sandbox gets a network if its task needs one."""
    has_web: bool = False
    """Whether tasks get a recorded web in place of a network."""
    missing_recording: Callable[[Suite, Task], str] | None = None
    """With a web that only replays, why a task's recording is missing; empty if it is there."""
    recorded_launch_time: Callable[[Suite, Task], datetime | None] | None = None
    """With a recorded web, the launch time that a task's recording fixes, None without a recording."""
    without_network: Mapping[str, str] = field(default_factory=dict[str, str])
    """Suites whose provider gives no network, and why."""
    varying_root: frozenset[str] = frozenset()
    """Suites of which every sandbox has another root."""
    tool_names: Names | None = None
    """The spelling in force; None: the suite's own."""
    zones: Mapping[str, tzinfo] = field(default_factory=dict[str, tzinfo])
    """By suite, the time zone of its sandboxes, if it is not this machine's."""
    missing_programs: Mapping[str, Mapping[str, MissingProgram]] = field(
        default_factory=dict[str, Mapping[str, MissingProgram]]
    )
    """By suite and MCP server; a suite whose sandboxes were not probed is taken to have all programs."""
    service_images: Mapping[str, frozenset[str]] = field(default_factory=dict[str, frozenset[str]])
    """By suite, the images of services that its provider can run; no entry if it runs no services."""


def missing_requirements(suite: Suite, task: Task, host: HostInfo) -> list[MissingRequirement]:
    """Everything that keeps a task from running; empty where it can run."""
    missing: list[MissingRequirement] = []

    def lacks(kind: RequirementKind, name: str, message: str, key: str | None = None) -> None:
        missing.append(_requirement(suite, kind, name, f"needs {message}", key=key))

    needs, resources = task.needs, suite.resources
    # A missing English text is an error of the task itself, see `read_task`.
    if suite.language != "en" and not task.files.has_text:
        file = f"docs/task{language_suffix(suite.language)}.md"
        lacks(
            "text",
            file,
            f"{file}, its text in the configured language {suite.language!r}, which does not exist",
        )
    why = host.without_network.get(suite.name)
    if not host.has_network:
        why = "`--network none` gives none to any sandbox"
    if needs.network and why is not None and not host.has_web:
        lacks("network", "network", f"a network, but {why}")
    if host.missing_recording is not None and (needs.network or task.grader_network):
        reason = host.missing_recording(suite, task)
        missing += [_requirement(suite, "recording", "recording", reason)] if reason else []
    # With a recorded web, the package's own web pages would have to be in the recording.
    can_download = needs.network and why is None and not host.has_web
    programs = host.missing_programs.get(suite.name, {})
    for name in needs.servers:
        program = programs.get(name)
        if program is not None and not (program.downloadable and can_download):
            state = "not visible in the sandbox" if program.hidden else "missing"
            what = f"{program.description} for the MCP server {name!r}, which is {state}"
            lacks("package", name, f"{what}: {program.cure}", key=f"package.{name}")
    missing += (broken_file(suite, error) for error in task.errors)
    for name in needs.servers:
        if name not in suite.servers and name not in resources.server_errors:
            cure = f"add a file that describes it to {suite.path / SERVERS_FOLDER}"
            lacks("server", name, f"the MCP server {name!r}: {cure}", key=f"server.{name}")
    for name in needs.local_tools:
        if name not in suite.profile.local_code:
            cure = f"set `local_code` in {suite.path / FILE}"
            lacks("local tool", name, f"the local tool {name!r}, for which the suite names no code: {cure}")
    values, provided = resources.token_values_for(task), resources.provided_credentials(task)
    unneeded = resources.settings.needed_to_record if host.missing_recording is not None else ()
    for name in needs.credentials:
        if name not in provided and name not in unneeded and not resources.has_credential(name, values):
            short_name, message = _credential(suite.path, name)
            lacks("credential", short_name, message, key=name)
    for target, file in resources.credential_files(task).items():
        if not file.exists():
            lacks(
                "credential",
                target,
                f"the file {file} (copied to {target} in its sandbox), which does not exist",
            )
    for name in needs.services:
        if message := _missing_service(suite, name, host):
            lacks("service", name, message, key=f"service.{name}")
    return missing


def _credential(checkout: Path, name: str) -> tuple[str, str]:
    """A credential's short name, such as `github_token`, and the message about it."""
    prefix, _, token = name.partition(".")
    if prefix in SOURCES:
        return token, f"{token}, which is not filled in: set it in {checkout / SOURCES[prefix][0]}"
    file, _, key = name.partition(KEY_SEPARATOR)
    if key:
        return PurePosixPath(name).name, f"`{key}`, which is not filled in: set it in {checkout / file}"
    return name, f"the file {name}, which does not exist: put it at {checkout / name}"


def _missing_service(suite: Suite, name: str, host: HostInfo) -> str:
    """The message about a service that a task cannot use; empty if it can."""
    declared = suite.resources.settings.services.get(name, Service())
    service, images = declared.in_use, host.service_images.get(suite.name)
    hosting = f"set `services: {{{name}: {{available: true}}}}` in suite.yaml"
    if declared.cure:
        hosting = f"{declared.cure}, then {hosting}"
    ports = ", ".join(map(str, service.ports))
    titled = f"the service {name}"
    if service.ports:
        titled += f" (port{'s' if len(service.ports) > 1 else ''} {ports})"
    if service.available:
        return ""
    if service.image is None:
        return f"{titled}, which is not marked as available: {hosting}"
    if service.image not in (images or ()):
        where = "is not on the engine" if images is not None else "the provider of its sandboxes does not run"
        cures = [service.cure] if service.cure else []
        if declared is not service:
            cures.append(hosting)
        return f"{titled}, whose image {service.image} {where}{': ' if cures else ''}{', or '.join(cures)}"
    if absent := [file for file in service.files.values() if not (suite.path / file).exists()]:
        starts = f"which starts with {' and '.join(absent)} of the checkout"
        return f"the service {name}, {starts}: put it at {suite.path / absent[0]}"
    return ""
