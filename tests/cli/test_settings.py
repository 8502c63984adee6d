"""Flags come before variables, variables before the file; whatever does not fit is named with its source."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.probe.serving import SUITE

if TYPE_CHECKING:
    from tests.cli.conftest import Shell


def suites(shell: Shell, *words: str, **variables: str) -> set[str]:
    done = shell.run("tasks", "--json", *words, **variables)
    assert done.returncode == 0, done.stderr
    return {task["suite"] for task in json.loads(done.stdout)["tasks"]}


def write(shell: Shell, text: str, name: str = "decathlon.toml") -> Path:
    file = shell.folder / name
    file.write_text(text)
    return file


def test_the_default_is_the_bundled_suite(shell: Shell) -> None:
    assert suites(shell) == {"starter"}


def test_a_file_that_lies_here_is_read(shell: Shell) -> None:
    write(shell, f'suite = ["{SUITE}"]')
    assert suites(shell) == {"probe"}


def test_a_file_can_be_named_by_flag_and_by_variable(shell: Shell) -> None:
    write(shell, f'suite = ["{SUITE}"]', "other.toml")
    assert suites(shell, "--config", "other.toml") == {"probe"}
    assert suites(shell, DECATHLON_CONFIG="other.toml") == {"probe"}


def test_variables_come_before_the_file_and_flags_before_variables(shell: Shell) -> None:
    write(shell, f'suite = ["{SUITE}"]')
    assert suites(shell, DECATHLON_SUITE="starter") == {"starter"}
    assert suites(shell, "--suite", SUITE, DECATHLON_SUITE="starter") == {"probe"}


def test_several_suites_may_be_given_everywhere(shell: Shell) -> None:
    both = {"probe", "starter"}
    assert suites(shell, "--suite", SUITE, "--suite", "starter") == both
    assert suites(shell, DECATHLON_SUITE=os.pathsep.join(["starter", SUITE])) == both
    write(shell, f'suite = ["starter", "{SUITE}"]')
    assert suites(shell) == both


def test_one_file_serves_every_command(shell: Shell) -> None:
    write(shell, 'host = "127.0.0.1"\nport = 0\nmax_sandboxes = 8\nallowed_host = ["a.example"]')
    assert suites(shell) == {"starter"}


@pytest.mark.parametrize(
    ("words", "variables", "said"),
    [
        (["--max-sandboxes", "many"], {}, "--max-sandboxes should be a valid integer"),
        (["--idle-seconds", "-3"], {}, "--idle-seconds should be greater than 0, not '-3'"),
        (["--provider", "kubernetes"], {}, "--provider should be 'docker' or 'local', not 'kubernetes'"),
        ([], {"DECATHLON_CPUS": "0"}, "DECATHLON_CPUS should be greater than 0, not '0'"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_its_source(
    shell: Shell, words: list[str], variables: dict[str, str], said: str
) -> None:
    assert shell.fault("serve", *words, status=2, **variables).startswith(said)


def test_a_value_of_the_file_that_does_not_fit_is_named_with_the_file(shell: Shell) -> None:
    write(shell, "max_sandboxes = 0")
    said = "decathlon.toml: max_sandboxes should be greater than or equal to 1, not '0'"
    assert shell.fault("serve", status=2) == said


def test_an_unknown_name_in_the_file_is_answered_with_one_near_it(shell: Shell) -> None:
    write(shell, "max_sandbox = 8")
    said = "decathlon.toml: there is no setting 'max_sandbox'; did you mean max_sandboxes?"
    assert shell.fault("tasks", status=2) == said


def test_a_file_that_is_not_toml_is_said_to_be_none(shell: Shell) -> None:
    write(shell, "max_sandboxes: 8")
    assert shell.fault("tasks", status=2).startswith("decathlon.toml: not TOML: ")


def test_a_named_file_that_is_not_there_is_said_to_be_missing(shell: Shell) -> None:
    assert shell.fault("tasks", "--config", "no.toml", status=2) == "no.toml: No such file or directory"
