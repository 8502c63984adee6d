"""`demo`: a whole episode, shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.cli.conftest import Shell


@pytest.mark.slow
def test_every_step_is_shown_and_the_reward_is_one(shell: Shell) -> None:
    done = shell.run("demo")
    assert done.returncode == 0, done
    said = done.stdout
    steps = [
        "listening at http://127.0.0.1:",
        "tune-reactor (1 of 1)",
        "opening a sandbox",
        "prompt    You work in the folder",
        "tools     ",
        "→ lab__describe_reactor",
        '→ lab__run_simulation {"name":',
        "· minute 6 of 60 (1 of 10)",
        "← 61 °C, 4.0 g. Most product:",
        "→ claim_done",
        "→ evaluate",
        "verdict   the attempt succeeded",
        "reward    1.0",
    ]
    places = [said.find(step) for step in steps]
    assert -1 not in places, steps[places.index(-1)]
    assert places == sorted(places)
    assert "\x1b[" not in said


def test_a_task_without_a_player_is_answered_with_those_that_have_one(shell: Shell) -> None:
    said = shell.fault("demo", "--task", "nope", status=1)
    assert said.startswith("no player for nope; there are audit-expenses, ")
