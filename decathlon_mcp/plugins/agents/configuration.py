"""The files and variables by which agent programs find their episode, in folders of their own.

Each gets the episode as an MCP server, time limits that fit a slow tool, and no tools of its own where they
can be switched off, which the versions in `presets` were checked for. Reports to its makers and updates are
off. A program reads its own part and ignores the others.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.agents.programs import PRESETS
from decathlon_mcp.plugins.agents.reach import BASE_URL_ENDING
from decathlon_mcp.types import JsonObject
from decathlon_mcp.validation import quoted

SERVER = "task"
"""The name of the episode's MCP server in every configuration."""
START_SECONDS = 120
"""How long a program waits for the server and its tools: what a task's servers get by default."""
MAX_ARGUMENT_BYTES = 127 << 10
"""Linux takes 128 KiB for one argument or variable, with its name and its end (execve(2))."""
PLACEHOLDER = re.compile(r"\{(prompt|prompt_file|mcp_config|address)\}")
PASSED_NAMES = frozenset(
    {
        *("LANG", "LANGUAGE", "TZ", "TERM", "COLORTERM", "NO_COLOR", "PATH", "USER", "LOGNAME"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
        *("http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    }
)
"""Variables of the user's that every program gets. A proxy is of use only to one that is trusted."""
PASSED_PREFIX = "LC_"
UNMENTIONED_NAMES = frozenset(
    {
        "HOME",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "SHELL",
        "_",
        "MAIL",
        "HOSTNAME",
        "LS_COLORS",
        "PS1",
        "LINES",
        "COLUMNS",
    }
)
"""Variables of a shell for itself, which nobody misses."""
OWN_NAMES = frozenset(
    {
        *("PATH", "HOME", "PWD", "DECATHLON_PROMPT", "DECATHLON_ADDRESS", "DECATHLON_MCP_CONFIG"),
        *("CLAUDE_CONFIG_DIR", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "MCP_TIMEOUT", "MCP_TOOL_TIMEOUT"),
        *("CODEX_HOME", "OPENCODE_CONFIG", "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH"),
        *("OPENCODE_DISABLE_LSP_DOWNLOAD", "GEMINI_CLI_HOME"),
    }
)
"""Variables that `configure` sets, and PATH, which leads to the program."""
OPENCODE_TOOLS = (
    *("bash", "edit", "write", "read", "grep", "glob", "list", "patch", "apply_patch", "multiedit"),
    *("webfetch", "websearch", "codesearch", "task", "skill", "todowrite", "todoread", "lsp", "question"),
)
CODEX_FEATURES = (
    *("shell_tool", "unified_exec", "code_mode_host", "multi_agent", "goals", "apps", "plugins", "hooks"),
    *("browser_use", "computer_use", "image_generation", "view_image", "skill_mcp_dependency_install"),
)
GEMINI_EXCLUDED = (
    *("run_shell_command", "read_file", "read_many_files", "write_file", "replace", "glob", "list_directory"),
    *("grep_search", "search_file_content", "web_fetch", "google_web_search", "save_memory", "write_todos"),
    *("activate_skill", "ask_user", "enter_plan_mode", "exit_plan_mode", "invoke_agent", "update_topic"),
    *("codebase_investigator", "cli_help", "generalist", "get_internal_docs", "complete_task"),
    *("tracker_create_task", "tracker_update_task", "tracker_get_task", "tracker_list_tasks"),
    *("tracker_add_dependency", "tracker_visualize"),
)
CLAUDE_DENIED = (
    *("Bash", "BashOutput", "KillShell", "Edit", "NotebookEdit", "Write", "Read", "Glob", "Grep"),
    *("WebFetch", "WebSearch", "Task", "Agent", "Skill", "CronCreate", "CronDelete", "CronList"),
    *("EnterWorktree", "ExitWorktree", "ReportFindings", "ScheduleWakeup", "SendMessage", "Workflow"),
    *("TaskCreate", "TaskGet", "TaskList", "TaskUpdate", "TaskStop", "TaskOutput"),
)


@dataclass(frozen=True, slots=True)
class Folders:
    """Absolute folders of one run of a program. `work`: where it starts, empty."""

    root: PurePosixPath

    @property
    def home(self) -> PurePosixPath:
        return self.root / "home"

    @property
    def work(self) -> PurePosixPath:
        return self.root / "work"

    @property
    def configuration(self) -> PurePosixPath:
        return self.root / "configuration"


@dataclass(frozen=True, slots=True)
class Configuration:
    """What a program is started with."""

    command: Sequence[str]
    files: Mapping[str, str]
    environment: Mapping[str, str] = field(repr=False)
    folder: str = ""


def choose_variables(program: str, options: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The user's variables that a program gets, and the names of those that it does not.

    `options`: further ones, as NAME or NAME=VALUE. Of programs that are not known, each also gets those that
    end in `BASE_URL_ENDING`. Raises BadRequestError for one that is not set, or that is not the user's.
    """
    preset = PRESETS.get(program)
    passed = {
        name: value
        for name, value in os.environ.items()
        if (name in PASSED_NAMES or name.startswith(PASSED_PREFIX))
        or (name.endswith(BASE_URL_ENDING) if preset is None else name.startswith(tuple(preset.variables)))
    }
    for option in options:
        name, has_value, value = option.partition("=")
        if not name or name in OWN_NAMES or "\0" in option:
            raise BadRequestError(f"--env {quoted(name)}: this variable cannot be given to the program")
        if not has_value and name not in os.environ:
            raise BadRequestError(
                f"--env {quoted(name)}: there is no such variable here; --env NAME=VALUE sets one"
            )
        passed[name] = value if has_value else os.environ[name]
    for name in OWN_NAMES - {"PATH"}:
        passed.pop(name, None)
    return passed, sorted(os.environ.keys() - passed.keys() - UNMENTIONED_NAMES - OWN_NAMES)


def configure(
    command: Sequence[str],
    folders: Folders,
    *,
    address: str,
    prompt: str,
    tool_seconds: float,
    variables: Mapping[str, str],
) -> Configuration:
    """The configuration for one episode at this address. `tool_seconds`: how long a tool may take.

    `variables`: see `choose_variables`.

    Raises BadRequestError for a prompt that is too long to be handed over.
    """
    if len(prompt.encode()) > MAX_ARGUMENT_BYTES:
        raise BadRequestError(
            f"the prompt has more than {MAX_ARGUMENT_BYTES} bytes, which no argument of a program can have"
        )
    where = folders.configuration
    mcp_config, prompt_file = str(where / "mcp.json"), str(where / "prompt.txt")
    milliseconds = round(tool_seconds * 1000)
    files = {
        mcp_config: json.dumps({"mcpServers": {SERVER: {"type": "http", "url": address}}}, indent=2),
        prompt_file: prompt,
        str(where / "claude" / "settings.json"): json.dumps(_claude_settings(), indent=2),
        str(where / "codex" / "config.toml"): _codex_settings(address, tool_seconds, variables),
        str(where / "opencode.json"): json.dumps(
            _opencode_settings(address, milliseconds, variables), indent=2
        ),
        str(folders.home / ".gemini" / "settings.json"): json.dumps(
            _gemini_settings(address, milliseconds), indent=2
        ),
    }
    environment = {
        **variables,
        "HOME": str(folders.home),
        "PWD": str(folders.work),
        "DECATHLON_PROMPT": prompt,
        "DECATHLON_ADDRESS": address,
        "DECATHLON_MCP_CONFIG": mcp_config,
        "CLAUDE_CONFIG_DIR": str(where / "claude"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "MCP_TIMEOUT": str(START_SECONDS * 1000),
        "MCP_TOOL_TIMEOUT": str(milliseconds),
        "CODEX_HOME": str(where / "codex"),
        "OPENCODE_CONFIG": str(where / "opencode.json"),
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "GEMINI_CLI_HOME": str(folders.home),
    }
    values = {"prompt": prompt, "prompt_file": prompt_file, "mcp_config": mcp_config, "address": address}
    filled = [PLACEHOLDER.sub(lambda match: values[match[1]], argument) for argument in command]
    return Configuration(filled, files, environment, str(folders.work))


def _claude_settings() -> JsonObject:
    return {
        "permissions": {"allow": [f"mcp__{SERVER}"], "deny": list(CLAUDE_DENIED)},
        "includeCoAuthoredBy": False,
    }


def _codex_settings(address: str, tool_seconds: float, variables: Mapping[str, str]) -> str:
    base_url = variables.get("OPENAI_BASE_URL")
    lines = [
        'approval_policy = "never"',
        'sandbox_mode = "read-only"',
        'web_search = "disabled"',
        "check_for_update_on_startup = false",
        *([f"openai_base_url = {json.dumps(base_url)}"] if base_url else []),
        "[analytics]",
        "enabled = false",
        "[features]",
        *(f"{feature} = false" for feature in CODEX_FEATURES),
        f"[mcp_servers.{SERVER}]",
        f"url = {json.dumps(address)}",
        f"startup_timeout_sec = {START_SECONDS}",
        f"tool_timeout_sec = {tool_seconds:g}",
        "required = true",
        'default_tools_approval_mode = "approve"',
    ]
    return "".join(f"{line}\n" for line in lines)


def _opencode_settings(address: str, milliseconds: int, variables: Mapping[str, str]) -> JsonObject:
    providers = {
        name: {"options": {"baseURL": url}}
        for name, variable in (("openai", "OPENAI_BASE_URL"), ("anthropic", "ANTHROPIC_BASE_URL"))
        if (url := variables.get(variable))
    }
    return {
        "$schema": "https://opencode.ai/config.json",
        "autoupdate": False,
        "share": "disabled",
        "mcp": {
            SERVER: {
                "type": "remote",
                "url": address,
                "enabled": True,
                "oauth": False,
                "timeout": milliseconds,
            }
        },
        "tools": dict.fromkeys(OPENCODE_TOOLS, False),
        **({"provider": providers} if providers else {}),
    }


def _gemini_settings(address: str, milliseconds: int) -> JsonObject:
    return {
        "mcpServers": {SERVER: {"httpUrl": address, "timeout": milliseconds, "trust": True}},
        "mcp": {"allowed": [SERVER]},
        "tools": {"exclude": list(GEMINI_EXCLUDED)},
        "privacy": {"usageStatisticsEnabled": False},
        "telemetry": {"enabled": False},
        "general": {"enableAutoUpdate": False, "disableAutoUpdate": True, "disableUpdateNag": True},
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "skills": {"enabled": False},
    }
