"""Help, version and usage errors."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from cyclopts import App

from decathlon_mcp import __version__
from decathlon_mcp.cli import app
from decathlon_mcp.cli.options import SECTIONS
from decathlon_mcp.hooks import load, plugins
from decathlon_mcp.settings import Settings, all_settings, plugin_settings

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

COMMANDS = (
    "serve",
    "stdio",
    "tasks",
    "doctor",
    "token",
    "show",
    "runs",
    "gc",
    "demo",
    "completion",
)
MAX_COMMANDS = 24


def test_help_fits_on_a_screen_and_names_every_command_by_what_people_do(shell: Shell) -> None:
    done = shell.run("--help")
    assert done.returncode == 0
    assert all(f"│ {command} " in done.stdout for command in COMMANDS)
    assert re.findall(r"^╭─ ([\w ]+) ─", done.stdout, re.MULTILINE) == [*app.COMMANDS]
    assert len(re.findall(r"^│ [a-z][a-z-]* ", done.stdout, re.MULTILINE)) <= MAX_COMMANDS
    assert len(done.stdout.splitlines()) <= 48


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("export", "export [RUN] --to FORMAT --output FILE [OPTIONS]"),
        ("verify", "verify FILE [FILE...] [OPTIONS]"),
        ("episode call", "episode call EPISODE TOOL [ARGUMENTS] [OPTIONS]"),
        ("serve", "serve [OPTIONS]"),
    ],
)
def test_the_usage_names_every_argument(shell: Shell, command: str, usage: str) -> None:
    output = shell.run(*command.split(), "--help").stdout
    assert output.splitlines()[0] == f"Usage: decathlon-mcp {usage}"


def test_the_list_of_commands_says_the_first_line_of_each_docstring() -> None:
    for name, command in ((name, each) for plugin in plugins() for name, each in plugin.commands.items()):
        part = load(command.part)
        text = part.help if isinstance(part, App) else str(inspect.getdoc(part))
        assert text.partition("\n")[0] == command.summary, name


def test_no_help_shows_an_empty_default() -> None:
    for command in commands(app.command_line()):
        for argument in command.assemble_argument_collection(parse_docstring=False):
            show = argument.parameter.show_default
            default = argument.field_info.default
            if default == () or default is False:
                assert not (show(default) if callable(show) else show), argument.name


def commands(parent: App) -> Iterator[App]:
    """Every command."""
    if parent.default_command:
        yield parent
        return
    for name in parent:
        if not name.startswith("-"):
            yield from commands(parent[name])


def test_arguments_and_options_come_in_any_order(shell: Shell) -> None:
    orders = (
        ("export", "x", "--to", "jsonl", "--output", "out"),
        ("export", "--to", "jsonl", "x", "--output", "out"),
        ("export", "--to", "jsonl", "--output", "out", "x"),
    )
    assert len({shell.error(*order, status=2) for order in orders}) == 1
    assert shell.error("verify", "a", "--key", "0" * 64, "b", status=1)


def test_bash_completes_commands_options_and_their_values(shell: Shell, tmp_path: Path) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(shell.run("completion", "bash").stdout)
    source = f"""
        source {script}
        complete_line() {{
            COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
            _decathlon_mcp decathlon-mcp "${{@: -1}}" "${{@: -2:1}}"
            echo "${{COMPREPLY[*]}}"
        }}
        complete_line decathlon-mcp epi
        complete_line decathlon-mcp serve --prov
        complete_line .venv/bin/decathlon-mcp serve --provider d
    """
    done = subprocess.run(["bash", "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["episode", "--provider --provider-option", "docker"]


def test_completion_is_installed_in_the_home_folder(shell: Shell, tmp_path: Path) -> None:
    done = shell.run("completion", "bash", "--install", HOME=str(tmp_path))
    file, _ = done.stdout.splitlines()
    assert file in (tmp_path / ".bashrc").read_text()
    assert "complete -F" in Path(file).read_text()
    assert "completion bash" in shell.error("completion", status=1, SHELL="", PATH="")


def test_without_a_command_the_help_is_printed(shell: Shell) -> None:
    assert shell.run().stdout == shell.run("--help").stdout


def test_every_setting_has_a_section() -> None:
    placed = [name for names in SECTIONS.values() for name in names]
    assert sorted(placed) == sorted({*Settings.model_fields, "config"})
    assert all(part.section in SECTIONS for part in plugin_settings())


def test_help_of_serve_shows_every_setting_in_its_section_with_its_default(shell: Shell) -> None:
    output = shell.run("serve", "--help-all").stdout
    for section in ("Address", *SECTIONS):
        assert f"╭─ {section} ─" in output
    for name in (*all_settings().model_fields, "host", "port"):
        assert f"--{name.replace('_', '-')} " in output
    for default in ("[default: starter]", "[default: 8765]", "[default: 1800]", "[default: 64]"):
        assert default in output


@pytest.mark.parametrize(("command", "most"), [("serve", 20), ("stdio", 19)])
def test_help_of_a_server_shows_what_people_set_and_how_to_see_the_rest(
    shell: Shell, command: str, most: int
) -> None:
    output = shell.run(command, "--help").stdout
    listed = re.findall(r"^│ --([a-z-]+)", output, re.MULTILINE)
    assert {"suite", "provider", "max-sandboxes", "state"} <= {*listed}
    assert "idle-seconds" in listed
    assert "ready-file" not in listed
    assert len(listed) <= most
    assert "--help-all" in output
    assert {*listed} < {*re.findall(r"^│ --([a-z-]+)", shell.run(command, "--help-all").stdout, re.MULTILINE)}


def test_help_of_tasks_omits_settings_that_it_does_not_use(shell: Shell) -> None:
    output = shell.run("tasks", "--help").stdout
    assert "--suite" in output
    assert "--idle-seconds" not in output
    assert shell.run("tasks", "--idle-seconds", "5", "--search", "nothing").returncode == 0


def test_version_is_printed(shell: Shell) -> None:
    assert shell.run("--version").stdout == f"{__version__}\n"


def test_an_unknown_command_gets_a_suggestion(shell: Shell) -> None:
    message = shell.error("srve", status=2)
    assert 'Did you mean "serve"?' in message
    assert message.endswith(", tasks, token, verify, view")


def test_help_as_a_command_is_the_option(shell: Shell) -> None:
    assert shell.run("help").stdout == shell.run("--help").stdout
    assert shell.run("help", "token").stdout == shell.run("token", "--help").stdout


def test_an_unknown_flag_is_named(shell: Shell) -> None:
    assert "--prot" in shell.error("serve", "--prot", "80", status=2)


def test_an_unexpected_argument_is_named(shell: Shell) -> None:
    assert shell.error("key", "extra", status=2) == (
        "unexpected argument: extra; `decathlon-mcp key --help` shows what it takes"
    )


def test_a_missing_argument_is_named(shell: Shell) -> None:
    missing = "is missing; `decathlon-mcp export --help` says what it is"
    assert shell.error("export", "a", "--to", "jsonl", status=2) == f"--output {missing}"
    assert shell.error("init", status=2).startswith("FOLDER is missing")
    # Given without a value, or spelled otherwise, it is not missing.
    assert "--output requires an argument" in shell.error("export", "--to", "jsonl", "--output", status=2)
    assert "did you mean --output" in shell.error("export", "--to", "jsonl", "--otput", "a", status=2)


def test_a_task_given_to_a_command_of_options_gets_the_command_that_takes_it(shell: Shell) -> None:
    assert "`decathlon-mcp play TASK`" in shell.error("tasks", "tune-reactor", status=2)
    assert "`decathlon-mcp demo --task TASK`" in shell.error("demo", "nope", status=2)
