"""Help, version and usage errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from decathlon_mcp import __version__
from decathlon_mcp.cli.options import SECTIONS
from decathlon_mcp.settings import Settings, all_settings, plugin_settings

if TYPE_CHECKING:
    from tests.cli.conftest import Shell

COMMANDS = (
    "serve",
    "stdio",
    "tasks",
    "doctor",
    "token",
    "episodes",
    "show",
    "runs",
    "diff",
    "gc",
    "demo",
    "completion",
    "version",
)


def test_help_fits_on_a_screen_and_names_every_command(shell: Shell) -> None:
    done = shell.run("--help")
    assert done.returncode == 0
    assert all(f"│ {command} " in done.stdout for command in COMMANDS)
    assert len(done.stdout.splitlines()) <= 40


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
    assert done.stdout.splitlines() == ["episodes episode", "--provider --provider-option", "docker"]


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
    output = shell.run("serve", "--help").stdout
    for section in ("Address", *SECTIONS):
        assert f"╭─ {section} ─" in output
    for name in (*all_settings().model_fields, "host", "port"):
        assert f"--{name.replace('_', '-')} " in output
    for default in ("[default: starter]", "[default: 8765]", "[default: 1800]", "[default: 64]"):
        assert default in output


def test_help_of_tasks_omits_settings_that_it_does_not_use(shell: Shell) -> None:
    output = shell.run("tasks", "--help").stdout
    assert "--suite" in output
    assert "--idle-seconds" not in output
    assert shell.run("tasks", "--idle-seconds", "5", "--search", "nothing").returncode == 0


@pytest.mark.parametrize("arguments", [["version"], ["--version"]])
def test_version_is_printed(shell: Shell, arguments: list[str]) -> None:
    assert shell.run(*arguments).stdout == f"{__version__}\n"


def test_an_unknown_command_gets_a_suggestion(shell: Shell) -> None:
    message = shell.error("srve", status=2)
    assert 'Did you mean "serve"?' in message
    assert message.endswith(", tasks, token, verdict, verify, version, view")


def test_help_as_a_command_is_the_option(shell: Shell) -> None:
    assert shell.run("help").stdout == shell.run("--help").stdout
    assert shell.run("help", "token").stdout == shell.run("token", "--help").stdout


def test_an_unknown_flag_is_named(shell: Shell) -> None:
    assert "--prot" in shell.error("serve", "--prot", "80", status=2)


def test_an_unexpected_argument_is_named(shell: Shell) -> None:
    assert shell.error("version", "extra", status=2) == (
        "unexpected argument: extra; `decathlon-mcp version --help` shows what it takes"
    )


def test_a_task_given_to_a_command_of_options_gets_the_command_that_takes_it(shell: Shell) -> None:
    assert "`decathlon-mcp play TASK`" in shell.error("tasks", "tune-reactor", status=2)
    assert "`decathlon-mcp demo --task TASK`" in shell.error("demo", "nope", status=2)


def test_without_the_servers_dependencies_the_message_says_how_to_install_them() -> None:
    code = "import sys; sys.modules['cyclopts'] = None; from decathlon_mcp.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.endswith("pip install '.[server,starter]'")
