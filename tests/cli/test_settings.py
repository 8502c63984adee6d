"""Settings: flags override variables, variables override the file; errors name the source of a value."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.probe.serving import SUITE

if TYPE_CHECKING:
    from tests.cli.conftest import Shell


def suites(shell: Shell, *arguments: str, **variables: str) -> set[str]:
    done = shell.run("tasks", "--json", *arguments, **variables)
    assert done.returncode == 0, done.stderr
    return {task["suite"] for task in json.loads(done.stdout)["tasks"]}


def write(shell: Shell, text: str, name: str = "decathlon.toml") -> Path:
    file = shell.folder / name
    file.write_text(text)
    return file


def test_the_default_is_the_bundled_suite(shell: Shell) -> None:
    assert suites(shell) == {"starter"}


def test_decathlon_toml_in_the_working_directory_is_read(shell: Shell) -> None:
    write(shell, f'suite = ["{SUITE}"]')
    assert suites(shell) == {"probe"}


def test_another_file_can_be_given_by_flag_or_variable(shell: Shell) -> None:
    write(shell, f'suite = ["{SUITE}"]', "other.toml")
    assert suites(shell, "--config", "other.toml") == {"probe"}
    assert suites(shell, DECATHLON_CONFIG="other.toml") == {"probe"}


def test_flags_override_variables_and_variables_override_the_file(shell: Shell) -> None:
    write(shell, f'suite = ["{SUITE}"]')
    assert suites(shell, DECATHLON_SUITE="starter") == {"starter"}
    assert suites(shell, "--suite", SUITE, DECATHLON_SUITE="starter") == {"probe"}


def test_flags_variables_and_the_file_accept_several_suites(shell: Shell) -> None:
    both = {"probe", "starter"}
    assert suites(shell, "--suite", SUITE, "--suite", "starter") == both
    assert suites(shell, DECATHLON_SUITE=os.pathsep.join(["starter", SUITE])) == both
    write(shell, f'suite = ["starter", "{SUITE}"]')
    assert suites(shell) == both


def test_a_file_may_hold_settings_of_other_commands(shell: Shell) -> None:
    write(shell, 'host = "127.0.0.1"\nport = 0\nmax_sandboxes = 8\nallowed_host = ["a.example"]')
    assert suites(shell) == {"starter"}


@pytest.mark.parametrize(
    ("arguments", "variables", "message"),
    [
        (["--max-sandboxes", "many"], {}, "--max-sandboxes should be a valid integer"),
        (["--idle-seconds", "-3"], {}, "--idle-seconds should be greater than 0, not '-3'"),
        (
            ["--provider", "kubernetes"],
            {},
            "--provider should be 'docker', 'bubblewrap' or 'local', not 'kubernetes'",
        ),
        ([], {"DECATHLON_CPUS": "0"}, "DECATHLON_CPUS should be greater than 0, not '0'"),
    ],
)
def test_an_invalid_value_is_reported_with_its_source(
    shell: Shell, arguments: list[str], variables: dict[str, str], message: str
) -> None:
    assert shell.error("serve", *arguments, status=2, **variables).startswith(message)


def test_an_invalid_value_in_the_file_is_reported_with_the_file(shell: Shell) -> None:
    write(shell, "max_sandboxes = 0")
    message = "decathlon.toml: max_sandboxes should be greater than or equal to 1, not '0'"
    assert shell.error("serve", status=2) == message


def test_an_unknown_name_in_the_file_gets_a_suggestion(shell: Shell) -> None:
    write(shell, "max_sandbox = 8")
    message = "decathlon.toml: there is no setting 'max_sandbox'; did you mean max_sandboxes?"
    assert shell.error("tasks", status=2) == message


def test_a_file_that_is_not_toml_is_an_error(shell: Shell) -> None:
    write(shell, "max_sandboxes: 8")
    assert shell.error("tasks", status=2).startswith("decathlon.toml: not TOML: ")


def test_a_missing_file_is_an_error(shell: Shell) -> None:
    assert shell.error("tasks", "--config", "no.toml", status=2) == "no.toml: No such file or directory"
