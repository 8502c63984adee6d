"""A task's MCP servers as `configs/mcp_servers/*.yaml` describe them: found by `name`, not by file name.

`${name}` in a server's yaml, as Toolathlon fills it (`utils/mcp/tool_servers.py`).
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
from decathlon_mcp.suites.documents import broken, check, read_yaml
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.types import JsonObject, as_object

FOLDER = PurePosixPath("configs/mcp_servers")

ServerType = Literal["stdio", "sse", "streamable_http"]


def _text(value: object) -> object:
    """A scalar of YAML as the text that it was written as, near enough; anything else is not one."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Text = Annotated[str, BeforeValidator(_text)]


class _Fields(BaseModel):
    """The fields that matter; those that it does not know are the suite's own business. Null is not there."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _said(cls, value: object) -> object:
        fields = as_object(value)
        return value if fields is None else {key: said for key, said in fields.items() if said is not None}


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
    """One server, its templates not yet filled in. `request_seconds` None: the profile's."""

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
        """The names it wants filled in."""
        texts = [self.command, *self.args, self.cwd or "", self.url]
        texts += [value for _, value in (*self.env, *self.headers)]
        return frozenset[str]().union(*map(names_in, texts))

    @property
    def remote(self) -> bool:
        """Is it reached by an address beyond the sandbox's own loopback?"""
        host = urlsplit(self.url).hostname or ""
        return self.type != "stdio" and host not in {"localhost", "127.0.0.1", "::1"}

    def spec(self, profile: SuiteProfile, *, root: PurePosixPath, values: Mapping[str, str]) -> JsonObject:
        """The SERVER object of the wire's `start`."""

        def filled(text: str) -> str:
            return fill(text, values, server=self.name)

        seconds = self.request_seconds or profile.request_seconds
        common: JsonObject = {"name": self.name, "type": self.type, "request_seconds": seconds}
        if self.type != "stdio":
            return {**common, "url": filled(self.url), "headers": {k: filled(v) for k, v in self.headers}}
        own = {key: filled(value) for key, value in self.env}
        ours = dict(profile.environment)
        start = profile.workspace if profile.server_cwd == "workspace" else PurePosixPath()
        return {
            **common,
            "command": filled(self.command),
            "args": [*map(filled, self.args), *dict(profile.extra_args).get(self.name, ())],
            "env": {**own, **ours} if profile.environment_wins else {**ours, **own},
            "inherit": profile.servers_inherit,
            "cwd": str(root / (start if self.cwd is None else filled(self.cwd))),
        }


def read_server(path: Path) -> ServerConfig | None:
    """None for an empty file. Raises SuiteError naming file, line and field."""
    words = read_yaml(path)
    if not words:
        return None
    said = check(path, _FILE, words)
    return ServerConfig(
        name=said.name or path.stem,
        file=path,
        type=said.type,
        command=said.params.command or "",
        args=said.params.args,
        env=tuple(said.params.env.items()),
        cwd=said.params.cwd,
        url=said.params.url or said.url or "",
        headers=tuple({**said.headers, **said.params.headers}.items()),
        request_seconds=said.client_session_timeout_seconds,
    )


def read_servers(checkout: Path) -> tuple[dict[str, ServerConfig], dict[str, SuiteError]]:
    """The servers by name; what is wrong with those that cannot be read, by the name they seem to have."""
    found: dict[str, ServerConfig] = {}
    errors: dict[str, SuiteError] = {}
    for path in sorted((checkout / FOLDER).glob("*.yaml")):
        try:
            server = read_server(path)
        except SuiteError as error:
            errors[_likely_name(path)] = error
            continue
        if server is None:
            continue
        if server.name in found:
            other = found[server.name].file.name
            errors[server.name] = broken(path, f"{other} has a server {server.name!r} too", field="name")
        found[server.name] = server
    return {name: server for name, server in found.items() if name not in errors}, errors


def _likely_name(path: Path) -> str:
    """What a file that cannot be read as YAML seems to call its server."""
    try:
        match = re.search(r"^name:\s*[\"']?([^\s\"'#]+)", path.read_text("utf-8", "replace"), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else path.stem


log = logging.getLogger("decathlon.suites")

_TEMPLATE = re.compile(r"\$\{([^}]+)\}")

ALIASES = {"podman_or_docker": "config.podman_or_docker"}
"""Names that stand for a value of the suite's configuration."""


def names_in(text: str) -> frozenset[str]:
    """The names that a text wants filled in."""
    found: list[str] = _TEMPLATE.findall(text)
    return frozenset(ALIASES.get(name, name) for name in found)


def fill(text: str, values: Mapping[str, str], *, server: str) -> str:
    """`text` with every known name replaced; an unknown one is left as it is, with a warning."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        value = values.get(ALIASES.get(name, name))
        if value is None:
            log.warning(
                "a template's name is unknown and was left as it is",
                extra={"fields": {"server": server, "name": name}},
            )
            return match.group(0)
        return value

    return _TEMPLATE.sub(replace, text)
