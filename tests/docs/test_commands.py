"""Command lines, options and settings of `decathlon-mcp` that the pages show."""

from __future__ import annotations

import json
import os
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import decathlon_client
import pytest
from cyclopts import App, CycloptsError

from decathlon_mcp.cli.command_line import HELP_ALL, command_line
from decathlon_mcp.cli.options import CLIENT_NAMES, PREFIX, SERVE_NAMES, ServerOptions
from decathlon_mcp.types import as_object
from tests.docs.pages import PAGES, blocks, inline_code

COMMAND = "decathlon-mcp"
TEST_NAMES = (
    "require_browser",
    "require_compiler",
    "require_oldest_python",
    "require_docker",
    "require_gvisor",
    "require_mitmproxy",
)
"""Of variables that the tests read."""
OTHER_PROGRAMS = set(
    re.findall(
        r"--\S+",
        """
        --resume --rounds --servers --settle --serve --warm-up --cli --header --tool-arg --transport --silent
        --epochs --epochs-reducer --fail-on-error --log-dir --max-samples --message-limit --all --filter
        --forest --pid --target --rm --sizes --solver --time-limit --tools --custom-generate-function-path
        --cn_mode --env
        --internal --add-mcp --prefix --directory --isolated --draw --tasks --no-config --userns-remap --user
        --scope --resources --build-arg --detach --device --file --format --group-add --name --publish --cpus
        --memory --pids-limit --privileged --security-opt --tag --volume --rootless --write --agent --jobs-dir
        --model --path --yes --agent_workspace --launch_time --res_log_file --groundtruth_workspace
        """,
    )
)
"""Options of other programs, among them a task's own scripts."""
OTHER_ERRORS = {"CancelledError", "KeyError", "RuntimeError", "ToolError", "ValueError"}
"""Exceptions of other libraries."""
PROGRAM_NAMES = ("prompt", "address", "mcp_config")
"""Of variables that `run` sets for its program."""
SETTINGS = {*ServerOptions.model_fields, *SERVE_NAMES}


@pytest.fixture(autouse=True)
def no_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables and no file, so that a command line has only what the page shows."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


def test_command_lines_are_valid() -> None:
    refused: list[str] = []
    commands: set[str] = set()
    for page in PAGES:
        for arguments in (*_of_shell_blocks(page), *_of_inline_code(page), *_of_json(page)):
            commands.add(arguments[0] if arguments else "")
            try:
                command_line().parse_args(arguments, exit_on_error=False, print_error=False)
            except CycloptsError as error:
                refused.append(f"{page.name}: {shlex.join(arguments)}: {error}")
    assert refused == []
    assert {"serve", "tasks", "doctor", "token", "stdio"} <= commands


def test_options_exist() -> None:
    known = {name for command in _commands(command_line()) for name in _options(command)} | OTHER_PROGRAMS
    assert _unknown(r"(?<!\S)--[a-z][a-z_-]*", known) == []


def test_variables_exist() -> None:
    known = {PREFIX + name.upper() for name in (*SETTINGS, *CLIENT_NAMES, *TEST_NAMES, *PROGRAM_NAMES)}
    assert _unknown(rf"\b{PREFIX}[A-Z_]+", known) == []


def test_settings_in_toml_blocks_exist() -> None:
    files = [tomllib.loads(found.text) for page in PAGES for found in blocks(page, "toml")]
    # Only files of other programs have tables.
    names = {name for file in files for name, value in file.items() if not isinstance(value, dict)}
    assert names
    assert names <= SETTINGS


def test_errors_exist() -> None:
    assert _unknown(r"\b[A-Z]\w+Error\b", {*decathlon_client.__all__, *OTHER_ERRORS}) == []


def _unknown(pattern: str, known: set[str]) -> list[str]:
    """What matches in the pages' code spans and is not known, with the pages' names."""
    return [
        f"{page.name}: {name}"
        for page in PAGES
        for code in inline_code(page)
        for name in re.findall(pattern, code)
        if name not in known
    ]


def _of_shell_blocks(page: Path) -> Iterator[list[str]]:
    for found in blocks(page, "sh", "bash"):
        for line in found.text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|| > | >> | -- ", line):
                yield from _arguments(part)


def _of_inline_code(page: Path) -> Iterator[list[str]]:
    for code in inline_code(page):
        if code.startswith(f"{COMMAND} ") and "…" not in code:
            yield from _arguments(code)


def _arguments(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # a quoted text that goes on in the next line
        return
    if words and words[0].rpartition("/")[2] == COMMAND:
        yield words[1:]


def _of_json(page: Path) -> Iterator[list[str]]:
    """The arguments in the configurations of desktop programs."""
    for found in blocks(page, "json"):
        for entry in _objects(json.loads(found.text)):
            if str(entry.get("command", "")).endswith(COMMAND):
                yield entry["args"]
    for code in inline_code(page):
        if code.startswith('"args": '):
            yield json.loads(code.removeprefix('"args": '))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if (json_object := as_object(value)) is not None:
        yield json_object
        for member in json_object.values():
            yield from _objects(member)


def _commands(parent: App) -> Iterator[App]:
    for name in parent:
        if not name.startswith("-"):
            yield from [parent[name]] if parent[name].default_command else _commands(parent[name])


def _options(command: App) -> Iterator[str]:
    yield from ("--help", HELP_ALL)
    for argument in command.assemble_argument_collection(parse_docstring=False):
        yield from argument.names
