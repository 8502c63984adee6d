"""Agent programs: presets of known programs, the search for a program, and files that lead it to its episode.

Of a known program one version was checked: a scripted model was offered the task's tools and the list in
`docs/clients/agent-programs.md`, no others. `configure` switches the program's own tools off by name, and
another version may have others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from decathlon_mcp.errors import BadRequestError
from decathlon_mcp.plugins.agents.reach import BASE_URL_ENDING
from decathlon_mcp.sandboxes.host.answer_traces import repositories_of
from decathlon_mcp.sandboxes.host.host_files import USR, python_files
from decathlon_mcp.types import JsonObject
from decathlon_mcp.validation import quoted

_FIRST_LINE_BYTES = 256
_VIRTUAL_ENVIRONMENT = "pyvenv.cfg"


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """One known program, which is named as its file is."""

    command: Sequence[str]
    """Its command line, with the placeholders of `configuration.configure`."""
    words: int = 1
    """How many words of it name the program and its subcommand: options follow them."""
    version: str
    """The version that was checked."""
    package: str
    """Its package on npm."""
    variables: Sequence[str]
    """Prefixes of variables that only this program gets: its model's address and key."""

    def command_for(self, model: str | None) -> list[str]:
        """The command line, with the model if one is named."""
        chosen = [] if model is None else ["--model", model]
        return [*self.command[: self.words], *chosen, *self.command[self.words :]]


PRESETS: Mapping[str, Preset] = {
    "claude": Preset(
        command=(
            *("claude", "-p", "{prompt}", "--mcp-config", "{mcp_config}"),
            *("--strict-mcp-config", "--tools", ""),
        ),
        version="2.1.332",
        package="@anthropic-ai/claude-code",
        variables=("ANTHROPIC_", "CLAUDE_CODE_"),
    ),
    "codex": Preset(
        command=("codex", "exec", "--skip-git-repo-check", "{prompt}"),
        words=2,
        version="0.171.0",
        package="@openai/codex",
        variables=("OPENAI_", "CODEX_"),
    ),
    "opencode": Preset(
        command=("opencode", "run", "{prompt}"),
        words=2,
        version="1.18.33",
        package="opencode-ai",
        variables=("OPENAI_", "ANTHROPIC_", "GEMINI_", "GOOGLE_GENERATIVE_AI_", "OPENROUTER_"),
    ),
    "gemini": Preset(
        command=("gemini", "-p", "{prompt}"),
        version="0.61.0",
        package="@google/gemini-cli",
        variables=("GEMINI_", "GOOGLE_GEMINI_", "GOOGLE_GENAI_", "GOOGLE_API_KEY"),
    ),
}


@dataclass(frozen=True, slots=True)
class Program:
    """A command whose program was found.

    `path`: the program's folders, for the variable PATH. `folders`: folders that it needs to see. `prefixes`:
    folders of Pythons and virtual environments, of which it needs to see `host_files.python_files`.
    """

    name: str
    command: tuple[str, ...]
    path: tuple[Path, ...]
    folders: tuple[Path, ...]
    prefixes: tuple[Path, ...]


def find_program(
    command: Sequence[str], *, shown: Sequence[Path] = (), hidden: Collection[Path] = (), isolated: bool
) -> Program:
    """The program of a command line. `shown`, `hidden`: folders that it shall see, and must not.

    An npm package has its whole `node_modules`, a script also the folders of its interpreter. Neither `shown`
    nor a program's folder may have a hidden folder or its repository in it. Raises BadRequestError if there
    is no such program, or if it could not be run in namespaces (`isolated`).
    """
    found = shutil.which(command[0])
    if found is None:
        raise BadRequestError(f"there is no program {command[0]} on the PATH")
    program = Path(os.path.abspath(found))  # noqa: PTH100  (links are kept)
    chain = [program, *_interpreters(program)]
    prefixes = _outside_usr(prefix for path in chain for prefix in _pythons_of(path))
    own = _outside_usr(folder for path in chain for folder in _folders_of(path))
    asked = _outside_usr(folder.resolve() for folder in shown)
    path = tuple(dict.fromkeys(place.parent for link in chain for place in (link, link.resolve())))
    if isolated:
        _check_folders(asked, own, hidden)
        seen = (USR, *asked, *own, *(file for prefix in prefixes for file in python_files(prefix)))
        _check_arguments(command[1:], seen)
        # The link need not be there inside.
        program = program.resolve() if not _is_in_environment(program) else program
    folders = tuple(dict.fromkeys((*asked, *own)))
    return Program(Path(command[0]).name, (str(program), *command[1:]), path, folders, prefixes)


def _outside_usr(folders: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(folder for folder in dict.fromkeys(folders) if not folder.is_relative_to(USR))


def _check_folders(shown: Sequence[Path], own: Sequence[Path], hidden: Collection[Path]) -> None:
    """Raises BadRequestError for folders that show too much, or that are none."""
    home = Path.home().resolve()
    secret = {path for folder in hidden for path in (folder.resolve(), *repositories_of(folder.resolve()))}
    for folder in (*shown, *own):
        what = f"--show {folder}" if folder in shown else f"the program's folder {folder}"
        if home.is_relative_to(folder):
            raise BadRequestError(
                f"all of {folder} would have to be shown to the program: move what it needs into a folder "
                "of its own, or use --trust-command"
            )
        if not folder.is_dir():
            raise BadRequestError(f"{what} is not a folder")
        for path in sorted(secret):
            if folder.is_relative_to(path):
                raise BadRequestError(f"{what} lies in {path}, which is hidden from it: move it elsewhere")
            if path.is_relative_to(folder):
                raise BadRequestError(
                    f"{what} has {path} in it, which must not be seen: name folders beside that one"
                )


def _check_arguments(arguments: Sequence[str], seen: Sequence[Path]) -> None:
    """Raises BadRequestError for what the program would not find."""
    for argument in arguments:
        file = Path(argument)
        with suppress(OSError, ValueError):  # such as a text too long for a name
            if not file.is_file():
                continue
            real = file.resolve()
            if not file.is_absolute():
                raise BadRequestError(f"the program starts in an empty folder: name {argument} as {real}")
            if not any(map(real.is_relative_to, seen)):
                raise BadRequestError(f"the program does not see {argument}: add --show {real.parent}")


def _interpreters(program: Path) -> Iterator[Path]:
    """The program that the first line of a script names."""
    with suppress(OSError), program.open("rb") as file:
        line = file.read(_FIRST_LINE_BYTES).partition(b"\n")[0]
        words = line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []
        if words and Path(words[0]).name == "env":
            words = [word for word in words[1:] if not word.startswith("-")]
        if words and (found := shutil.which(words[0])) is not None:
            yield Path(found)


def _pythons_of(program: Path) -> Iterator[Path]:
    """The virtual environment that a program belongs to, and the Python that it is."""
    if _is_in_environment(program):
        yield program.parent.parent
    real = program.resolve()
    if _is_python(real):
        yield real.parent.parent


def _folders_of(program: Path) -> Iterator[Path]:
    """The folders that a program needs besides folders of the system and of Pythons."""
    real = program.resolve()
    if _is_in_environment(program) or _is_python(real):
        return
    if "node_modules" in real.parts:
        yield Path(*real.parts[: real.parts.index("node_modules") + 1])
    else:
        yield real.parent


def _is_in_environment(program: Path) -> bool:
    """Whether it belongs to a virtual environment of Python."""
    return (program.parent.parent / _VIRTUAL_ENVIRONMENT).is_file()


def _is_python(program: Path) -> bool:
    """Whether it is a Python with its library beside."""
    library = program.parent.parent / "lib"
    return program.parent.name == "bin" and any(library.glob("python*")) and "python" in program.name


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
        *("HOME", "PWD", "OLDPWD", "SHLVL", "SHELL", "_", "MAIL", "HOSTNAME"),
        *("LS_COLORS", "PS1", "LINES", "COLUMNS"),
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
class Configuration:
    """What a program is started with, as `program_starter` reads it."""

    command: Sequence[str]
    files: Mapping[str, str]
    environment: Mapping[str, str] = field(repr=False)
    folder: str
    """Where it starts, empty."""
    remove: str | None = None
    """The folder that is removed at its end."""


def choose_variables(program: str, options: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The user's variables that a program gets, and the names of the withheld variables.

    `options`: further variables, as NAME or NAME=VALUE. A program without a preset also gets all variables
    that end in `BASE_URL_ENDING`. Raises BadRequestError for a variable that is not set, or is not the
    user's.
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
    root: PurePosixPath,
    *,
    address: str,
    prompt: str,
    tool_seconds: float,
    variables: Mapping[str, str],
) -> Configuration:
    """The configuration for one episode at this address, with files in the folder `root`.

    `tool_seconds`: how long a tool may take. `variables`: see `choose_variables`.

    Raises BadRequestError for a prompt that is too long to be handed over.
    """
    if len(prompt.encode()) > MAX_ARGUMENT_BYTES:
        raise BadRequestError(
            f"the prompt has more than {MAX_ARGUMENT_BYTES} bytes, which no argument of a program can have"
        )
    where, home, work = root / "configuration", str(root / "home"), str(root / "work")
    mcp_config, prompt_file = str(where / "mcp.json"), str(where / "prompt.txt")
    opencode = str(where / "opencode.json")
    milliseconds = round(tool_seconds * 1000)
    files = {
        mcp_config: json.dumps({"mcpServers": {SERVER: {"type": "http", "url": address}}}, indent=2),
        prompt_file: prompt,
        str(where / "claude" / "settings.json"): json.dumps(_claude_settings(), indent=2),
        str(where / "codex" / "config.toml"): _codex_settings(address, tool_seconds, variables),
        opencode: json.dumps(_opencode_settings(address, milliseconds, variables), indent=2),
        f"{home}/.gemini/settings.json": json.dumps(_gemini_settings(address, milliseconds), indent=2),
    }
    environment = {
        **variables,
        "HOME": home,
        "PWD": work,
        "DECATHLON_PROMPT": prompt,
        "DECATHLON_ADDRESS": address,
        "DECATHLON_MCP_CONFIG": mcp_config,
        "CLAUDE_CONFIG_DIR": str(where / "claude"),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "MCP_TIMEOUT": str(START_SECONDS * 1000),
        "MCP_TOOL_TIMEOUT": str(milliseconds),
        "CODEX_HOME": str(where / "codex"),
        "OPENCODE_CONFIG": opencode,
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "GEMINI_CLI_HOME": home,
    }
    values = {"prompt": prompt, "prompt_file": prompt_file, "mcp_config": mcp_config, "address": address}
    filled = [PLACEHOLDER.sub(lambda match: values[match[1]], argument) for argument in command]
    return Configuration(filled, files, environment, work)


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
