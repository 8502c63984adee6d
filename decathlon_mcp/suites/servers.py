"""MCP servers as `configs/mcp_servers/*.yaml` describe them, found by their `name` and not by file name.

Templates `${name}` in these files are filled in as Toolathlon does it (`utils/mcp/tool_servers.py`).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, model_validator

from decathlon_mcp.errors import SuiteError
from decathlon_mcp.suites.documents import field_error, file_error, read_bytes, read_yaml, validate
from decathlon_mcp.suites.profile import SuiteProfile
from decathlon_mcp.types import JsonObject, as_object

log = logging.getLogger("decathlon.suites")

FOLDER = PurePosixPath("configs/mcp_servers")

SCRIPTS = frozenset({".py", ".js", ".mjs", ".cjs", ".sh"})

BY_URL = (
    "servers that are reached by URL are not supported; a server of type stdio was expected: use "
    "`command: npx` and `args: [-y, mcp-remote, URL]` in its params, which relays to that URL"
)


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
    command: Annotated[str, Field(min_length=1)]
    args: tuple[Text, ...] = ()
    env: dict[str, Text] = {}
    cwd: str | None = None


class ServerConfig(_Fields):
    """One server, with its templates unfilled."""

    type: Annotated[Literal["stdio"], BeforeValidator(_lower)] = "stdio"
    name: Annotated[str, Field(min_length=1)]
    params: _Params
    client_session_timeout_seconds: Annotated[float, Field(gt=0)] | None = None
    """None: the profile's default."""

    @property
    def command(self) -> str:
        return self.params.command

    @property
    def absolute_paths(self) -> list[str]:
        """Its command and its script, where they are absolute paths without templates."""
        script = next((arg for arg in self.params.args if not arg.startswith("-")), "")
        paths = [self.command, *([script] if PurePosixPath(script).suffix in SCRIPTS else [])]
        return [path for path in paths if path.startswith("/") and not template_names(path)]

    @property
    def templates(self) -> frozenset[str]:
        """The names in its templates."""
        params = self.params
        texts = [params.command, *params.args, params.cwd or "", *params.env.values()]
        return frozenset[str]().union(*map(template_names, texts))

    def spec(self, profile: SuiteProfile, *, root: PurePosixPath, values: Mapping[str, str]) -> JsonObject:
        """The SERVER object for the driver's `start`, its templates filled in with `values`."""

        def filled(text: str) -> str:
            return fill(text, values, server=self.name)

        params, shared = self.params, profile.environment
        own = {key: filled(value) for key, value in params.env.items()}
        default = profile.workspace if profile.server_cwd == "workspace" else PurePosixPath()
        cwd = root / (default if params.cwd is None else filled(params.cwd))
        command, args = filled(params.command), [*map(filled, params.args)]
        if profile.launchers_at_root and cwd.is_relative_to(root / profile.workspace):
            args, launcher = _at_root(command, args, root)
            own = {**launcher, **own}
        return {
            "name": self.name,
            "request_seconds": self.client_session_timeout_seconds or profile.request_seconds,
            "command": command,
            "args": [*args, *profile.extra_args.get(self.name, ())],
            "env": {**own, **shared} if profile.environment_wins else {**shared, **own},
            "inherit": profile.servers_inherit,
            "cwd": str(cwd),
        }


_SERVER = TypeAdapter(ServerConfig)


def _at_root(command: str, args: list[str], root: PurePosixPath) -> tuple[list[str], dict[str, str]]:
    """The arguments and further environment with which a launcher looks for programs in `root` only.

    npx and uv look for a project, and Python for modules, in the folder in which they start, which is the
    agent's. Upstream starts all servers before the agent acts; here most start later.
    """
    # Tried on 2026-11-24 (uv 0.9.2 and 0.13.9, npm 11.19) in a workspace with a `package.json`, `.npmrc`,
    # `node_modules`, `pyproject.toml`, `uv.toml`, `.python-version`, `.venv`, and modules with common names.
    # `uvx` looks for none of them.
    match PurePosixPath(command).name:
        case "npx":
            # npm reads a prefix for this only from its arguments, not from the environment.
            return ["--prefix", str(root), *args], {"npm_config_script_shell": "/bin/sh"}
        case "uv" if args[:1] == ["run"]:
            project = {"UV_PROJECT": str(root)}
            # Not for scripts, which may import what is beside them.
            return args, {**project, "PYTHONSAFEPATH": "1"} if "-m" in args else project
        case _:
            return args, {}


def read_server(path: Path) -> ServerConfig | None:
    """Read a server's file; None if it is empty. Raises SuiteError naming file, line and field."""
    content = read_yaml(path)
    if not content:
        return None
    _check_transport(path, content)
    name = path.stem if content.get("name") is None else content["name"]
    return validate(path, _SERVER, {**content, "name": name})


def _check_transport(path: Path, content: JsonObject) -> None:
    """Raise SuiteError for a server that is reached by URL."""
    params = as_object(content.get("params")) or {}
    if _lower(content.get("type")) in ("sse", "streamable_http"):
        raise field_error(path, ["type"], BY_URL)
    if params.get("url") is not None:
        raise field_error(path, ["params", "url"], BY_URL)
    if content.get("url") is not None:
        raise field_error(path, ["url"], BY_URL)


def read_servers(checkout: Path) -> tuple[dict[str, ServerConfig], dict[str, SuiteError]]:
    """The servers by name, and the errors of unreadable servers, by their likely names."""
    servers: dict[str, ServerConfig] = {}
    files: dict[str, str] = {}
    errors: dict[str, SuiteError] = {}
    for path in sorted((checkout / FOLDER).glob("*.yaml")):
        try:
            server = read_server(path)
        except SuiteError as error:
            errors[_likely_name(path)] = error
            continue
        if server is None:
            continue
        if (other := files.get(server.name)) is not None:
            errors[server.name] = file_error(path, f"{other} has a server {server.name!r} too", field="name")
        servers[server.name], files[server.name] = server, path.name
    return {name: server for name, server in servers.items() if name not in errors}, errors


def _likely_name(path: Path) -> str:
    """The name of the server in a file that is not valid YAML, so that its tasks can show the error."""
    try:
        text = read_bytes(path).decode("utf-8", "replace")
        match = re.search(r"^name:\s*[\"']?([^\s\"'#]+)", text, re.MULTILINE)
    except SuiteError:
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
