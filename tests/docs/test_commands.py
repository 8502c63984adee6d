"""Every command line of `decathlon-mcp` on the pages is one that it understands."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cyclopts import App

from decathlon_mcp.cli.app import app
from decathlon_mcp.cli.options import PREFIX
from decathlon_mcp.types import as_object
from tests.docs.pages import PAGES, REPOSITORY, blocks, inline

COMMAND = "decathlon-mcp"
FOREIGN = {
    *("--cli", "--header", "--tool-arg", "--transport", "--silent"),
    *("--fail-on-error", "--log-dir", "--max-samples"),
    *("--cn_mode", "--env", "--add-mcp"),
}
"""Options of other programs that the pages name."""
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


@pytest.fixture(autouse=True)
def nothing_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables, no file: only what the page says."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        monkeypatch.delenv(name)


@each_page
def test_every_command_line_is_understood(page: Path) -> None:
    for words in [*_of_shells(page), *_of_texts(page), *_of_json(page)]:
        app.parse_args(words, exit_on_error=False, print_error=False)


@each_page
def test_every_option_named_is_one(page: Path) -> None:
    known = {name for command in _commands(app) for name in _options(command)} | FOREIGN
    named = {
        name
        for token in inline(page, "code_inline")
        for name in re.findall(r"(?<!\S)--[a-z][a-z_-]*", token.content)
    }
    modules = {"--agent_workspace", "--launch_time", "--res_log_file", "--groundtruth_workspace"}
    assert named - known - modules == set()


def test_the_pages_show_command_lines_at_all() -> None:
    shown = {tuple(words[:1]) for page in PAGES for words in _of_shells(page)}
    assert {("serve",), ("tasks",), ("doctor",), ("token",), ("stdio",)} <= shown


def _of_shells(page: Path) -> Iterator[list[str]]:
    for found in blocks(page, "sh", "bash"):
        for line in found.text.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|| > | >> | -- ", line):
                yield from _ours(part)


def _of_texts(page: Path) -> Iterator[list[str]]:
    for token in inline(page, "code_inline"):
        if token.content.startswith(f"{COMMAND} ") and "…" not in token.content:
            yield from _ours(token.content)


def _ours(line: str) -> Iterator[list[str]]:
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # half of a quoted text
        return
    if words and words[0].rpartition("/")[2] == COMMAND:
        yield words[1:]


def _of_json(page: Path) -> Iterator[list[str]]:
    for found in blocks(page, "json"):
        for entry in _objects(json.loads(found.text)):
            if str(entry.get("command", "")).endswith(COMMAND):
                yield entry["args"]
    for token in inline(page, "code_inline"):
        if token.content.startswith('"args": '):
            yield json.loads(token.content.removeprefix('"args": '))


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if (found := as_object(value)) is not None:
        yield found
        for inner in found.values():
            yield from _objects(inner)


def _commands(of: App) -> Iterator[App]:
    for name in of:
        if not name.startswith("-"):
            yield from [of[name]] if of[name].default_command else _commands(of[name])


def _options(command: App) -> Iterator[str]:
    yield "--help"
    for argument in command.assemble_argument_collection(parse_docstring=False):
        yield from argument.names
