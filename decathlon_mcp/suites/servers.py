"""MCP servers as `configs/mcp_servers/*.yaml` describe them, found by their `name` and not by file name.

Templates `${name}` in these files are filled in as Toolathlon does it (`utils/mcp/tool_servers.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.documents import file_error, read_yaml, validate
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.types import JsonObject, as_object

log = logging.getLogger("decathlon.suites")

FOLDER = PurePosixPath("configs/mcp_servers")

ServerType = Literal["stdio", "sse", "streamable_http"]


def _text(value: object) -> object:
    """A YAML scalar as text; any other value is left for pydantic to refuse."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_text)]


class _Fields(BaseModel):
    """A part of a server's YAML file. Unknown fields are ignored; null is the same as a missing field."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: object) -> object:
        fields = as_object(value)
        return value if fields is None else {key: item for key, item in fields.items() if item is not None}


class _Params(_Fields):
    command: Annotated[str, Field(min_length=1)] | None = None
    args: tuple[Text, ...] = ()
    env: dict[str, Text] = {}
    cwd: str | None = None
    url: str | None = None
    headers: dict[str, Text] = {}


class _File(_Fields):
    type: Annotated[ServerType, BeforeValidator(_lower)] = "stdio"
    name: Annotated[str, Field(min_length=1)] | None = None
    params: _Params = _Params()
    url: str | None = None
    headers: dict[str, Text] = {}
    client_session_timeout_seconds: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _reachable(self) -> _File:
        if self.type == "stdio" and self.params.command is None:
            raise ValueError("a server of type stdio needs params.command")
        if self.type != "stdio" and self.params.url is None and self.url is None:
            raise ValueError(f"a server of type {self.type} needs params.url")
        return self


_FILE = TypeAdapter(_File)


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """One server, with its templates unfilled. `request_seconds` None: the profile's default."""

    name: str
    file: Path
    type: ServerType
    command: str = ""
    args: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    cwd: str | None = None
    url: str = ""
    headers: tuple[tuple[str, str], ...] = ()
    request_seconds: float | None = None

    @property
    def templates(self) -> frozenset[str]:
        """The names in its templates."""
        texts = [self.command, *self.args, self.cwd or "", self.url]
        texts += [value for _, value in (*self.env, *self.headers)]
        return frozenset[str]().union(*map(template_names, texts))

    @property
    def remote(self) -> bool:
        """Whether its URL leads out of the sandbox. False for a stdio server."""
        host = urlsplit(self.url).hostname or ""
        return self.type != "stdio" and host not in {"localhost", "127.0.0.1", "::1"}

    def spec(self, profile: SuiteProfile, *, root: PurePosixPath, values: Mapping[str, str]) -> JsonObject:
        """The SERVER object for the driver's `start`, its templates filled in with `values`."""

        def filled(text: str) -> str:
            return fill(text, values, server=self.name)

        seconds = self.request_seconds or profile.request_seconds
        common: JsonObject = {"name": self.name, "type": self.type, "request_seconds": seconds}
        if self.type != "stdio":
            return {**common, "url": filled(self.url), "headers": {k: filled(v) for k, v in self.headers}}
        own = {key: filled(value) for key, value in self.env}
        shared = dict(profile.environment)
        cwd = profile.workspace if profile.server_cwd == "workspace" else PurePosixPath()
        return {
            **common,
            "command": filled(self.command),
            "args": [*map(filled, self.args), *dict(profile.extra_args).get(self.name, ())],
            "env": {**own, **shared} if profile.environment_wins else {**shared, **own},
            "inherit": profile.servers_inherit,
            "cwd": str(root / (cwd if self.cwd is None else filled(self.cwd))),
        }


def read_server(path: Path) -> ServerConfig | None:
    """Read a server's file; None for an empty one. Raises SuiteError naming file, line and field."""
    content = read_yaml(path)
    if not content:
        return None
    file = validate(path, _FILE, content)
    return ServerConfig(
        name=file.name or path.stem,
        file=path,
        type=file.type,
        command=file.params.command or "",
        args=file.params.args,
        env=tuple(file.params.env.items()),
        cwd=file.params.cwd,
        url=file.params.url or file.url or "",
        headers=tuple({**file.headers, **file.params.headers}.items()),
        request_seconds=file.client_session_timeout_seconds,
    )


def read_servers(checkout: Path) -> tuple[dict[str, ServerConfig], dict[str, SuiteError]]:
    """The servers by name, and the errors of those that cannot be read, by their likely names."""
    servers: dict[str, ServerConfig] = {}
    errors: dict[str, SuiteError] = {}
    for path in sorted((checkout / FOLDER).glob("*.yaml")):
        try:
            server = read_server(path)
        except SuiteError as error:
            errors[_likely_name(path)] = error
            continue
        if server is None:
            continue
        if server.name in servers:
            other = servers[server.name].file.name
            errors[server.name] = file_error(path, f"{other} has a server {server.name!r} too", field="name")
        servers[server.name] = server
    return {name: server for name, server in servers.items() if name not in errors}, errors


def _likely_name(path: Path) -> str:
    """The name of the server in a file that is not valid YAML, so that its tasks can show the error."""
    try:
        match = re.search(r"^name:\s*[\"']?([^\s\"'#]+)", path.read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else path.stem


_TEMPLATE = re.compile(r"\$\{([^}]+)\}")

ALIASES = {"podman_or_docker": "config.podman_or_docker"}
"""Template names without a prefix, and the configuration value that each stands for."""


def template_names(text: str) -> frozenset[str]:
    """The names in a text's templates, with aliases resolved."""
    names: list[str] = _TEMPLATE.findall(text)
    return frozenset(ALIASES.get(name, name) for name in names)


def fill(text: str, values: Mapping[str, str], *, server: str) -> str:
    """Replace the templates of a text. An unknown name is left as it is, with a warning."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        value = values.get(ALIASES.get(name, name))
        if value is None:
            log.warning(
                "unknown name in a template, left as it is",
                extra={"fields": {"server": server, "name": name}},
            )
            return match.group(0)
        return value

    return _TEMPLATE.sub(replace, text)
