"""Help, version and usage errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from decathlon_mcp import __version__
from decathlon_mcp.cli import command_line
from decathlon_mcp.cli.options import SECTIONS
from decathlon_mcp.settings import Settings, all_settings, plugin_settings
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
MAX_COMMANDS, SCREEN_LINES = 24, 48


def test_help_fits_on_a_screen_and_names_every_command_by_what_people_do(shell: Shell) -> None:
    done = shell.run("--help")
    assert done.returncode == 0
    assert all(f"│ {command} " in done.stdout for command in COMMANDS)
    assert re.findall(r"^╭─ ([\w ]+) ─", done.stdout, re.MULTILINE) == [*command_line.COMMANDS]
    assert len(re.findall(r"^│ [a-z][a-z-]* ", done.stdout, re.MULTILINE)) <= MAX_COMMANDS
    assert len(done.stdout.splitlines()) <= SCREEN_LINES


def test_the_list_of_commands_needs_no_docstrings(shell: Shell) -> None:
    done = subprocess.run(
        [sys.executable, "-OO", "-m", "decathlon_mcp.cli", "--help"],
        cwd=shell.folder,
        env=shell.environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == shell.run("--help").stdout


@pytest.mark.parametrize("group", ["episode", "recordings"])
def test_commands_of_a_group_are_not_called_plug_ins(shell: Shell, group: str) -> None:
    assert re.findall(r"^╭─ ([\w -]+?) ─", shell.run(group).stdout, re.MULTILINE) == ["Commands"]


def test_help_of_every_command_fits_on_a_screen(shell: Shell) -> None:
    commands = [name for name in command_line.command_line() if not name.startswith("-")]
    lines = {name: len(shell.run(name, "--help").stdout.splitlines()) for name in commands}
    assert {name: count for name, count in lines.items() if count > SCREEN_LINES} == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("serve --prot 80", "--prot"),
        ("key extra", "unexpected argument: extra; `decathlon-mcp key --help` shows what it takes"),
        ("export a --to jsonl", "--output is missing; `decathlon-mcp export --help` says what it is"),
        ("export a --to jsonl out", "--output is missing"),
        ("export --to jsonl --otput a", "did you mean --output"),
        ("tasks tune-reactor", "`decathlon-mcp play TASK`"),
        ("srve", 'Did you mean "serve"?'),
    ],
)
def test_a_wrong_command_line_is_named(shell: Shell, words: str, message: str) -> None:
    assert message in shell.error(*words.split(), status=2)


def test_arguments_and_options_come_in_any_order(shell: Shell) -> None:
    orders = ("x --to jsonl --output out", "--to jsonl x --output out", "--to jsonl --output out x")
    assert len({shell.error("export", *order.split(), status=2) for order in orders}) == 1


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


def test_standard_streams_that_are_closed_are_no_descriptors_of_the_event_loop(shell: Shell) -> None:
    program = "import os, sys; from decathlon_mcp.cli import main\ntry: main()\nfinally: os.fstat(0)"
    done = subprocess.run(
        [sys.executable, "-c", program, "--version"],
        cwd=shell.folder,
        env=shell.environment,
        preexec_fn=lambda: os.close(0),
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_version_is_printed(shell: Shell) -> None:
    assert shell.run("--version").stdout == f"{__version__}\n"
