"""`demo`: a whole episode with its steps."""

from __future__ import annotations

import pytest

from decathlon_mcp.storage.database import SCHEMA_VERSION
from tests.cli.conftest import Shell


@pytest.mark.slow
@pytest.mark.usefixtures("namespaces")
def test_every_step_is_shown_and_the_reward_is_one(shell: Shell) -> None:
    done = shell.run("demo")
    assert done.returncode == 0, done
    output = done.stdout
    steps = [
        "listening at http://127.0.0.1:",
        "isolation namespaces, sandboxes see",
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
        "look      ",
    ]
    positions = [output.find(step) for step in steps]
    assert -1 not in positions, steps[positions.index(-1)]
    assert positions == sorted(positions)
    assert "\x1b[" not in output
    # The command works as it is printed.
    command, _, rest = output.splitlines()[-1].removeprefix("  look      ").partition(" view --open ")
    assert rest.endswith(f"decathlon-mcp/demo-store-v{SCHEMA_VERSION}")
    shell.check_printed(f"{command} view")


def test_a_task_without_a_script_gets_the_list_of_scripts(shell: Shell) -> None:
    output = shell.error("demo", "--task", "tune-reactr", status=2)
    assert output == "no script for tune-reactr; did you mean tune-reactor?"
    output = shell.error("demo", "--task", "nope", status=2)
    assert output.startswith("no script for nope; there are scripts for apply-change-requests, ")


def test_a_state_folder_that_cannot_be_created_is_one_line(shell: Shell) -> None:
    output = shell.error("demo", status=1, XDG_STATE_HOME="/proc/state")
    assert output == "/proc/state: No such file or directory: name another folder in XDG_STATE_HOME"
